//! Helpers for child processes.

use std::{io, net::TcpListener, path::PathBuf, process::Stdio, time::Duration};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    time::timeout,
};

use crate::error::Error;

/// Maximum time until a signalled process ends.
const STOP_TIME_MAX: Duration = Duration::from_secs(30);

/// Runs the program; returns its standard output.
pub async fn run(command: &mut Command) -> Result<String, Error> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let failed = |error: String| Error::Program { program: program.clone(), error };
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await;
    let output = output.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim_end().to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Sends the signal and waits until the process has ended. Kills the process after [`STOP_TIME_MAX`].
pub async fn stop(process: &mut Child, signal: Signal) {
    let pid = process.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    if let Some(pid) = pid {
        // Fails if the process has already ended.
        kill_process(pid, signal).ok();
    }
    if timeout(STOP_TIME_MAX, process.wait()).await.is_err() {
        process.kill().await.ok();
    }
}

/// Returns a port of 127.0.0.1 that is not in use.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Searches PATH for the program.
pub fn find_in_path(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}
