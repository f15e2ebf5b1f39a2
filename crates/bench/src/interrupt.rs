//! Ctrl-C: the first asks the run to stop and report, the second ends the process.

use tokio::sync::watch;

/// Exit status of a process that Ctrl-C ended, as shells count it.
const EXIT_INTERRUPTED: i32 = 130;

#[derive(Clone)]
pub struct Interrupt(watch::Receiver<bool>);

impl Interrupt {
    /// Listens from now on, until the process ends.
    pub fn listen() -> Self {
        let (interrupted, receiver) = watch::channel(false);
        tokio::spawn(async move {
            if tokio::signal::ctrl_c().await.is_err() {
                // Without a handler Ctrl-C ends the process by itself; the sender must live on for `wait`.
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

    /// Returns once the user has interrupted. Cancel safe: it only looks.
    pub async fn wait(&self) {
        if self.0.clone().wait_for(|interrupted| *interrupted).await.is_err() {
            // The listener is gone with the runtime: nobody will interrupt any more.
            std::future::pending().await
        }
    }
}
