//! A log, a hub and streams on which a schedule runs.

use std::{pin::pin, sync::Arc};

use futures_util::{FutureExt as _, StreamExt as _, poll};
use proptest::prelude::*;

use super::{
    history::History,
    reader::{Checked, Reader},
    schedule::{Action, Concurrent, Create, STREAMS, Step},
};
use crate::{
    index::{CompactionCursor, TreeIndex},
    log::{Append, Appended, Log, Reclaim, memory::MemoryLog},
    sync::RwLock,
    types::{Change, Revision, WatchId},
    watch::{Hub, Messages, Outbox, Session, Spec},
};

pub(super) struct World {
    store: TestStore,
    history: History,
    streams: Vec<Stream>,
}

/// What the hub knows of the past besides the log.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lookup {
    Index,
    Nothing,
}

/// A log, its index and a hub.
pub(super) struct TestStore {
    pub(super) log: Arc<MemoryLog>,
    pub(super) hub: Arc<Hub>,
    index: Arc<RwLock<TreeIndex>>,
}

impl TestStore {
    pub(super) fn new(lookup: Lookup) -> Self {
        let (hub, index) = (Hub::new(Revision::EMPTY, None, Arc::default()), Arc::default());
        let hub = match lookup {
            Lookup::Index => hub.with_index(Arc::clone(&index)),
            Lookup::Nothing => hub,
        };
        Self { log: Arc::new(MemoryLog::with_yielding_values()), hub: Arc::new(hub), index }
    }

    pub(super) async fn publish(&self, changes: Vec<Change>) {
        let (Some(first), Some(last)) = (changes.first(), changes.last()) else { return };
        let append = Append::rows(first.row.revision.prev(), &changes);
        assert_eq!(self.log.append(append).await.unwrap(), Appended::Done);
        self.hub.publish(&changes, last.row.revision, |changes| {
            let mut index = self.index.write();
            changes.iter().for_each(|change| index.apply(change));
        });
    }

    async fn compact(&self, history: &mut History, back: i64, purge: bool) {
        let revision = Revision(history.index.head().0 - back);
        if Some(revision) <= history.compact_revision {
            return;
        }
        let append = Append { compact: Some(revision), ..Append::rows(history.index.head(), &[]) };
        assert_eq!(self.log.append(append).await.unwrap(), Appended::Done);
        self.hub.record_compaction(revision, || {
            self.index.write().begin_compaction(revision);
            history.compact_revision = Some(revision);
        });
        if purge {
            let mut removed = Vec::new();
            while self.index.write().compact_step(&mut CompactionCursor::default(), usize::MAX, &mut removed) {}
            let rows: Vec<_> = removed.iter().map(|superseded| superseded.row).collect();
            self.log.reclaim(Reclaim::Rows { rows: &rows, compacted: revision, server: 0 }).await.unwrap();
        }
    }
}

struct Stream {
    session: Session,
    outbox: Arc<Outbox>,
    messages: Messages,
    reader: Reader,
    /// Whether the session had work after the last call of its methods. If not, it sleeps until it is notified.
    has_work: bool,
}

impl World {
    pub(super) fn new(lookup: Lookup) -> Self {
        let store = TestStore::new(lookup);
        let TestStore { log, hub, .. } = &store;
        let stream = || {
            let outbox = Arc::new(hub.outbox());
            let session = Session::new(Arc::clone(hub), Arc::clone(log) as Arc<dyn Log>, Arc::clone(&outbox));
            let messages = Messages::new(Arc::clone(&outbox));
            Stream { session, messages, outbox, reader: Reader::default(), has_work: false }
        };
        let streams = (0..STREAMS).map(|_| stream()).collect();
        Self { store, history: History::default(), streams }
    }

    pub(super) async fn run(&mut self, step: Step) -> Checked {
        match step {
            Step::Publish { txns, concurrent } => {
                let hub = &self.store.hub;
                let changes = self.history.commit(&txns, hub.wants_prev());
                if let Some((stream, create)) = concurrent {
                    self.streams[stream].create(&self.history, create, hub.head());
                }
                self.store.publish(changes).await;
                Ok(())
            }
            Step::Stream(stream, action) => self.act(stream, action).await,
            Step::Compact { back, purge } => {
                self.store.compact(&mut self.history, back, purge).await;
                Ok(())
            }
        }
    }

    async fn act(&mut self, stream: usize, action: Action) -> Checked {
        let Self { store, history, streams } = self;
        let stream = &mut streams[stream];
        let head = store.hub.head();
        // Requests are read only while the outbox has capacity.
        let has_capacity = stream.outbox.has_capacity();
        match action {
            Action::Create(create) if has_capacity => stream.create(history, create, head),
            Action::Cancel(position) if has_capacity => stream.cancel(position),
            Action::Progress if has_capacity => {
                stream.reader.progress_requested(head);
                stream.session.request_progress();
            }
            Action::Tick if has_capacity => stream.session.tick(),
            Action::Create(_) | Action::Cancel(_) | Action::Progress | Action::Tick => return Ok(()),
            Action::Read(messages) => return stream.read(history, messages),
            Action::HandleNotifications => {
                stream.handle_notifications();
                return Ok(());
            }
            Action::Advance { .. } if !stream.has_work => return Ok(()),
            Action::Advance { concurrent, cancel_before_read } => {
                let Stream { session, messages, reader, .. } = stream;
                let mut advance = pin!(session.advance());
                let mut waits = poll!(&mut advance).is_pending();
                for operations in concurrent {
                    if !waits {
                        break;
                    }
                    for operation in operations {
                        match operation {
                            Concurrent::Publish(txn) => {
                                let changes = history.commit(&[txn], store.hub.wants_prev());
                                store.publish(changes).await;
                            }
                            Concurrent::Compact { back, purge } => store.compact(history, back, purge).await,
                            Concurrent::Read(messages_max) => read(messages, reader, history, messages_max)?,
                        }
                    }
                    waits = !cancel_before_read && poll!(&mut advance).is_pending();
                }
                if waits {
                    advance.await.unwrap();
                }
            }
        }
        stream.has_work = stream.session.has_work();
        Ok(())
    }

    pub(super) fn has_work(&self) -> bool {
        self.streams.iter().any(|stream| stream.has_work)
    }

    /// Completes all work and checks that no event is missing.
    pub(super) async fn finish(&mut self) -> Checked {
        for stream in &mut self.streams {
            loop {
                stream.read(&self.history, usize::MAX)?;
                let handled = stream.handle_notifications();
                let advanced = stream.has_work;
                if advanced {
                    stream.session.advance().await.unwrap();
                    stream.has_work = stream.session.has_work();
                }
                if !handled && !advanced {
                    break;
                }
            }
            stream.reader.check_nothing_is_missing(&self.history)?;
        }
        let pending = &self.store.hub.pending;
        prop_assert_eq!((pending.messages.get(), pending.slots()), (0, 0), "no message or slot is left");
        Ok(())
    }
}

impl Stream {
    fn create(&mut self, history: &History, create: Create, head: Revision) {
        let start = create.back.map(|back| Revision((history.index.head().0 - back).max(1)));
        let spec = Spec {
            id: create.id.map(WatchId),
            range: create.range,
            start,
            flavor: create.flavor,
            fragment: create.fragment,
            progress_notify: create.progress_notify,
        };
        self.reader.created(spec.clone(), head);
        self.session.create(spec);
        self.has_work = self.session.has_work();
    }

    fn cancel(&mut self, position: usize) {
        let ids: Vec<WatchId> = self.reader.ids().collect();
        if !ids.is_empty() {
            let id = ids[position % ids.len()];
            self.reader.canceled(id);
            self.session.cancel(id);
        }
    }

    /// Lets the session handle notifications. Returns whether there were any.
    fn handle_notifications(&mut self) -> bool {
        let notified = self.outbox.notified().now_or_never().is_some();
        if notified {
            self.session.handle_notifications();
            self.has_work = self.session.has_work();
        }
        notified
    }

    fn read(&mut self, history: &History, messages_max: usize) -> Checked {
        read(&mut self.messages, &mut self.reader, history, messages_max)
    }
}

fn read(messages: &mut Messages, reader: &mut Reader, history: &History, messages_max: usize) -> Checked {
    for _ in 0..messages_max {
        let Some(message) = messages.next().now_or_never() else { break };
        let message = message.expect("the stream is open").expect("the server is running");
        reader.check(message, history)?;
    }
    Ok(())
}
