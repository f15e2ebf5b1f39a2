//! Ctrl-C handling: the first Ctrl-C stops the run, whose report is still printed; the second ends the process.

use tokio::sync::watch;

/// Exit status of a process ended by SIGINT, by the convention of shells: 128 + 2.
const EXIT_INTERRUPTED: i32 = 130;

/// Whether the user has pressed Ctrl-C.
#[derive(Clone)]
pub struct Interrupt(watch::Receiver<bool>);

impl Interrupt {
    /// Starts to listen for Ctrl-C.
    pub fn listen() -> Self {
        let (interrupted, receiver) = watch::channel(false);
        tokio::spawn(async move {
            if tokio::signal::ctrl_c().await.is_err() {
                // If the handler cannot be installed, Ctrl-C ends the process, and `wait` never completes.
                return interrupted.closed().await;
            }
            interrupted.send_replace(true);
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(EXIT_INTERRUPTED);
            }
        });
        Self(receiver)
    }

    pub fn is_set(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits for Ctrl-C. Cancel safe: it does not consume the signal.
    pub async fn wait(&self) {
        if self.0.clone().wait_for(|interrupted| *interrupted).await.is_err() {
            // The listener ended with the runtime, so no interrupt follows.
            std::future::pending().await
        }
    }
}
