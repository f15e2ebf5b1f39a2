//! The table of faults.

use super::preload::{DATABASE, EIO, ENOSPC, WAL};

/// The environment of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ground {
    Plain,
    ThreeInstances,
    OwnPostgres,
    SmallDisk,
    Preload,
    DatabaseUnderPreload,
    LittleMemory,
}

/// The affected link.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    ToClients,
    ToDatabase,
}

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Kill,
    PowerCut,
    PostgresCrash,
    BackendKill,
    Reset(Way),
    Cut(Way),
    Silence(Way),
    Delay(Way),
    Pause,
    DiskFull,
    /// The affected files.
    SyncFails(i64),
    /// The affected files, and the kind of failure.
    WriteFails(i64, i64),
    SlowSync,
    /// By this number of seconds.
    ClockJump(i64),
    NoDescriptors,
    NoMemory,
}

/// A row of the table.
pub struct Fault {
    /// The name of its tests.
    pub name: &'static str,
    /// A description for the report.
    pub what: &'static str,
    pub kind: Kind,
    pub ground: Ground,
    /// Number of injections while the most frequent faults are injected 1,000 times.
    pub per_thousand: usize,
    /// Orlop's log must contain one of these texts; empty if Orlop logs nothing or is not running.
    pub says: &'static [&'static str],
}

pub const OFTEN: usize = 1_000;
/// Less often, because a start of Postgres takes seconds.
const SOMETIMES: usize = 250;
const SELDOM: usize = 100;
const HOUR: i64 = 3_600;
/// The standard library panics with this text if there is no memory for a thread that it starts.
pub const NO_ROOM_FOR_A_THREAD: &str = "failed to allocate an alternative stack";

use Kind::*;
use Way::*;

#[rustfmt::skip]
pub const FAULTS: &[Fault] = &[
    Fault { name: "kill", what: "kill -9 of the server", kind: Kill, ground: Ground::Plain, per_thousand: OFTEN, says: &[] },
    Fault { name: "power_cut", what: "power cut: what was not synced is gone", kind: PowerCut, ground: Ground::Preload, per_thousand: OFTEN, says: &[] },
    Fault { name: "postgres_crash", what: "kill -9 of all of Postgres, started again at once", kind: PostgresCrash, ground: Ground::OwnPostgres, per_thousand: SOMETIMES,
        says: &["the outcome of the last writes is unknown"] },
    Fault { name: "backend_kill", what: "kill -9 of the Postgres backend that appends", kind: BackendKill, ground: Ground::OwnPostgres, per_thousand: SELDOM,
        says: &["the outcome of the last writes is unknown"] },
    Fault { name: "client_reset", what: "all connections of clients reset", kind: Reset(ToClients), ground: Ground::Plain, per_thousand: SELDOM, says: &[] },
    Fault { name: "client_cut", what: "clients cut off for 1 s", kind: Cut(ToClients), ground: Ground::Plain, per_thousand: SELDOM, says: &[] },
    Fault { name: "client_silence", what: "packets from and to clients held up for 2 s", kind: Silence(ToClients), ground: Ground::Plain, per_thousand: SELDOM, says: &[] },
    Fault { name: "client_delay", what: "clients 100 ms farther away for 2 s", kind: Delay(ToClients), ground: Ground::Plain, per_thousand: SELDOM, says: &[] },
    Fault { name: "database_reset", what: "all connections to Postgres reset", kind: Reset(ToDatabase), ground: Ground::Plain, per_thousand: SELDOM,
        says: &["the outcome of the last writes is unknown", "the database accepts no writes"] },
    Fault { name: "database_cut", what: "Postgres cut off for 1 s", kind: Cut(ToDatabase), ground: Ground::Plain, per_thousand: SELDOM,
        says: &["the outcome of the last writes is unknown"] },
    Fault { name: "database_silence", what: "packets from and to Postgres held up for 2 s", kind: Silence(ToDatabase), ground: Ground::Plain, per_thousand: SELDOM, says: &[] },
    Fault { name: "database_delay", what: "Postgres 100 ms farther away for 2 s", kind: Delay(ToDatabase), ground: Ground::Plain, per_thousand: SELDOM, says: &[] },
    Fault { name: "pause", what: "SIGSTOP of the only server for 2 s", kind: Pause, ground: Ground::Plain, per_thousand: SELDOM, says: &[] },
    Fault { name: "pause_one_of_three", what: "SIGSTOP of one of three instances for 2 s", kind: Pause, ground: Ground::ThreeInstances, per_thousand: SELDOM, says: &[] },
    Fault { name: "disk_full", what: "disk full", kind: DiskFull, ground: Ground::SmallDisk, per_thousand: SELDOM,
        says: &["the disk is full: writes are rejected", "the outcome of the last writes is unknown"] },
    Fault { name: "no_space", what: "writes of WAL and database fail: ENOSPC", kind: WriteFails(WAL | DATABASE, ENOSPC), ground: Ground::Preload, per_thousand: SELDOM,
        says: &["the disk is full: writes are rejected"] },
    Fault { name: "wal_write_fails", what: "writes of the WAL fail: EIO", kind: WriteFails(WAL, EIO), ground: Ground::Preload, per_thousand: SELDOM,
        says: &["the outcome of the last writes is unknown"] },
    Fault { name: "database_write_fails", what: "writes of the database file fail: EIO", kind: WriteFails(DATABASE, EIO), ground: Ground::Preload, per_thousand: SELDOM,
        says: &["checkpoint failed"] },
    Fault { name: "wal_sync_fails", what: "syncs of the WAL fail and lose what they should write; then, mostly, a power cut", kind: SyncFails(WAL), ground: Ground::Preload, per_thousand: OFTEN,
        says: &["the outcome of the last writes is unknown"] },
    Fault { name: "database_sync_fails", what: "syncs of the database file fail and lose what they should write; then, mostly, a power cut", kind: SyncFails(DATABASE), ground: Ground::Preload, per_thousand: SELDOM,
        says: &["checkpoint failed"] },
    Fault { name: "slow_sync", what: "each sync takes 500 ms longer", kind: SlowSync, ground: Ground::Preload, per_thousand: SELDOM,
        says: &["took too long"] },
    Fault { name: "clock_forward", what: "the server's clock jumps an hour ahead and back", kind: ClockJump(HOUR), ground: Ground::Preload, per_thousand: SELDOM, says: &[] },
    Fault { name: "clock_back", what: "the server's clock jumps an hour back and ahead", kind: ClockJump(-HOUR), ground: Ground::Preload, per_thousand: SELDOM, says: &[] },
    Fault { name: "database_clock_forward", what: "Postgres's clock jumps an hour ahead and back", kind: ClockJump(HOUR), ground: Ground::DatabaseUnderPreload, per_thousand: SELDOM, says: &[] },
    Fault { name: "database_clock_back", what: "Postgres's clock jumps an hour back and ahead", kind: ClockJump(-HOUR), ground: Ground::DatabaseUnderPreload, per_thousand: SELDOM, says: &[] },
    Fault { name: "no_descriptors", what: "no file descriptors left for 1 s, and all connections of clients reset", kind: NoDescriptors, ground: Ground::Plain, per_thousand: SELDOM,
        says: &["cannot accept a connection"] },
    Fault { name: "no_memory", what: "no memory to be had", kind: NoMemory, ground: Ground::LittleMemory, per_thousand: SELDOM, says: &["memory allocation of", NO_ROOM_FOR_A_THREAD] },
];
