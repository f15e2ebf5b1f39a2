//! Finds the primary among the hosts of a database, for every connection.
//!
//! The host of the previous connection is asked first. If the same run of the same server answers, it is used.
//! Otherwise something has changed, and all hosts are asked at the same time. Of the servers that accept writes, the one
//! with the highest timeline is used: a promotion starts a new timeline, so a former primary that was started again has
//! a lower one. The highest timeline is remembered, and a server with a lower one, or with another system identifier,
//! is refused from then on. Connections to the server before are closed: each belongs to a [`Generation`].
//!
//! Known limits: only a server that answers can be compared. A start that reaches nothing but a former primary uses it,
//! as does an instance that has never reached its successor; synchronous replication and fencing (of Patroni, for
//! example) protect from that. Two servers that were promoted from one timeline cannot be told apart here; the end of
//! the log tells (see [`orlop_core::log::Position::server`]).
//!
//! Each attempt resolves names and reads files of passwords and certificates anew.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    hash::{BuildHasher as _, RandomState},
    io,
    str::FromStr as _,
    time::Duration,
};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use sqlx::{ConnectOptions as _, PgConnection, Row as _, postgres::PgConnectOptions};
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};
use tracing::{info, warn};

use super::{
    connect_error::{NoPrimary, is_final, lacks_resources},
    connection::{sqlstate, timed_out},
    hosts::{Environment, Host, HostOrder, Hosts},
    passfile,
    tls_files::explained,
};
use crate::error::describe;
use orlop_core::log::{Error, Result};

/// Time for the previous host to answer before the others are asked too.
const HEAD_START: Duration = Duration::from_millis(250);
/// Time for the other hosts to answer after one primary has answered.
const GRACE: Duration = Duration::from_secs(1);
/// Minimum interval between two messages about the same refusal.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// What a server reports about itself. One round trip; it fails on no standby, so that standbys do not log errors.
const IDENTITY: &str = "SELECT pg_is_in_recovery()::text, current_setting('transaction_read_only'), \
    (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint::text, \
    (SELECT system_identifier::text FROM pg_control_system()), \
    CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END";
/// The same for a server that does not permit the last two columns, or fails to compute them: without logical replication,
/// Amazon Aurora has no WAL to report.
const IDENTITY_WITHOUT_TIMELINE: &str = "SELECT pg_is_in_recovery()::text, current_setting('transaction_read_only'), \
    (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint::text, NULL::text, NULL::text";

/// A number that increases at each promotion; 0 if the server does not report it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Timeline(u32);

/// Counts the servers that were found to be the primary one after the other; a server that was restarted counts again.
/// A connection of a lower generation than the newest leads to a former primary.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Generation(u64);

/// A connection to the primary.
pub(super) struct Found {
    pub(super) connection: PgConnection,
    pub(super) generation: Generation,
    /// The options with which the connection was opened.
    pub(super) options: PgConnectOptions,
}

/// A server that accepts writes.
struct Candidate {
    host: usize,
    connection: PgConnection,
    options: PgConnectOptions,
    timeline: Timeline,
    /// The start of the server, which identifies one run of it.
    run: i64,
    system: Option<String>,
}

/// A host and what came of the attempt to connect to it.
type Answer = (usize, sqlx::Result<Candidate>);

/// The server of the newest connection.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Last {
    host: usize,
    run: i64,
    timeline: Timeline,
}

#[derive(Default)]
struct Known {
    last: Option<Last>,
    /// The highest timeline seen.
    highest: Timeline,
    system: Option<String>,
    /// The hosts whose servers do not report their timelines. They would log an error for each connection.
    without_timeline: HashSet<usize>,
    /// By host, the last refusal that was logged since a server was accepted, and when.
    refusals: HashMap<usize, (String, Instant)>,
}

impl Known {
    /// Takes note of a refusal. Returns whether to log it: if it differs from the last one of this host, and again after
    /// [`REFUSAL_LOG_INTERVAL`], because nothing is served until somebody acts on it.
    fn is_refusal_due(&mut self, host: usize, refusal: String, now: Instant) -> bool {
        let is_due = self
            .refusals
            .get(&host)
            .is_none_or(|(last, logged)| *last != refusal || now.duration_since(*logged) >= REFUSAL_LOG_INTERVAL);
        if is_due {
            self.refusals.insert(host, (refusal, now));
        }
        is_due
    }
}

/// The search for the primary, and what is known from earlier searches.
pub(super) struct Primary {
    hosts: Hosts,
    known: Mutex<Known>,
    /// The newest generation.
    generation: watch::Sender<Generation>,
}

impl Primary {
    /// # Errors
    ///
    /// [`Error::Open`] if the URL is invalid. The text does not contain the password.
    pub(super) fn new(endpoint: &str) -> Result<Self> {
        let environment = Environment {
            variable: &|name| std::env::var(name).ok(),
            default_host: PgConnectOptions::new_without_pgpass().get_host().to_owned(),
        };
        let invalid = |error| Error::Open(format!("datastore-endpoint is not a Postgres URL: {error}"));
        let hosts = Hosts::parse(endpoint, &environment).map_err(invalid)?;
        if !hosts.has_password && hosts.passfile.is_none() {
            passfile::warn_of_unusable();
        }
        let primary = Self { hosts, known: Mutex::default(), generation: watch::Sender::default() };
        // The error text may contain a part of the address, but not the password: any password is valid, so its
        // parsing never fails.
        primary.parse(0).map_err(|error| invalid(describe(&error)))?;
        Ok(primary)
    }

    /// Returns the hosts for messages.
    pub(super) fn names(&self) -> String {
        self.hosts.hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(",")
    }

    pub(super) fn hosts(&self) -> usize {
        self.hosts.hosts.len()
    }

    /// Returns the options of a host, without a password from a file.
    pub(super) fn parse(&self, host: usize) -> sqlx::Result<PgConnectOptions> {
        let Host { url, address, .. } = self.host(host);
        let options = PgConnectOptions::from_str(url)?;
        let options = address.iter().fold(options, |options, address| options.host(address));
        // PgBouncer refuses this parameter, and binary numbers do not depend on it.
        Ok(options.extra_float_digits(None).application_name("orlop").disable_statement_logging())
    }

    /// Returns the newest generation.
    pub(super) fn generation(&self) -> Generation {
        *self.generation.borrow()
    }

    /// Waits until another server is the primary than in this generation.
    pub(super) async fn superseded(&self, generation: Generation) {
        // It fails only after the sender, which is in `self`, was dropped.
        let _ = self.generation.subscribe().wait_for(|newest| *newest > generation).await;
    }

    /// Connects to the primary.
    ///
    /// # Errors
    ///
    /// The error of the host, or the errors of all.
    pub(super) async fn connect(&self) -> sqlx::Result<Found> {
        let limit = self.hosts.connect_timeout;
        let Some(last) = self.known.lock().last else { return self.survey(limit).await };
        let mut answers = Vec::new();
        let mut attempts = FuturesUnordered::new();
        attempts.push(self.attempt(last.host, limit));
        if let Ok(Some((host, answer))) = timeout(HEAD_START, attempts.next()).await {
            match answer {
                Ok(candidate) if candidate.is(last) => return self.accept(candidate).map_err(Refusal::into_error),
                answer => answers.push((host, answer)),
            }
        }
        let others = self.order().into_iter().filter(|host| *host != last.host);
        attempts.extend(others.map(|host| self.attempt(host, limit)));
        self.best_of(answers, attempts).await
    }

    /// Asks all hosts, and connects to the primary with the highest timeline. `limit` is the time for each host.
    pub(super) async fn survey(&self, limit: Duration) -> sqlx::Result<Found> {
        let attempts = self.order().into_iter().map(|host| self.attempt(host, limit)).collect();
        self.best_of(Vec::new(), attempts).await
    }

    /// Waits for attempts and chooses among their servers and `answers`.
    async fn best_of<F>(&self, mut answers: Vec<Answer>, mut attempts: FuturesUnordered<F>) -> sqlx::Result<Found>
    where
        F: Future<Output = Answer>,
    {
        // Longer than any attempt, until a primary has answered.
        let mut deadline = Instant::now() + 2 * self.hosts.connect_timeout + GRACE;
        if answers.iter().any(|(_, answer)| answer.is_ok()) {
            deadline = Instant::now() + GRACE;
        }
        while let Ok(Some((host, answer))) = timeout_at(deadline, attempts.next()).await {
            if answer.is_ok() {
                deadline = deadline.min(Instant::now() + GRACE);
            }
            answers.push((host, answer));
        }
        drop(attempts);
        self.choose(answers)
    }

    /// Returns the acceptable server with the highest timeline; of equal ones that of the previous host, or the first
    /// in order.
    fn choose(&self, answers: Vec<Answer>) -> sqlx::Result<Found> {
        let (mut candidates, mut errors) = (Vec::new(), Vec::new());
        for (host, answer) in answers {
            match answer {
                Ok(candidate) => candidates.push(candidate),
                Err(error) => errors.push((host, error)),
            }
        }
        let (order, last) = (self.order(), self.known.lock().last);
        let place = |host: usize| {
            let is_last = last.is_some_and(|last| last.host == host);
            (!is_last, order.iter().position(|it| *it == host))
        };
        candidates.sort_by_key(|candidate| (std::cmp::Reverse(candidate.timeline), place(candidate.host)));
        for candidate in candidates {
            let host = candidate.host;
            match self.accept(candidate) {
                Ok(found) => return Ok(found),
                Err(refusal) => errors.push((host, refusal.into_error())),
            }
        }
        Err(self.no_primary(errors))
    }

    /// Accepts a server unless it is another one, or an older one, than an earlier server.
    fn accept(&self, candidate: Candidate) -> std::result::Result<Found, Refusal> {
        let Candidate { host, connection, options, timeline, run, system } = candidate;
        let name = &self.host(host).name;
        let mut known = self.known.lock();
        if let Some(refusal) = refusal((&known.system, known.highest), (&system, timeline)) {
            if known.is_refusal_due(host, refusal.to_string(), Instant::now()) {
                warn!(host = name, "a server was refused: {refusal}");
            }
            return Err(refusal);
        }
        if system.is_some() {
            known.system = system;
        }
        if known.last.is_none() && self.hosts() > 1 && timeline == Timeline::default() {
            warn!(
                host = name,
                "the server does not report its system identifier and timeline: a former primary cannot be recognized"
            );
        }
        let current = Last { host, run, timeline };
        if known.last.is_some_and(|last| last != current) || (known.last.is_none() && self.hosts() > 1) {
            info!(host = name, timeline = timeline.0, "connected to the primary");
        }
        if known.last.is_some_and(|last| last.run != run) {
            self.generation.send_modify(|newest| newest.0 += 1);
        }
        known.last = Some(current);
        known.highest = known.highest.max(timeline);
        known.refusals.clear();
        Ok(Found { connection, generation: self.generation(), options })
    }

    async fn attempt(&self, host: usize, limit: Duration) -> Answer {
        let candidate = timeout(limit, self.ask(host)).await;
        (host, candidate.unwrap_or_else(|_| Err(timed_out(limit))))
    }

    /// Connects to a host and asks for its state.
    async fn ask(&self, host: usize) -> sqlx::Result<Candidate> {
        let options = self.with_password(host, self.parse(host)?)?;
        let mut connection = self.open(&options).await?;
        let hides_timeline = self.known.lock().without_timeline.contains(&host);
        let identity = if hides_timeline { IDENTITY_WITHOUT_TIMELINE } else { IDENTITY };
        let row = match sqlx::raw_sql(identity).fetch_one(&mut connection).await {
            Err(error) if matches!(sqlstate(&error).as_deref(), Some("42501" | "42883" | "0A000" | "55000")) => {
                // A right may be granted later.
                if sqlstate(&error).as_deref() != Some("42501") {
                    self.known.lock().without_timeline.insert(host);
                }
                sqlx::raw_sql(IDENTITY_WITHOUT_TIMELINE).fetch_one(&mut connection).await?
            }
            row => row?,
        };
        let text = |column: usize| row.try_get::<Option<String>, _>(column).map(Option::unwrap_or_default);
        if text(0)? == "true" {
            return Err(Refusal::Standby.into_error());
        }
        if text(1)? == "on" {
            return Err(Refusal::ReadOnly.into_error());
        }
        let run = text(2)?.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        // Eight hexadecimal digits, or nothing.
        let timeline = Timeline(u32::from_str_radix(&text(4)?, 16).unwrap_or_default());
        Ok(Candidate { host, connection, options, timeline, run, system: row.try_get(3)? })
    }

    /// Opens a connection. Reads its files with certificates first, because the errors of sqlx do not name them.
    async fn open(&self, options: &PgConnectOptions) -> sqlx::Result<PgConnection> {
        let files = &self.hosts.tls_files;
        if files.are_needed() {
            files.check()?;
        }
        let opened = options.connect().await;
        // They may be the reason if the server did not answer with an error.
        if opened.as_ref().is_err_and(|error| sqlstate(error).is_none()) {
            files.check()?;
        }
        opened.map_err(explained)
    }

    /// Sets the password from a file, unless the URL or `PGPASSWORD` has one.
    fn with_password(&self, host: usize, options: PgConnectOptions) -> sqlx::Result<PgConnectOptions> {
        if self.hosts.has_password {
            return Ok(options);
        }
        let wanted = passfile::Wanted {
            host: options.get_socket().map_or(self.host(host).listed.as_str(), |_| "localhost"),
            port: options.get_port(),
            database: options.get_database().unwrap_or_else(|| options.get_username()),
            user: options.get_username(),
        };
        let password = match &self.hosts.passfile {
            Some(file) => passfile::password(file, wanted)?,
            None => passfile::usual_password(wanted),
        };
        Ok(password.into_iter().fold(options, |options, password| options.password(&password)))
    }

    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.hosts()).collect();
        if self.hosts.order == HostOrder::Random {
            let random = RandomState::new();
            order.sort_by_key(|host| random.hash_one(host));
        }
        order
    }

    /// Returns the error of a single host as it is, and one text for several hosts. The latter may heal, unless all
    /// hosts refuse the login.
    fn no_primary(&self, mut errors: Vec<(usize, sqlx::Error)>) -> sqlx::Error {
        if self.hosts() == 1
            && let Some((_, error)) = errors.pop()
        {
            return error;
        }
        errors.sort_by_key(|(host, _)| *host);
        let text = |(host, error): &(usize, sqlx::Error)| format!("{}: {}", self.host(*host).name, describe(error));
        let text = format!(
            "none of {} hosts is a primary; {}",
            self.hosts(),
            errors.iter().map(text).collect::<Vec<_>>().join("; ")
        );
        if errors.len() == self.hosts() && errors.iter().all(|(_, error)| is_final(error)) {
            sqlx::Error::Configuration(text.into())
        } else {
            let lacks_resources = errors.iter().any(|(_, error)| lacks_resources(error));
            sqlx::Error::Io(io::Error::other(NoPrimary { text, lacks_resources }))
        }
    }

    fn host(&self, host: usize) -> &Host {
        &self.hosts.hosts[host]
    }
}

impl Candidate {
    fn is(&self, last: Last) -> bool {
        let own = Last { host: self.host, run: self.run, timeline: self.timeline };
        own == last
    }
}

/// Returns why a server is not used, from the known and the server's system identifiers and timelines. What a server does
/// not report is not compared.
fn refusal(known: (&Option<String>, Timeline), server: (&Option<String>, Timeline)) -> Option<Refusal> {
    if let (Some(known), Some(other)) = (known.0, server.0)
        && known != other
    {
        return Some(Refusal::OtherSystem(known.clone(), other.clone()));
    }
    let is_older = server.1 < known.1 && server.1 != Timeline::default();
    is_older.then_some(Refusal::Older(server.1, known.1))
}

/// The reason why a server that answers is not used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Standby,
    ReadOnly,
    /// The expected identifier and the server's.
    OtherSystem(String, String),
    /// The server's timeline and the highest.
    Older(Timeline, Timeline),
}

impl Refusal {
    fn into_error(self) -> sqlx::Error {
        sqlx::Error::Configuration(Box::new(self))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Standby => f.write_str("the server is a standby, which does not accept writes"),
            Self::ReadOnly => f.write_str("the server accepts no writes: default_transaction_read_only is on"),
            Self::OtherSystem(expected, found) => write!(
                f,
                "the server belongs to another database cluster: its system identifier is {found}, that of the earlier \
                 server was {expected}; restart Orlop if the database was replaced on purpose"
            ),
            Self::Older(found, highest) => write!(
                f,
                "the server is a former primary: its timeline is {}, but the current primary's is {}; if a backup of an \
                 earlier time was restored, restart this instance",
                found.0, highest.0
            ),
        }
    }
}

impl std::error::Error for Refusal {}

#[cfg(test)]
mod tests;
