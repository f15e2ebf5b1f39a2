//! A small model of kine: random creations, updates, deletes, failed inserts and compactions give a table and the history
//! that its clients have seen. After the import Orlop serves that history.

use std::collections::{BTreeMap, HashMap};

use super::*;
use crate::support::{Random, env_number};

const SEEDS: u64 = 12;
const STEPS: usize = 120;
const KEYS: usize = 8;

/// A version of a key as etcd would give it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    create_revision: i64,
    mod_revision: i64,
    version: i64,
    value: String,
    ttl: i64,
}

/// kine's table, and the history of its keys.
struct Model {
    rows: Vec<Row>,
    /// The newest id that was given.
    sequence: i64,
    compacted: i64,
    /// By revision: the keys after its change.
    history: BTreeMap<i64, BTreeMap<String, Version>>,
    /// The newest row of each name.
    newest: HashMap<String, i64>,
    /// Versions that the rows of a key, which was created at a revision, no longer show.
    hidden: HashMap<(String, i64), i64>,
}

impl Model {
    fn new() -> Self {
        Self {
            rows: vec![Row::compaction(1, 0)],
            sequence: 1,
            compacted: 0,
            history: BTreeMap::from([(1, BTreeMap::new())]),
            newest: HashMap::new(),
            hidden: HashMap::new(),
        }
    }

    fn keys(&self) -> &BTreeMap<String, Version> {
        self.history.values().next_back().expect("the history is never empty")
    }

    fn step(&mut self, random: &mut Random) {
        match random.below(100) {
            0..3 => self.fail(random),
            3..6 => self.compact(random),
            _ => self.write(random),
        }
    }

    /// An insert fails after it has taken an id. kine later fills it, if it has seen a newer row.
    fn fail(&mut self, random: &mut Random) {
        self.sequence += 1;
        if random.chance(50) {
            self.rows.push(Row::gap(self.sequence));
        }
    }

    fn write(&mut self, random: &mut Random) {
        self.sequence += 1;
        let (id, name) = (self.sequence, format!("/registry/{}", random.below(KEYS)));
        let prev = self.newest.get(&name).copied().unwrap_or(0);
        let (value, ttl) = (format!("value {id}"), if random.chance(20) { random.between(100, 9_999) } else { 0 });
        let mut keys = self.keys().clone();
        let row = match keys.get(&name).cloned() {
            Some(_) if random.chance(25) => {
                keys.remove(&name);
                Row::delete(id, &name, prev)
            }
            Some(live) => {
                let create_revision = live.create_revision;
                let next = Version { mod_revision: id, version: live.version + 1, value: value.clone(), ttl, ..live };
                keys.insert(name.clone(), next);
                Row::update(id, &name, create_revision, prev, &value).lease(ttl)
            }
            None => {
                let created = Version { create_revision: id, mod_revision: id, version: 1, value: value.clone(), ttl };
                keys.insert(name.clone(), created);
                Row::create(id, &name, prev, &value).lease(ttl)
            }
        };
        self.newest.insert(name, id);
        self.rows.push(row);
        self.history.insert(id, keys);
    }

    /// Deletes rows as kine does, at the newest revision or one before.
    fn compact(&mut self, random: &mut Random) {
        let at = random.between(self.compacted.max(2), self.sequence);
        self.compacted = at;
        let replaced: Vec<i64> =
            self.rows[1..].iter().filter(|row| row.id <= at).map(|row| row.prev_revision).collect();
        self.rows.retain(|row| row.id == 1 || !(replaced.contains(&row.id) || row.deleted && row.id <= at));
        self.rows[0].prev_revision = at;
        let (_, keys) = self.history.range(..=at).next_back().expect("the first revision");
        for (name, live) in keys {
            if live.version > 1 {
                self.hidden.insert((name.clone(), live.create_revision), live.version - 2);
            }
        }
        // A deleted name has no row left, so that the next creation names none.
        let rows = &self.rows;
        self.newest.retain(|_, newest| rows.iter().any(|row| row.id == *newest));
    }

    /// Returns the compact revision that the import has: above it every revision has a change.
    fn expected_compacted(&self) -> i64 {
        let holes = (self.compacted.max(1) + 1..=self.sequence).filter(|id| !self.history.contains_key(id));
        let compacted = holes.max().unwrap_or(self.compacted);
        if compacted == 2 || compacted == self.sequence && compacted > 0 { compacted.max(3) } else { compacted }
    }

    /// Returns the pairs at a revision with the versions that the rows show.
    fn pairs(&self, revision: i64) -> Vec<(String, Version)> {
        let (_, keys) = self.history.range(..=revision).next_back().expect("the first revision");
        let shown = |(name, live): (&String, &Version)| {
            let hidden = self.hidden.get(&(name.clone(), live.create_revision)).copied().unwrap_or(0);
            (name.clone(), Version { version: live.version - hidden, ttl: 0, ..live.clone() })
        };
        keys.iter().map(shown).collect()
    }
}

async fn random_histories_are_served_as_kine_served_them(backend: Backend) {
    for seed in env_number("ORLOP_SEED").map_or(1..=SEEDS, |seed| seed..=seed) {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let mut model = Model::new();
        for _ in 0..STEPS {
            model.step(&mut random);
        }
        let kind = if seed % 4 == 0 { random.pick(&Kind::ALL) } else { Kind::Sqlite };
        let Some(source) = Source::of(kind, &model.rows).await else { continue };
        let highest = model.rows.iter().map(|row| row.id).max().unwrap_or(1).max(model.compacted);
        // The rows were inserted with their ids, which not all databases count.
        model.sequence = highest;
        let Some(imported) = Imported::from(backend, &source.url).await else { return };
        compare(&model, imported, seed).await;
    }
}

async fn compare(model: &Model, mut imported: Imported, seed: u64) {
    let compacted = model.expected_compacted();
    imported.check_compacted(compacted).await;
    for revision in compacted.max(1)..=model.sequence {
        let (found, head) = imported.range(revision).await;
        assert_eq!(head, model.sequence.max(3), "seed {seed}\n{}", imported.report);
        let found: Vec<(String, Version)> = found.into_iter().map(version).collect();
        assert_eq!(found, model.pairs(revision), "seed {seed}, at {revision}\n{}", imported.report);
    }
    let events = imported.events(compacted + 1).await;
    let seen: Vec<i64> = events.iter().filter_map(|event| Some(event.kv.as_ref()?.mod_revision)).collect();
    assert_eq!(seen, (compacted.max(1) + 1..=model.sequence).collect::<Vec<i64>>(), "seed {seed}");
    for event in events.into_iter().filter(|event| event.r#type == 0) {
        let found = event.kv.map(version).expect("an event has a pair");
        assert!(model.pairs(found.1.mod_revision).contains(&found), "seed {seed}: {found:?}");
    }
    let mut ttls: Vec<i64> = model.keys().values().map(|live| live.ttl).filter(|ttl| *ttl > 0).collect();
    ttls.sort_unstable();
    assert_eq!(imported.ttls().await, ttls, "seed {seed}");
    imported.check_next(model.sequence.max(3) + 1).await;
}

fn version(kv: KeyValue) -> (String, Version) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
    let KeyValue { create_revision, mod_revision, version, .. } = kv;
    (text(&kv.key), Version { create_revision, mod_revision, version, value: text(&kv.value), ttl: 0 })
}

on_both_backends!(random_histories_are_served_as_kine_served_them,);
