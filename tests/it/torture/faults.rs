//! The table of faults.

use super::preload::{DATABASE, EIO, ENOSPC, WAL};

/// The environment that a fault needs; see [`super::rig`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Environment {
    Plain,
    ThreeInstances,
    OwnPostgres,
    SmallDisk,
    Preload,
    DatabaseUnderPreload,
    LittleMemory,
}

/// The links that a network fault affects.
#[derive(Clone, Copy, Debug)]
pub enum LinkSide {
    ToClients,
    ToDatabase,
}

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Kill,
    PowerCut,
    PostgresCrash,
    BackendKill,
    Reset(LinkSide),
    Cut(LinkSide),
    Silence(LinkSide),
    Delay(LinkSide),
    Pause,
    DiskFull,
    /// The affected files, as bits of [`WAL`] and [`DATABASE`].
    SyncFails(i64),
    /// The affected files, as above, and the error number.
    WriteFails(i64, i64),
    SlowSync,
    /// The number of seconds that the clock jumps.
    ClockJump(i64),
    NoDescriptors,
    NoMemory,
}

/// A row of the table.
pub struct Fault {
    /// The name of the fault's tests.
    pub name: &'static str,
    /// A description for the report.
    pub what: &'static str,
    pub kind: Kind,
    pub environment: Environment,
    /// Number of injections while the most frequent faults are injected 1,000 times.
    pub per_thousand: usize,
    /// Orlop's log must contain one of these texts; empty if Orlop logs nothing or is not running.
    pub log_texts: &'static [&'static str],
}

pub const OFTEN: usize = 1_000;
/// Fewer injections, because a start of Postgres takes seconds.
const SOMETIMES: usize = 250;
const SELDOM: usize = 100;
const HOUR: i64 = 3_600;
/// The standard library panics with this text if it starts a thread and there is no memory for it.
pub const NO_MEMORY_FOR_A_THREAD: &str = "failed to allocate an alternative stack";

use Kind::*;
use LinkSide::*;

#[rustfmt::skip]
pub const FAULTS: &[Fault] = &[
    Fault { name: "kill", what: "kill -9 of the server", kind: Kill, environment: Environment::Plain, per_thousand: OFTEN, log_texts: &[] },
    Fault { name: "power_cut", what: "power cut: what was not synced is gone", kind: PowerCut, environment: Environment::Preload, per_thousand: OFTEN, log_texts: &[] },
    Fault { name: "postgres_crash", what: "kill -9 of all of Postgres, started again at once", kind: PostgresCrash, environment: Environment::OwnPostgres, per_thousand: SOMETIMES,
        log_texts: &["the outcome of the last writes is unknown", "the database accepts no writes"] },
    Fault { name: "backend_kill", what: "kill -9 of the Postgres backend that appends", kind: BackendKill, environment: Environment::OwnPostgres, per_thousand: SELDOM,
        log_texts: &["the outcome of the last writes is unknown", "the database accepts no writes"] },
    Fault { name: "client_reset", what: "all connections of clients reset", kind: Reset(ToClients), environment: Environment::Plain, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "client_cut", what: "clients cut off for 1 s", kind: Cut(ToClients), environment: Environment::Plain, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "client_silence", what: "packets from and to clients held up for 2 s", kind: Silence(ToClients), environment: Environment::Plain, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "client_delay", what: "clients 100 ms farther away for 2 s", kind: Delay(ToClients), environment: Environment::Plain, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "database_reset", what: "all connections to Postgres reset", kind: Reset(ToDatabase), environment: Environment::Plain, per_thousand: SELDOM,
        log_texts: &["the outcome of the last writes is unknown", "the database accepts no writes"] },
    Fault { name: "database_cut", what: "Postgres cut off for 1 s", kind: Cut(ToDatabase), environment: Environment::Plain, per_thousand: SELDOM,
        log_texts: &["the outcome of the last writes is unknown", "the database accepts no writes"] },
    Fault { name: "database_silence", what: "packets from and to Postgres held up for 2 s", kind: Silence(ToDatabase), environment: Environment::Plain, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "database_delay", what: "Postgres 100 ms farther away for 2 s", kind: Delay(ToDatabase), environment: Environment::Plain, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "pause", what: "SIGSTOP of the only server for 2 s", kind: Pause, environment: Environment::Plain, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "pause_one_of_three", what: "SIGSTOP of one of three instances for 2 s", kind: Pause, environment: Environment::ThreeInstances, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "disk_full", what: "disk full", kind: DiskFull, environment: Environment::SmallDisk, per_thousand: SELDOM,
        log_texts: &["the disk is full: writes are rejected", "the outcome of the last writes is unknown"] },
    Fault { name: "no_space", what: "writes of WAL and database fail: ENOSPC", kind: WriteFails(WAL | DATABASE, ENOSPC), environment: Environment::Preload, per_thousand: SELDOM,
        log_texts: &["the disk is full: writes are rejected"] },
    Fault { name: "wal_write_fails", what: "writes of the WAL fail: EIO", kind: WriteFails(WAL, EIO), environment: Environment::Preload, per_thousand: SELDOM,
        log_texts: &["the outcome of the last writes is unknown"] },
    Fault { name: "database_write_fails", what: "writes of the database file fail: EIO", kind: WriteFails(DATABASE, EIO), environment: Environment::Preload, per_thousand: SELDOM,
        log_texts: &["checkpoint failed"] },
    Fault { name: "wal_sync_fails", what: "syncs of the WAL fail and lose what they should write; then, mostly, a power cut", kind: SyncFails(WAL), environment: Environment::Preload, per_thousand: OFTEN,
        log_texts: &["the outcome of the last writes is unknown"] },
    Fault { name: "database_sync_fails", what: "syncs of the database file fail and lose what they should write, and the server exits; then a power cut", kind: SyncFails(DATABASE), environment: Environment::Preload, per_thousand: SELDOM,
        log_texts: &["cannot sync the database file"] },
    Fault { name: "slow_sync", what: "each sync takes 500 ms longer", kind: SlowSync, environment: Environment::Preload, per_thousand: SELDOM,
        log_texts: &["took too long"] },
    Fault { name: "clock_forward", what: "the server's clock jumps an hour ahead and back", kind: ClockJump(HOUR), environment: Environment::Preload, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "clock_back", what: "the server's clock jumps an hour back and ahead", kind: ClockJump(-HOUR), environment: Environment::Preload, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "database_clock_forward", what: "Postgres's clock jumps an hour ahead and back", kind: ClockJump(HOUR), environment: Environment::DatabaseUnderPreload, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "database_clock_back", what: "Postgres's clock jumps an hour back and ahead", kind: ClockJump(-HOUR), environment: Environment::DatabaseUnderPreload, per_thousand: SELDOM, log_texts: &[] },
    Fault { name: "no_descriptors", what: "no file descriptors left for 1 s, and all connections of clients reset", kind: NoDescriptors, environment: Environment::Plain, per_thousand: SELDOM,
        log_texts: &["cannot accept a connection"] },
    Fault { name: "no_memory", what: "memory exhausted", kind: NoMemory, environment: Environment::LittleMemory, per_thousand: SELDOM, log_texts: &["memory allocation of", NO_MEMORY_FOR_A_THREAD] },
];
