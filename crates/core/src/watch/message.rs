//! The messages of a watch stream.

use std::borrow::Cow;

use bytes::Bytes;

use crate::types::{Revision, WatchId};

/// A message on a watch stream. `revision` is the revision in its header.
#[derive(Clone, Debug)]
pub enum Message {
    Created {
        id: WatchId,
        revision: Revision,
    },
    /// The watch was not created; the stream continues.
    Refused {
        revision: Revision,
        reason: NotCreated,
    },
    Canceled {
        id: WatchId,
        revision: Revision,
    },
    /// The watch ended because it needs compacted revisions.
    Compacted {
        id: WatchId,
        compact_revision: Revision,
    },
    /// All events at or below the revision were sent before.
    Progress {
        id: WatchId,
        revision: Revision,
    },
    Events {
        id: WatchId,
        /// At or above the newest event's revision.
        revision: Revision,
        /// Encoded events. Each item contains one or more.
        events: Vec<Bytes>,
        /// Whether the next message continues this one.
        fragment: bool,
    },
}

/// The reason why a watch was not created.
#[derive(Clone, Debug)]
pub enum NotCreated {
    /// The stream has a watch with this ID.
    DuplicateId,
    /// The watches of all streams have reached the limit of their memory.
    TooManyRequests,
    /// The owner of the session refused it, with this text for the client.
    Other(Cow<'static, str>),
}

/// The reason why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    ClientGone,
    ServerStopped,
    /// The client asked for a stream that ends when the server is cut off from the cluster, and it is.
    NoLeader,
    /// A request could not be read.
    BadRequest,
    /// A bug in the server.
    Failed,
}
