//! Defines when a replayed response equals the recorded one, and reports differences.

use std::fmt;

use orlop_wire::proto::client::etcdserverpb::StatusResponse;

use super::trace::{Answer, Request};

/// The server that the recording is replayed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    Orlop,
    /// The minor version; the recording is of 3.6.
    Etcd {
        minor: u32,
    },
}

/// A part of a response that may differ from the recording.
pub struct Exception {
    field: &'static str,
    why: &'static str,
    on: On,
    /// Replaces the part by the same content in the recorded and the replayed response.
    mask: fn(&mut Answer),
}

#[derive(Clone, Copy)]
enum On {
    All,
    EtcdBefore36,
}

/// All permitted differences. In addition, events are compared as one list per watch: the server chooses how to group
/// them into responses, whose header must have a revision that covers the events.
pub const EXCEPTIONS: [Exception; 8] = [
    Exception {
        field: "header.cluster_id, header.member_id, header.raft_term",
        why: "they identify the cluster",
        on: On::All,
        mask: |answer| {
            if let Some(header) = answer.header_mut() {
                (header.cluster_id, header.member_id, header.raft_term) = (0, 0, 0);
            }
        },
    },
    Exception {
        field: "Status.leader",
        why: "it identifies the leader; only its presence is compared",
        on: On::All,
        mask: |answer| mask_status(answer, |status| status.leader = status.leader.min(1)),
    },
    Exception {
        field: "Status.raftIndex, raftAppliedIndex, raftTerm",
        why: "they include internal entries of the cluster; only their presence is compared",
        on: On::All,
        mask: |answer| {
            mask_status(answer, |status| {
                status.raft_index = status.raft_index.min(1);
                status.raft_applied_index = status.raft_applied_index.min(1);
                status.raft_term = status.raft_term.min(1);
            });
        },
    },
    Exception {
        field: "Status.dbSize, dbSizeInUse",
        why: "they depend on the storage; only the presence of a size is compared",
        on: On::All,
        mask: |answer| {
            mask_status(answer, |status| {
                status.db_size = status.db_size.min(1);
                status.db_size_in_use = status.db_size_in_use.min(1);
            });
        },
    },
    Exception {
        field: "Status.version, its last part",
        why: "the recording is of 3.6.13; all 3.6 releases have the same features",
        on: On::All,
        mask: |answer| {
            mask_status(answer, |status| {
                if let Some((minor, _patch)) = status.version.rsplit_once('.') {
                    status.version.truncate(minor.len());
                }
            });
        },
    },
    Exception {
        field: "Status.version, all of it",
        why: "an older etcd reports its own version",
        on: On::EtcdBefore36,
        mask: |answer| mask_status(answer, |status| status.version.clear()),
    },
    Exception {
        field: "Status.storageVersion, downgradeInfo",
        why: "new in etcd 3.6",
        on: On::EtcdBefore36,
        mask: |answer| {
            mask_status(answer, |status| {
                status.storage_version.clear();
                status.downgrade_info = None;
            });
        },
    },
    Exception {
        field: "Status.dbSizeQuota",
        why: "new in etcd 3.6; the quota is a setting of each server",
        on: On::All,
        mask: |answer| mask_status(answer, |status| status.db_size_quota = 0),
    },
];

/// A difference, with its place in the recording.
#[derive(Debug)]
pub struct Mismatch {
    pub seq: u64,
    pub request: Request,
    pub what: String,
}

/// Returns the difference, or `None` if the responses are equal.
pub fn difference(peer: Peer, expected: &Answer, got: &Answer) -> Option<String> {
    let (expected, not_compared) = masked(peer, expected);
    let (got, _) = masked(peer, got);
    (expected != got).then(|| {
        let not_compared: Vec<_> = not_compared.iter().map(|it| format!("{} ({})", it.field, it.why)).collect();
        format!("{}\nnot compared: {}", line_difference(&expected, &got), not_compared.join("; "))
    })
}

/// Returns the differing lines with a few lines of context.
pub fn line_difference(expected: &impl fmt::Debug, got: &impl fmt::Debug) -> String {
    const CONTEXT: usize = 8;
    const LINES_MAX: usize = 40;
    let (expected, got) = (format!("{expected:#?}"), format!("{got:#?}"));
    let (expected, got): (Vec<_>, Vec<_>) = (expected.lines().collect(), got.lines().collect());
    let before = expected.iter().zip(&got).take_while(|(e, g)| e == g).count();
    let shorter = expected.len().min(got.len());
    let ends = expected.iter().rev().zip(got.iter().rev()).take(shorter - before);
    let after = ends.take_while(|(e, g)| e == g).count();
    let (last_expected, last_got) = (expected.len() - after, got.len() - after);

    let same =
        |lines: &[&str]| lines.iter().take(CONTEXT).map(|line| format!("    {}", cut(line, 0))).collect::<Vec<_>>();
    let mut text = same(&expected[before.saturating_sub(CONTEXT)..before]);
    let differing = |sign: char, lines: &[&str], other: &[&str]| {
        let pairs = lines.iter().zip(padded(other)).take(LINES_MAX);
        pairs.map(|(line, other)| format!("  {sign} {}", cut(line, common(line, other)))).collect::<Vec<_>>()
    };
    let (expected_lines, got_lines) = (&expected[before..last_expected], &got[before..last_got]);
    text.extend(differing('-', expected_lines, got_lines));
    text.extend(differing('+', got_lines, expected_lines));
    text.extend(same(&expected[last_expected..]));
    format!("- expected, + got\n{}", text.join("\n"))
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seq, request, what } = self;
        let method = request.method();
        writeln!(f, "the response differs from the recorded one: seq={seq} method={method}")?;
        writeln!(f, "request: {:.2000}", format!("{request:?}"))?;
        f.write_str(what)
    }
}

/// Returns the response without the parts that may differ, and the exceptions that removed something.
fn masked(peer: Peer, answer: &Answer) -> (Answer, Vec<&'static Exception>) {
    let mut masked = answer.clone();
    let mut applied = Vec::new();
    for exception in applying(peer) {
        let before = masked.clone();
        (exception.mask)(&mut masked);
        if masked != before {
            applied.push(exception);
        }
    }
    (masked, applied)
}

fn applying(peer: Peer) -> impl Iterator<Item = &'static Exception> {
    const ALL: &[Exception] = &EXCEPTIONS;
    ALL.iter().filter(move |exception| match (exception.on, peer) {
        (On::All, _) => true,
        (On::EtcdBefore36, Peer::Etcd { minor }) => minor < 6,
        (On::EtcdBefore36, Peer::Orlop) => false,
    })
}

fn mask_status(answer: &mut Answer, mask: impl FnOnce(&mut StatusResponse)) {
    if let Answer::Status(status) = answer {
        mask(status);
    }
}

/// Returns the lines, followed by empty lines without end.
fn padded<'a>(lines: &'a [&'a str]) -> impl Iterator<Item = &'a str> {
    lines.iter().copied().chain(std::iter::repeat(""))
}

/// Returns the length of the common prefix in characters.
fn common(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count()
}

/// Returns at most 200 characters of the text around the character at `point`.
fn cut(text: &str, point: usize) -> String {
    const BEFORE: usize = 80;
    const CHARS_MAX: usize = 200;
    let length = text.chars().count();
    let start = if length > CHARS_MAX && point < length { point.saturating_sub(BEFORE) } else { 0 };
    let part: String = text.chars().skip(start).take(CHARS_MAX).collect();
    match (start, length - start > CHARS_MAX) {
        (0, false) => part,
        (0, true) => format!("{part}... ({length} characters)"),
        (_, false) => format!("... {part}"),
        (_, true) => format!("... {part}... ({length} characters)"),
    }
}
