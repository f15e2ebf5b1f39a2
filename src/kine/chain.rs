//! The changes that kine's rows mean, each with the create revision and version that etcd would give it. Pure.
//!
//! ```text
//! id 3  /a  created                       put(3)     create_revision 3, version 1
//! id 5  /a  create_revision 3, prev 3     put(5)     create_revision 3, version 2
//! id 6  /a  deleted, prev 5               delete(6)
//! id 9  /a  created, prev 6               put(9)     create_revision 9, version 1
//! ```
//!
//! kine stores no version. The oldest row of a key whose creation was compacted gets version 2, because version 1 means
//! created here. Above the compact revision kine keeps every row, so a row there must follow from the one before of its
//! name. One that does not is taken as kine itself reads it, and the history up to it is not used. Names are compared by
//! bytes; MySQL ignores their case.

use std::collections::HashMap;

use orlop_core::{
    index::RowKind,
    lease::TTL_SECS_MAX,
    types::{Key, Revision},
};
use orlop_sql::{APISERVER_COMPACTION, KineRow, KineState};

use crate::load::VERSION_MAX;

const COMPACTION: &[u8] = b"compact_rev_key";

/// The state of each key after the rows that were taken.
#[derive(Default)]
pub(super) struct Chain {
    /// kine's compact revision; 0 if there is none.
    compacted: i64,
    newest: HashMap<Key, Newest>,
}

/// The newest row of a key.
struct Newest {
    id: i64,
    live: Option<Live>,
}

/// A version of a key.
#[derive(Clone, Copy)]
pub(super) struct Live {
    create_revision: i64,
    version: i64,
    /// Whether all rows since the creation were taken.
    is_exact: bool,
    /// Seconds; 0: none.
    ttl_secs: i64,
}

/// A change of a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `value` replaces that of the row, if there is one.
    Put {
        create_revision: Revision,
        version: i64,
        value: Option<Vec<u8>>,
    },
    Delete,
}

/// Rows that are no keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Own {
    /// `compact_rev_key`: kine's compact revision.
    CompactRevision,
    /// `gap-N` at id N: an id without a change.
    Gap,
    /// `compact_rev_key_apiserver` as kine before 0.14.4 wrote it, without the value of kube-apiserver.
    OldApiserverCompaction,
}

/// Why a row that is taken does not follow from the one before.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Doubts {
    pub(super) what: Vec<String>,
    /// Whether the history up to this row cannot be used.
    pub(super) ends_history: bool,
}

impl Doubts {
    fn add(&mut self, what: String) {
        self.what.push(what);
    }

    fn add_unless(&mut self, follows: bool, row: &KineRow) {
        if !follows {
            self.add(format!("its prev_revision is {}, not that of the row before: ignored", row.prev_revision));
        }
    }

    fn end_history(&mut self, what: String) {
        self.what.push(what);
        self.ends_history = true;
    }
}

/// The meaning of a row.
pub(super) enum Taken {
    Change {
        key: Key,
        kind: Kind,
        doubts: Doubts,
    },
    Own(Own),
    /// A row that changes nothing, with the reason.
    Skipped(&'static str),
}

impl Kind {
    pub(super) fn columns(&self) -> RowKind {
        match self {
            Self::Put { create_revision, version, .. } => {
                RowKind::Put { create_revision: *create_revision, version: *version }
            }
            Self::Delete => RowKind::Delete,
        }
    }
}

impl Chain {
    pub(super) fn new(state: &KineState) -> Self {
        Self { compacted: state.compact_revision, newest: HashMap::new() }
    }

    /// Takes the next row.
    pub(super) fn take(&mut self, row: &KineRow) -> Taken {
        let (name, stored) = match own(row) {
            Name::Own(own) => return Taken::Own(own),
            Name::Key(name) => (name, None),
            Name::ApiserverCompaction(stored) => (COMPACTION, Some(stored)),
        };
        if name.is_empty() {
            return Taken::Skipped("it has no name");
        }
        let newest = self.newest.get(name);
        let live = newest.and_then(|newest| newest.live);
        let is_history = row.id > self.compacted;
        let mut doubts = Doubts::default();
        let follows = !is_history || follows(row, newest, self.compacted);
        let key = Key::from(name);
        if row.deleted {
            if live.is_none() && is_history {
                return Taken::Skipped("it deletes a key that does not exist");
            }
            if row.created {
                doubts.add("it is a creation and a delete: taken as the delete".to_owned());
            }
            doubts.add_unless(follows, row);
            self.newest.insert(key.clone(), Newest { id: row.id, live: None });
            return Taken::Change { key, kind: Kind::Delete, doubts };
        }
        let mut next = if is_history { after(row, live, &mut doubts) } else { compacted(row, live, &mut doubts) };
        doubts.add_unless(follows || doubts.ends_history, row);
        match stored.as_ref().map(|stored| stored.version) {
            Some(version) if version > 1 && !next.is_exact => next.version = version.max(next.version),
            Some(version) if version != next.version => {
                doubts.add(format!("its value says version {version}: taken as {}", next.version));
            }
            Some(_) | None => {}
        }
        next.ttl_secs = row.lease.clamp(0, TTL_SECS_MAX);
        if next.ttl_secs != row.lease {
            doubts.add(format!("its TTL is {} seconds: taken as {}", row.lease, next.ttl_secs));
        }
        self.newest.insert(key.clone(), Newest { id: row.id, live: Some(next) });
        let create_revision = Revision(next.create_revision);
        let value = stored.map(|stored| stored.value.to_vec());
        Taken::Change { key, kind: Kind::Put { create_revision, version: next.version, value }, doubts }
    }

    /// Returns the ids of the rows of live keys, with their versions.
    pub(super) fn live(&self) -> impl Iterator<Item = (i64, Live)> {
        self.newest.values().filter_map(|newest| newest.live.map(|live| (newest.id, live)))
    }
}

impl Live {
    fn created(row: &KineRow) -> Self {
        Self { create_revision: row.id, version: 1, is_exact: true, ttl_secs: 0 }
    }

    fn updated(self) -> Self {
        Self { version: self.version.saturating_add(1), ..self }
    }

    pub(super) fn is_exact(&self) -> bool {
        self.is_exact
    }

    pub(super) fn ttl_secs(&self) -> Option<i64> {
        (self.ttl_secs > 0).then_some(self.ttl_secs)
    }
}

/// Returns the version that a put above the compact revision makes.
fn after(row: &KineRow, live: Option<Live>, doubts: &mut Doubts) -> Live {
    match live {
        Some(_) if row.created => {
            doubts.end_history("it creates a key that exists: taken, history up to it left out".to_owned());
            Live::created(row)
        }
        None if row.created => Live::created(row),
        Some(live) => {
            if live.create_revision != row.create_revision {
                let expected = live.create_revision;
                doubts.add(format!("its create_revision is {}: taken as {expected}", row.create_revision));
            }
            live.updated()
        }
        None => {
            doubts.end_history("it updates a key that does not exist: taken, history up to it left out".to_owned());
            updated_once(row, doubts)
        }
    }
}

/// Returns the version that a put at or below the compact revision makes. Rows before it may be gone.
fn compacted(row: &KineRow, live: Option<Live>, doubts: &mut Doubts) -> Live {
    match live {
        _ if row.created => Live::created(row),
        Some(live) if live.create_revision == row.create_revision => live.updated(),
        Some(_) | None => updated_once(row, doubts),
    }
}

/// Returns the version of an update without the row before.
fn updated_once(row: &KineRow, doubts: &mut Doubts) -> Live {
    let create_revision = row.create_revision;
    if create_revision > Revision::EMPTY.0 && create_revision < row.id {
        return Live { create_revision, version: 2, is_exact: false, ttl_secs: 0 };
    }
    doubts.end_history(format!("its create_revision is {create_revision}: taken as the creation of the key"));
    Live::created(row)
}

/// Returns whether a row above the compact revision names the row before. The row before may be compacted, and a
/// creation need not name the delete before it.
fn follows(row: &KineRow, newest: Option<&Newest>, compacted: i64) -> bool {
    match newest {
        Some(newest) if newest.live.is_none() => row.prev_revision == 0 || row.prev_revision == newest.id,
        Some(newest) => row.prev_revision == newest.id,
        None => row.prev_revision <= compacted,
    }
}

/// What a name stands for.
enum Name<'a> {
    Key(&'a [u8]),
    Own(Own),
    ApiserverCompaction(Stored<'a>),
}

/// The version and value of kube-apiserver's `compact_rev_key`.
struct Stored<'a> {
    version: i64,
    value: &'a [u8],
}

fn own(row: &KineRow) -> Name<'_> {
    let name = row.name.as_slice();
    if name == COMPACTION {
        Name::Own(Own::CompactRevision)
    } else if row.deleted && !row.created && name == format!("gap-{}", row.id).as_bytes() {
        Name::Own(Own::Gap)
    } else if name != APISERVER_COMPACTION.as_bytes() {
        Name::Key(name)
    } else if row.deleted {
        Name::Key(COMPACTION)
    } else {
        stored(&row.value).map_or(Name::Own(Own::OldApiserverCompaction), Name::ApiserverCompaction)
    }
}

/// Parses `VERSION|VALUE`; `None` also for a version that no key can have.
fn stored(text: &[u8]) -> Option<Stored<'_>> {
    let at = text.iter().position(|byte| *byte == b'|')?;
    let version =
        str::from_utf8(&text[..at]).ok()?.parse::<i64>().ok().filter(|version| (1..=VERSION_MAX).contains(version))?;
    Some(Stored { version, value: &text[at + 1..] })
}
