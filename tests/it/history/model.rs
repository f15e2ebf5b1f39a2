//! A naive model of a store with its whole history: a copy of the state at each revision, and a list of all changes.

use std::collections::BTreeMap;

use orlop_wire::proto::client::mvccpb::KeyValue;

pub type Pairs = BTreeMap<Vec<u8>, KeyValue>;

/// (revision, key, pair that was put)
pub type ModelChange = (i64, Vec<u8>, Option<KeyValue>);

/// The pairs and the changes of each revision.
#[derive(Clone)]
pub struct Model {
    states: Vec<Pairs>,
    changes: Vec<ModelChange>,
}

impl Model {
    /// The state of an empty store, which is at revision 1.
    pub fn new() -> Self {
        Self { states: vec![Pairs::new(), Pairs::new()], changes: Vec::new() }
    }

    pub fn head(&self) -> i64 {
        self.states.len() as i64 - 1
    }

    /// Applies the writes of one transaction: a value is put, `None` deletes. Returns the new head.
    pub fn write(&mut self, writes: &[(&str, Option<&str>)]) -> i64 {
        let mut state = self.states.last().cloned().unwrap_or_default();
        let revision = self.head() + 1;
        let before = self.changes.len();
        for (key, value) in writes {
            let key = key.as_bytes().to_vec();
            let replaced = state.remove(&key);
            if let Some(value) = value {
                let (create_revision, version) =
                    replaced.map_or((revision, 1), |kv| (kv.create_revision, kv.version + 1));
                let pair = KeyValue {
                    key: key.clone().into(),
                    value: (*value).to_owned().into(),
                    create_revision,
                    version,
                    mod_revision: revision,
                    lease: 0,
                };
                state.insert(key.clone(), pair.clone());
                self.changes.push((revision, key, Some(pair)));
            } else if replaced.is_some() {
                self.changes.push((revision, key, None));
            }
        }
        if self.changes.len() > before {
            self.states.push(state);
        }
        self.head()
    }

    pub fn pairs(&self, revision: i64, contains: impl Fn(&[u8]) -> bool) -> Vec<KeyValue> {
        let state = &self.states[usize::try_from(revision).expect("a revision")];
        state.values().filter(|kv| contains(&kv.key)).cloned().collect()
    }

    /// Returns the changes in [from, to].
    pub fn changes(&self, from: i64, to: i64, contains: impl Fn(&[u8]) -> bool) -> Vec<ModelChange> {
        let within = |change: &&ModelChange| (from..=to).contains(&change.0) && contains(&change.1);
        self.changes.iter().filter(within).cloned().collect()
    }
}
