//! Figures of one visitor. They are read when the page requests them, at most once a second.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use orlop_client::Client;
use tokio::{sync::Mutex, time::Instant};

use super::backend::Failure;
use crate::insight::{self, Figures, ONLY_ROOT, RootParts, Sizes, SizesReader};

/// Minimum time between two reads. Earlier requests get the figures of the last one.
const READ_PAUSE: Duration = Duration::from_millis(900);
/// Maximum time between two reads that belong together. After a longer one, rates and the chart begin again.
const GAP_MAX: Duration = Duration::from_secs(20);
/// Time for which the parts that need the role root are not requested again after the server has refused them.
const REFUSAL_PAUSE: Duration = Duration::from_secs(60);
/// Number of points of the chart.
const POINTS_MAX: usize = 120;
/// Number of rows of each table.
const ROWS_MAX: u32 = 20;
/// Time to wait for sizes before a page says that they are being collected.
const SIZES_WAIT: Duration = Duration::from_millis(40);
/// Number of children whose sizes are shown.
const CHILDREN_MAX: u32 = 100;

/// The figures of one visitor. Nothing runs between the requests, except a read of sizes that was begun.
#[derive(Default)]
pub(super) struct Live {
    state: Mutex<State>,
    sizes: Mutex<SizesReader>,
}

#[derive(Default)]
struct State {
    last: Option<(Instant, Shown)>,
    points: VecDeque<Point>,
    /// When the server has last refused the parts that need the role root.
    refused_at: Option<Instant>,
}

impl State {
    fn root_parts(&self) -> RootParts {
        let is_refused = self.refused_at.is_some_and(|at| at.elapsed() < REFUSAL_PAUSE);
        if is_refused { RootParts::Skip } else { RootParts::Request }
    }
}

/// Rates between two reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub operations_per_sec: f64,
    pub failures_per_sec: f64,
    /// The slowest of the methods, in seconds.
    pub p99_secs: Option<f64>,
}

/// What the overview shows.
#[derive(Clone)]
pub(super) struct Shown {
    pub figures: Arc<Figures>,
    /// The oldest first.
    pub points: Vec<Point>,
}

impl Live {
    /// Returns the figures, with rates since the last read.
    ///
    /// # Errors
    ///
    /// [`Failure::LoggedOut`] also if only a part is missing because the server no longer accepts the visitor's token: the
    /// others need no token of an older etcd, so the page would otherwise never lead to the form to log in.
    pub async fn figures(&self, client: &Client) -> Result<Shown, Failure> {
        let mut state = self.state.lock().await;
        match &state.last {
            Some((read_at, shown)) if read_at.elapsed() < READ_PAUSE => return Ok(shown.clone()),
            Some((read_at, _)) if read_at.elapsed() > GAP_MAX => *state = State::default(),
            Some(_) | None => {}
        }
        let root_parts = state.root_parts();
        let State { last, points, refused_at } = &mut *state;
        let snapshot = insight::read(client, ROWS_MAX, root_parts).await?;
        if root_parts == RootParts::Request && snapshot.missing.values().any(|reason| reason == ONLY_ROOT) {
            *refused_at = Some(Instant::now());
        }
        if snapshot.missing.values().any(|reason| Failure::of_text(reason.clone()) == Failure::LoggedOut) {
            return Err(Failure::LoggedOut);
        }
        let figures = Figures::new(last.as_ref().map(|(_, before)| &before.figures.now), snapshot);
        if let Some(point) = Point::of(&figures) {
            if points.len() == POINTS_MAX {
                points.pop_front();
            }
            points.push_back(point);
        }
        let shown = Shown { figures: Arc::new(figures), points: points.iter().copied().collect() };
        *last = Some((Instant::now(), shown.clone()));
        Ok(shown)
    }

    /// Returns the sizes below a prefix; `None` while they are being collected.
    pub async fn sizes(&self, client: &Client, prefix: &[u8]) -> Option<Result<Sizes, Failure>> {
        let sizes = self.sizes.lock().await.read(client, prefix, CHILDREN_MAX, SIZES_WAIT).await?;
        Some(sizes.map_err(Failure::of_text))
    }
}

impl Point {
    fn of(figures: &Figures) -> Option<Self> {
        let rates = figures.rates?;
        let methods = figures.operations.as_deref().unwrap_or_default();
        let p99_secs = methods.iter().filter_map(|method| method.p99_secs).max_by(f64::total_cmp);
        let (operations_per_sec, failures_per_sec) = (rates.operations_per_sec, rates.failures_per_sec);
        Some(Self { operations_per_sec, failures_per_sec, p99_secs })
    }
}
