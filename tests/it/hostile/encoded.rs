//! Calls whose messages are encoded once, so that it costs the server more to read them than us to send them.

use bytes::{Buf as _, BufMut as _, Bytes};
use http::uri::PathAndQuery;
use tonic::{
    Request, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::Endpoint,
};

/// Takes a message as it is, and passes over what is answered.
struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for Encoded {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        buffer.advance(buffer.remaining());
        Ok(Some(()))
    }
}

/// Calls a method with the same message again and again, whatever is answered.
pub async fn call_in_a_loop(endpoint: String, method: &'static str, message: Bytes) {
    let endpoint = Endpoint::from_shared(endpoint).expect("an endpoint");
    let mut grpc = Grpc::new(endpoint.connect().await.expect("a ready server accepts connections"));
    loop {
        grpc.ready().await.expect("the connection lasts");
        let _ = grpc.unary(Request::new(message.clone()), PathAndQuery::from_static(method), Encoded).await;
        tokio::task::yield_now().await;
    }
}
