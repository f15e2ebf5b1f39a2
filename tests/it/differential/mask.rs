//! Masks the parts of responses that differ between two servers.

use orlop_wire::proto::client::etcdserverpb::{ResponseHeader, ResponseOp, TxnResponse, response_op::Response};

use super::op::Answer;

/// Masks ids and the raft term, and keeps only whether they are set.
pub fn mask(header: &mut Option<ResponseHeader>) {
    if let Some(header) = header {
        header.cluster_id = header.cluster_id.min(1);
        header.member_id = header.member_id.min(1);
        header.raft_term = header.raft_term.min(1);
    }
}

pub fn masked(mut answer: Answer) -> Answer {
    match &mut answer {
        Answer::Put(it) => mask(&mut it.header),
        Answer::Range(it) => mask(&mut it.header),
        Answer::DeleteRange(it) => mask(&mut it.header),
        Answer::Txn(it) => mask_txn(it),
        Answer::Compact(it) => mask(&mut it.header),
        Answer::Grant(it) => mask(&mut it.header),
        Answer::GrantBriefly { grant, put, revoke } => {
            mask(&mut grant.header);
            put.iter_mut().for_each(|it| mask(&mut it.header));
            mask(&mut revoke.header);
        }
        Answer::Revoke(it) => mask(&mut it.header),
        Answer::KeepAlive(answers) => answers.iter_mut().for_each(|it| mask(&mut it.header)),
        Answer::TimeToLive(it) => mask(&mut it.header),
        Answer::Leases(it) => mask(&mut it.header),
        Answer::Status(it) => mask(&mut it.header),
        Answer::Members(it) => mask(&mut it.header),
        Answer::Watch(it) => mask(&mut it.header),
        Answer::Auth { header, .. } => mask(header),
        Answer::Silence | Answer::Refused { .. } | Answer::Stalled(_) => {}
    }
    answer
}

fn mask_txn(txn: &mut TxnResponse) {
    mask(&mut txn.header);
    for ResponseOp { response } in &mut txn.responses {
        match response {
            Some(Response::ResponseRange(it)) => mask(&mut it.header),
            Some(Response::ResponsePut(it)) => mask(&mut it.header),
            Some(Response::ResponseDeleteRange(it)) => mask(&mut it.header),
            Some(Response::ResponseTxn(it)) => mask_txn(it),
            None => {}
        }
    }
}
