//! The effect of a fault, as a printed line and as a row for docs/explanation/faults.md.

use std::{env, fs::File, io::Write as _, time::Duration};

use super::judge::Judged;

/// One fault on one store, injected `times` times.
pub struct Report<'a> {
    pub fault: &'a str,
    pub target: &'a str,
    pub times: usize,
    pub judged: Judged,
    /// The time that each client waited after each injection.
    pub waits: Vec<Duration>,
}

impl Report<'_> {
    /// Prints the report and, if `ORLOP_TORTURE_REPORT` names a file, appends a tab-separated row: fault, store, times,
    /// acknowledged, refused, unknown, lost, and the median and the longest wait in milliseconds. A run that loses a
    /// write fails before it gets here.
    pub fn publish(mut self) {
        self.waits.sort_unstable();
        let [median, longest] = [self.waits.len() / 2, self.waits.len() - 1].map(|at| self.waits[at]);
        let Judged { acknowledged, refused, unknown } = self.judged;
        println!(
            "{} on {}, {} times: {acknowledged} acknowledged, {refused} refused, {unknown} unknown, none lost; \
             clients waited {median:.0?}, at most {longest:.0?}",
            self.fault, self.target, self.times
        );
        let Some(path) = env::var_os("ORLOP_TORTURE_REPORT") else { return };
        let mut file = File::options().create(true).append(true).open(path).expect("the report can be written");
        let row = format!(
            "{}\t{}\t{}\t{acknowledged}\t{refused}\t{unknown}\t0\t{}\t{}\n",
            self.fault,
            self.target,
            self.times,
            median.as_millis(),
            longest.as_millis()
        );
        file.write_all(row.as_bytes()).expect("the report can be written");
    }
}
