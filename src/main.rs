//! Throwaway entry point with `bench` alone.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Load an etcd endpoint in a closed loop and report what it did.
    Bench(orlop::bench::Args),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Command::Bench(args) = Cli::parse().command;
    match orlop::bench::run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orlop bench: {error}");
            ExitCode::FAILURE
        }
    }
}
