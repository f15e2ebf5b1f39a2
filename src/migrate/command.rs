//! The flags of `orlop migrate`.

use orlop_client::{Credentials, Endpoint};

use super::Goal;
use crate::config::Flags;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Addresses of the source's members, separated by commas; the first that answers is used
    #[arg(long, required = true, value_delimiter = ',', value_name = "URLS", help_heading = "Source")]
    pub(super) from: Vec<Endpoint>,

    /// End when the copy has the revision that the source has at the start, or at which it refuses writes
    #[arg(long, group = "end", help_heading = "Source")]
    once: bool,

    /// Serve the copy when it has the newest revision of the source
    #[arg(long, group = "end", help_heading = "Source")]
    cut_over: bool,

    /// With --once or --cut-over: let the source refuse writes before the last revisions are copied, with the alarm
    /// CORRUPT; `etcdctl alarm disarm` ends it
    #[arg(long, requires = "end", help_heading = "Source")]
    pub(super) fence: bool,

    #[command(flatten, next_help_heading = "Source")]
    pub(super) credentials: Credentials,

    #[command(flatten)]
    pub flags: Flags,
}

impl Args {
    pub(super) fn goal(&self) -> Goal {
        match (self.once, self.cut_over) {
            (_, true) => Goal::CutOver,
            (true, false) => Goal::Once,
            (false, false) => Goal::Follow,
        }
    }
}
