//! `console-password-file`: the password of the page, with which visitors log in where the server has no users.
//!
//! It is read at each log-in, so that a new password needs no restart. Sessions that were begun with the old one go on.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use orlop_core::{log_limit::LogLimit, supervise::blocking};
use sha2::{Digest as _, Sha256};
use tokio::time::sleep;
use tracing::warn;

/// Minimum length of the password in bytes.
const LENGTH_MIN: usize = 12;
/// Time before a wrong password is refused. With the limit of concurrent log-ins, it bounds how many can be tried.
const WRONG_PAUSE: Duration = Duration::from_secs(1);

/// Limits messages about refused log-ins.
static REFUSED_LOG: LogLimit = LogLimit::every(Duration::from_secs(1));

pub(super) struct PasswordFile(PathBuf);

/// Why a visitor is not logged in, as a text for the form.
pub(super) type Refusal = &'static str;

impl PasswordFile {
    /// Returns the file with this path; `None` for an empty one, which stands for no password.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or the password is too short.
    pub fn open(path: &Path) -> Result<Option<Self>, String> {
        if path.as_os_str().is_empty() {
            return Ok(None);
        }
        let file = Self(path.to_owned());
        file.read().map(|_| Some(file))
    }

    /// Checks a password.
    ///
    /// # Errors
    ///
    /// If it is wrong, or the file cannot be read.
    pub async fn check(&self, given: &str) -> Result<(), Refusal> {
        let file = Self(self.0.clone());
        let (reason, refusal) = match blocking(move || file.read()).await {
            // The time that the comparison takes depends on the digests, and says nothing about the password.
            Some(Ok(password)) if Sha256::digest(&password) == Sha256::digest(given) => return Ok(()),
            Some(Ok(_)) => ("wrong password".to_owned(), "Wrong password."),
            Some(Err(error)) => (error, "The password of the page cannot be read. The log says why."),
            None => ("the process ends".to_owned(), "The page ends."),
        };
        if let Some(count) = REFUSED_LOG.count() {
            warn!(reason, count, "log-ins to the web page were refused");
        }
        sleep(WRONG_PAUSE).await;
        Err(refusal)
    }

    /// Returns the content without the end of its line.
    fn read(&self) -> Result<String, String> {
        let Self(path) = self;
        let failed = |reason: &dyn std::fmt::Display| format!("console-password-file {}: {reason}", path.display());
        // Another kind of file, such as a pipe, cannot be read again at each log-in.
        if !fs::metadata(path).map_err(|error| failed(&error))?.is_file() {
            return Err(failed(&"not a regular file"));
        }
        let text = fs::read_to_string(path).map_err(|error| failed(&error))?;
        let password = text.strip_suffix('\n').unwrap_or(&text);
        let password = password.strip_suffix('\r').unwrap_or(password);
        let length = password.len();
        if length < LENGTH_MIN {
            return Err(failed(&format!("the password has {length} bytes; at least {LENGTH_MIN} are required")));
        }
        Ok(password.to_owned())
    }
}
