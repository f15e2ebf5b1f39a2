//! Bodies of requests: their memory and deadlines while they arrive, and the messages in them.

use std::future::poll_fn;

use axum::body::BodyDataStream;
use bytes::Bytes;
use futures_util::{FutureExt as _, Stream, StreamExt as _, stream};
use http_body::Body as _;
use prost_reflect::MessageDescriptor;
use tonic::Status;

use super::{json_to_frame, memory::Memory, split::Values};
use crate::api::{
    grpc::received::Received,
    status::{message_too_large, request_too_late, too_many_requests},
};
use orlop_core::overload::PartialRequest;

/// Reads a whole body of at most `bytes_max`. Partial bodies need memory of partial requests, complete ones do not.
///
/// # Errors
///
/// If the body is too long or too late, there is no memory for a part of it, or it cannot be read.
pub async fn read_body(
    mut body: BodyDataStream,
    partial: &mut PartialRequest,
    bytes_max: usize,
) -> Result<Received, Status> {
    let mut text = Received::default();
    let mut is_excess = false;
    loop {
        let data = if is_excess {
            // The rest may have arrived as well, for example the empty frame with which some clients end the body.
            next(&mut body, partial).now_or_never().unwrap_or_else(|| Err(too_many_requests()))
        } else {
            next(&mut body, partial).await
        };
        let Some(data) = data? else { return Ok(text) };
        if text.len() + data.len() > bytes_max {
            return Err(message_too_large(text.len() + data.len(), bytes_max));
        }
        text.push_copy(&data);
        // It counts until it is converted.
        let is_full = partial.set_bytes(text.len()).is_err();
        is_excess = is_full && !body.is_end_stream();
    }
}

/// Returns the next data of a body.
///
/// # Errors
///
/// If the message is not complete within its deadline, or the body cannot be read.
pub async fn next(body: &mut BodyDataStream, partial: &mut PartialRequest) -> Result<Option<Bytes>, Status> {
    tokio::select! {
        data = body.next() => data.transpose().map_err(|error| Status::invalid_argument(error.to_string())),
        _ = poll_fn(|context| partial.poll_deadline(context)) => Err(request_too_late()),
    }
}

/// Converts concatenated JSON values to frames; `data` is the beginning of the body. Each value is converted as soon as it
/// is complete.
pub fn request_frames(
    body: BodyDataStream,
    data: Bytes,
    kind: MessageDescriptor,
    memory: Memory,
    partial: PartialRequest,
    values: Values,
) -> impl Stream<Item = Result<Bytes, axum::Error>> {
    let start = (body, kind, memory, partial, values, data);
    stream::try_unfold(start, |(mut body, kind, memory, mut partial, mut values, mut data)| async move {
        loop {
            if let Some(text) = values.next(&mut data).map_err(axum::Error::new)? {
                let framed = json_to_frame(kind.clone(), text, &memory).await.map_err(axum::Error::new)?;
                // The next message has its own deadline.
                partial.set_bytes(0).map_err(|_| axum::Error::new(too_many_requests()))?;
                return Ok(Some((framed, (body, kind, memory, partial, values, data))));
            }
            partial.set_bytes(values.buffered_bytes()).map_err(|_| axum::Error::new(too_many_requests()))?;
            match next(&mut body, &mut partial).await.map_err(axum::Error::new)? {
                Some(more) => data = more,
                None if values.buffered_bytes() == 0 => return Ok(None),
                None => return Err(axum::Error::new(Values::incomplete())),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, sync::Arc, time::Duration};

    use axum::{Router, body::Body};
    use orlop_wire::proto::DESCRIPTORS;
    use prost_reflect::DescriptorPool;
    use tokio::time::sleep;

    use super::*;
    use crate::http::gateway::Gateway;

    #[tokio::test(start_paused = true)]
    async fn each_message_of_a_stream_has_its_own_deadline() {
        let pieces = stream::iter(["{}{", "}{", "}{", "}"]).then(|piece| async move {
            sleep(Duration::from_secs(40)).await;
            Ok::<_, Infallible>(piece)
        });
        let pool = DescriptorPool::decode(DESCRIPTORS).expect("descriptors");
        let kind = pool.get_message_by_name("etcdserverpb.WatchRequest").expect("a message");
        let body = Body::from_stream(pieces).into_data_stream();
        let partial = PartialRequest::new(&Arc::default());
        let read: Vec<_> =
            request_frames(body, Bytes::new(), kind, Memory::default(), partial, Values::new(1_000)).collect().await;
        assert!(read.len() == 4 && read.iter().all(Result::is_ok), "{read:?}");
    }

    #[tokio::test]
    async fn body_of_the_longest_message_is_read_and_a_longer_one_is_refused() {
        const MESSAGE_BYTES_MAX: usize = 2 << 20;
        let gateway = Gateway::new(DescriptorPool::new(), Router::new(), Arc::default(), MESSAGE_BYTES_MAX);
        let base64_bytes = MESSAGE_BYTES_MAX.div_ceil(3) * 4;
        for (len, is_read) in
            [(base64_bytes, true), (gateway.json_bytes_max, true), (gateway.json_bytes_max + 1, false)]
        {
            let mut partial = PartialRequest::new(&gateway.partial_requests);
            let body = Body::from(vec![b' '; len]).into_data_stream();
            let read = read_body(body, &mut partial, gateway.json_bytes_max).await;
            assert_eq!(read.is_ok(), is_read, "{len} bytes");
        }
    }

    #[tokio::test]
    async fn body_needs_memory_until_it_is_complete() {
        let all = Arc::default();
        let mut others = PartialRequest::new(&all);
        assert!(others.set_bytes(1 << 30).is_err(), "all memory is used");
        let pieces = |pieces: &'static [&'static str]| stream::iter(pieces.iter().copied().map(Ok::<_, Infallible>));
        for (name, body, is_read) in [
            ("one piece", Body::from("{}"), true),
            ("its end is another piece", Body::from_stream(pieces(&["{}", ""])), true),
            ("the end is to come", Body::from_stream(pieces(&["{}"]).chain(stream::pending())), false),
            ("a part is to come", Body::from_stream(pieces(&["{"]).chain(stream::pending())), false),
        ] {
            let read = read_body(body.into_data_stream(), &mut PartialRequest::new(&all), 1_000).await;
            assert_eq!(read.is_ok(), is_read, "{name}");
        }
    }
}
