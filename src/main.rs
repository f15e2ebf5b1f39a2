//! The command line: settings, logging, runtime, exit codes.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;
use orlop::{
    check,
    config::{Flags, Notices, Settings, deprecation, ignored_flag_definitions, with_two_dashes, without_empty_values},
    console, history, kine, logging, migrate, offline, output, server, snapshot, status, top,
};
use orlop_bench as bench;
use orlop_core::supervise;
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
};
use tracing::warn;

/// Exit status of a check that could not run and of an error in a command whose status 1 is an answer; clap uses the same
/// for invalid flags.
const CANNOT_CHECK: u8 = 2;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// etcd's v3 API over a log in SQLite or Postgres
///
/// Without a command it starts the server. Settings are read from --config-file, then from ETCD_* and ORLOP_* variables
/// (ORLOP_DATA_DIR for --data-dir), then from flags; later sources override earlier ones.
#[derive(Parser)]
#[command(version = orlop::VERSION, args_conflicts_with_subcommands = true, args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    flags: Flags,
}

#[derive(Subcommand)]
enum Command {
    /// Start the server; the default command
    Serve(Box<Flags>),

    /// Generate load on an etcd endpoint and report throughput and latency
    Bench(Box<bench::Args>),

    /// Save, inspect or restore a snapshot
    Snapshot(snapshot::Args),

    /// Copy a running etcd or Orlop into this server's database, follow it, and take over from it
    ///
    /// Revisions, history above the compact revision, leases, users and roles are copied from a snapshot; a watch then
    /// adds every new revision. Without --once and --cut-over, that goes on until a signal arrives. At its end the copy is
    /// compared with the source: both must have the same hash (HashKV) at the same revision; exit status 0 says so. A
    /// migration that was interrupted continues where it was when it is started again.
    Migrate(Box<migrate::Args>),

    /// Fill a new SQLite file or an empty Postgres database from the database of another server, which has stopped
    #[command(subcommand)]
    Import(kine::Args),

    /// Print the state of a running server, Orlop or etcd, on one screen
    ///
    /// The data are those of Maintenance.Status and /metrics of the endpoint. What the server does not report is unknown.
    Status(status::Args),

    /// Print the versions of a key, or of all keys with a prefix, and what changed from each to the next
    ///
    /// Of objects of Kubernetes, the field managers that wrote a version are named as far as the object tells.
    ///
    /// Without KEY, those of all keys are printed. Compacted versions are printed if the server runs with
    /// --history-retention. The store is that of a running server (--endpoints) or, with --data-dir or
    /// --datastore-endpoint, of a stopped one. Of a single key, the oldest version is the one at the first revision that
    /// can be read, unless --since is given.
    ///
    /// Exit status: 0 there are versions, 1 there are none, 2 an error.
    History(Box<history::HistoryArgs>),

    /// Print what changed in a range of keys between two points in time
    ///
    /// Without KEY, all keys are compared. If a time is given, standard error names the revision that it means.
    ///
    /// Exit status: 0 nothing changed, 1 something changed, 2 an error.
    Diff(Box<history::DiffArgs>),

    /// Print pairs as of a revision or a time
    ///
    /// If a time is given, standard error names the revision that it means.
    ///
    /// Exit status: 0 there are pairs, 1 there are none, 2 an error.
    Get(Box<history::GetArgs>),

    /// Write a past state of a range of keys again, as new revisions
    ///
    /// Shows what it would write and asks. The writes are one transaction or, if that is too large, several; after an
    /// interruption the same command continues. A key of the range that somebody changes meanwhile is named and not
    /// overwritten.
    ///
    /// Exit status: 0 the state is as it was, 1 conflicts or, with --dry-run, something to write, 2 an error.
    Rewind(Box<history::RewindArgs>),

    /// Show the load and the state of a running server, Orlop or etcd, in the terminal, refreshed in place
    ///
    /// Without a terminal, or with --once, it prints all views as text and exits.
    Top(top::Args),

    /// Serve a web page about a running server, Orlop or etcd: load, sizes, keys and their history, events
    ///
    /// Browsers log in with a name and a password of the server if it has authentication enabled; a user in the flags is
    /// only suggested. A server can serve the same page itself: see its flag --console-listen-url.
    Console(Box<console::command::Args>),

    /// Check the integrity of a store, running or not, without writing to it
    ///
    /// Reads the database: every row of every table, with SQLite also the whole file and its WAL. It finds the database as
    /// the server does: in --config-file, then in ETCD_* and ORLOP_* variables, then in flags; without any, it is
    /// orlop-data/orlop.db.
    /// The last line is "The store is sound." or "The store is damaged: N findings."
    ///
    /// Exit status: 0 the store is sound, 1 it is damaged, 2 the check could not run.
    Check(check::Args),

    /// Return the free space of a SQLite database, which no server uses, to the file system
    ///
    /// Rewrites the file, which needs free space for two copies of its content in the same folder. etcdctl defrag does the
    /// same with a running server, without rewriting all pages.
    Defrag(offline::DefragArgs),

    /// Print the hash of all pairs that HashKV of a server on this store returns
    ///
    /// The server may be stopped. Equal hashes at the same revision show that two stores have the same history.
    Hashkv(offline::HashArgs),

    /// Print the versions of Orlop and of the etcd API that it serves, and the commit of the source
    Version,

    /// Print the completion script of a shell
    Completions { shell: Shell },

    /// Print the manual page in roff, or write one page per command into a folder
    Man {
        /// An existing folder
        folder: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let command = command();
    let words = without_empty_values(with_two_dashes(&command, std::env::args_os()));
    let matches = command.get_matches_from(&words);
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let notices = Notices::of_flags(matches.subcommand_matches("serve").unwrap_or(&matches), &words);
    let outcome = match cli.command {
        None => return served(serve(&cli.flags, notices)),
        Some(Command::Serve(flags)) => return served(serve(&flags, notices)),
        Some(Command::Bench(args)) => on_one_thread(async { Ok(bench::run(*args).await?) }),
        Some(Command::Snapshot(args)) => on_one_thread(async { snapshot::run(args).await }),
        Some(Command::Migrate(args)) => migrate(*args),
        Some(Command::Import(args)) => on_one_thread(async { Box::pin(kine::run(args)).await }),
        Some(Command::Status(args)) => on_one_thread(async { status::run(args).await }),
        Some(Command::History(args)) => return past(history::history(*args)),
        Some(Command::Diff(args)) => return past(history::diff(*args)),
        Some(Command::Get(args)) => return past(history::get(*args)),
        Some(Command::Rewind(args)) => return past(history::rewind(*args)),
        Some(Command::Console(args)) => serve_console(*args),
        Some(Command::Top(args)) => on_one_thread(async { Box::pin(top::run(args)).await }),
        Some(Command::Check(args)) => return check_store(args),
        Some(Command::Defrag(args)) => on_one_thread(async { offline::defrag(args).await }),
        Some(Command::Hashkv(args)) => on_one_thread(async { offline::hashkv(args).await }),
        Some(Command::Version) => output::print(versions().as_bytes()).map_err(Into::into),
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "orlop", &mut script);
            output::print(&script).map_err(Into::into)
        }
        Some(Command::Man { folder }) => manual(folder.as_deref()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&*error, ExitCode::FAILURE),
    }
}

/// Returns the exit status of the server, whose end does not wait for a reader of the error.
fn served(outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            supervise::print_last(format!("orlop: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs a command about the past and returns its exit status.
fn past(command: impl Future<Output = Outcome<history::Ending>>) -> ExitCode {
    match on_one_thread(async { Box::pin(command).await }) {
        Ok(ending) => ending.into(),
        Err(error) => failed(&*error, ExitCode::from(CANNOT_CHECK)),
    }
}

/// Runs a check and returns its exit status, which distinguishes a damaged store from a check that cannot run.
fn check_store(args: check::Args) -> ExitCode {
    match on_one_thread(async { check::run(args).await }) {
        Ok(check::Verdict::Sound) => ExitCode::SUCCESS,
        Ok(check::Verdict::Damaged) => ExitCode::FAILURE,
        Err(error) => failed(&*error, ExitCode::from(CANNOT_CHECK)),
    }
}

/// Returns the lines of `etcd --version`, with Orlop's version in addition.
fn versions() -> String {
    let (version, commit, etcd) = (env!("CARGO_PKG_VERSION"), orlop::COMMIT, orlop::api::ETCD_VERSION);
    format!("Orlop Version: {version}\nGit SHA: {commit}\netcd Version: {etcd}\n")
}

fn manual(folder: Option<&Path>) -> Outcome {
    let cli = Cli::command().disable_help_subcommand(true).mut_subcommand("bench", bench::hide_rejected_flags);
    let Some(folder) = folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(cli).render(&mut page)?;
        return Ok(output::print(&page)?);
    };
    let written = clap_mangen::generate_to(cli, folder);
    written.map_err(|error| format!("cannot write the manual pages to {}: {error}", folder.display()).into())
}

fn failed(error: &dyn std::error::Error, code: ExitCode) -> ExitCode {
    eprintln!("orlop: {error}");
    code
}

fn command() -> clap::Command {
    Cli::command()
        .args(ignored_flag_definitions())
        .mut_subcommand("serve", |serve| serve.args(ignored_flag_definitions()))
        .mut_subcommand("bench", bench::hide_rejected_flags)
}

fn serve(flags: &Flags, of_flags: Notices) -> Outcome {
    let (settings, notices) = Settings::load_with_notices(flags, of_flags)?;
    let log = logging::start(&settings)?;
    supervise::log_panics(orlop_sql::SQLITE_THREADS);
    warn_of_settings(&notices);
    let outcome = match settings.check_members(&notices.initial_cluster.unwrap_or_default()) {
        Ok(()) => serve_until_signal(settings),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = &outcome {
        log.failure(&**error);
    }
    outcome
}

/// Logs which settings have no effect or another name, or are of no use to clients.
fn warn_of_settings(notices: &Notices) {
    if !notices.ignored.is_empty() {
        warn!(settings = notices.ignored.join(", "), "ignoring settings of etcd that have no effect in Orlop");
    }
    for name in &notices.deprecated {
        warn!("{}", deprecation(name));
    }
    for name in &notices.unrecognized {
        // etcd's message and field.
        warn!("environment-variable" = name, "unrecognized environment variable");
    }
    if !notices.unspecified_urls.is_empty() {
        warn!(
            urls = notices.unspecified_urls.join(","),
            "clients that list the members get a URL that leads each of them to its own machine: set \
             advertise-client-urls to a name or an address of this machine"
        );
    }
}

fn serve_until_signal(settings: Settings) -> Outcome {
    on_threads(settings.worker_threads, async {
        let shutdown = shutdown_signal(|| {})?;
        server::serve(settings, shutdown).await?;
        Ok(())
    })
}

fn migrate(args: migrate::Args) -> Outcome {
    let settings = Settings::load(&args.flags)?;
    supervise::log_panics(orlop_sql::SQLITE_THREADS);
    on_threads(settings.worker_threads, async {
        let alarmed = migrate::Alarmed::default();
        let left = Arc::clone(&alarmed);
        let shutdown = shutdown_signal(move || {
            if !left.lock().is_empty() {
                eprintln!("orlop: {}", migrate::ALARM_REMAINS);
            }
        })?;
        Box::pin(migrate::run(args, settings, alarmed, shutdown)).await
    })
}

fn serve_console(args: console::command::Args) -> Outcome {
    // Standard output has the address of the page; the log contains what the page wrote.
    logging::start(&Settings::default())?;
    supervise::log_panics(orlop_sql::SQLITE_THREADS);
    on_threads(1, async {
        let shutdown = shutdown_signal(|| {})?;
        Box::pin(console::command::run(args, shutdown)).await
    })
}

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn on_one_thread<T>(command: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    Builder::new_current_thread().enable_all().build()?.block_on(command)
}

/// Runs a command on `worker_threads`; 0: depends on the number of cores. On one or two cores a single thread is faster
/// than several, because a request moves between threads less often.
fn on_threads(worker_threads: usize, command: impl Future<Output = Outcome>) -> Outcome {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match worker_threads {
        0 if cores <= 2 => 1,
        0 => cores,
        threads => threads,
    };
    let mut builder = if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    let runtime = builder.worker_threads(threads).enable_all().build()?;
    let outcome = runtime.block_on(command);
    // A stuck request must not keep the process alive.
    runtime.shutdown_background();
    outcome
}

/// Returns a future that completes at the first SIGTERM or SIGINT; a second signal ends the process at once, after
/// `before_exit`.
fn shutdown_signal(before_exit: impl Fn() + Send + 'static) -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (first, done) = tokio::sync::oneshot::channel();
    supervise::vital("the signal handler", async move {
        let mut first = Some(first);
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            match first.take() {
                Some(first) => drop(first.send(())),
                None => {
                    before_exit();
                    std::process::exit(1)
                }
            }
        }
    });
    Ok(async {
        // The sender is dropped only at the first signal.
        let _ = done.await;
    })
}
