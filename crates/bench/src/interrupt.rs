//! Ctrl-C and SIGTERM: the first one stops the run, whose report is still printed; the second ends the process.

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};

/// Exit status of a process ended by SIGINT, by the convention of shells: 128 + 2.
const EXIT_INTERRUPTED: i32 = 130;
/// Exit status of a process ended by SIGTERM.
const EXIT_TERMINATED: i32 = 143;

/// Whether the user has pressed Ctrl-C, or has sent SIGINT or SIGTERM.
#[derive(Clone)]
pub struct Interrupt(watch::Receiver<bool>);

impl Interrupt {
    /// Starts to listen for the signals.
    pub fn listen() -> Self {
        let (interrupted, receiver) = watch::channel(false);
        tokio::spawn(async move {
            let handlers = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
            let (Ok(mut interrupts), Ok(mut terminations)) = handlers else {
                // Without handlers the signals end the process, and `wait` never completes.
                return interrupted.closed().await;
            };
            next(&mut interrupts, &mut terminations).await;
            interrupted.send_replace(true);
            std::process::exit(next(&mut interrupts, &mut terminations).await);
        });
        Self(receiver)
    }

    pub fn is_set(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits for a signal. Cancel safe: it does not consume the signal.
    pub async fn wait(&self) {
        if self.0.clone().wait_for(|interrupted| *interrupted).await.is_err() {
            // The listener ended with the runtime, so no interrupt follows.
            std::future::pending().await
        }
    }
}

/// Waits for a signal. Returns the exit status of a process that it ends.
async fn next(interrupts: &mut Signal, terminations: &mut Signal) -> i32 {
    tokio::select! {
        _ = interrupts.recv() => EXIT_INTERRUPTED,
        _ = terminations.recv() => EXIT_TERMINATED,
    }
}
