//! A folder of snapshots whose names are the times at which they were taken, of which a number of the newest are kept.

use std::{
    fs,
    io::ErrorKind,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use super::{Result, TEMPORARY_PREFIX, TEMPORARY_SUFFIX, file_error};

const PREFIX: &str = "orlop-";
const SUFFIX: &str = ".db";
/// The form of the time in a name; `0` is any digit.
const TIME_FORM: &[u8] = b"00000000T000000Z";
/// Time without a write after which a temporary file is one that a killed process has left.
const ABANDONED_AFTER: Duration = Duration::from_secs(60 * 60);

/// A snapshot with a later name than this after now was taken while the clock was wrong.
const AHEAD_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// A folder with snapshots named `orlop-YYYYMMDDTHHMMSSZ.db` (UTC). Other files in it are
/// neither read nor changed, except for temporary files of snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatedFolder(PathBuf);

impl DatedFolder {
    pub fn new(folder: PathBuf) -> Self {
        Self(folder)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the path of a snapshot that is taken at `time`.
    pub fn file_at(&self, time: SystemTime) -> PathBuf {
        // 2026-01-31T12:34:56Z
        let text = humantime::format_rfc3339_seconds(time).to_string();
        self.0.join(format!("{PREFIX}{}{SUFFIX}", text.replace(['-', ':'], "")))
    }

    /// Returns the time of the newest snapshot; `None` if there is none, or the folder does not exist. Snapshots that a clock
    /// named that was ahead do not count.
    ///
    /// # Errors
    ///
    /// If the folder cannot be read.
    pub fn newest(&self, now: SystemTime) -> Result<Option<SystemTime>> {
        let names = self.names()?;
        Ok(names.iter().rev().filter(|name| !is_ahead(name, now)).find_map(|name| time_of(name)))
    }

    /// Deletes all snapshots but the newest `keep`, one of which is `taken`, and [abandoned](Self::delete_abandoned) files.
    /// Snapshots that a clock named that was ahead count as the oldest.
    ///
    /// # Errors
    ///
    /// If a file cannot be deleted. The others are deleted nevertheless.
    pub fn prune(&self, taken: &Path, keep: NonZeroUsize, now: SystemTime) -> Result<()> {
        // `taken` is not compared with the others: its name is the smaller one after the clock was set back.
        let mut snapshots = self.names()?;
        snapshots.retain(|name| time_of(name).is_some() && self.0.join(name) != taken);
        // The sort is stable.
        snapshots.sort_by_key(|name| !is_ahead(name, now));
        let old = snapshots.iter().rev().skip(keep.get() - 1).map(|name| self.0.join(name));
        let deleted = delete(old);
        self.delete_abandoned(now).and(deleted)
    }

    /// Deletes temporary files that a killed process has left. One that is being written is never as old.
    ///
    /// # Errors
    ///
    /// If a file cannot be deleted. The others are deleted nevertheless.
    pub fn delete_abandoned(&self, now: SystemTime) -> Result<()> {
        let is_temporary = |name: &String| name.starts_with(TEMPORARY_PREFIX) && name.ends_with(TEMPORARY_SUFFIX);
        let temporary = self.names()?.into_iter().filter(is_temporary).map(|name| self.0.join(name));
        delete(temporary.filter(|path| is_abandoned(path, now)))
    }

    /// Returns the names of all files, sorted. Names that are not text are not Orlop's.
    fn names(&self) -> Result<Vec<String>> {
        let unreadable = |error: std::io::Error| file_error("read", &self.0, &error);
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(unreadable)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry.map_err(unreadable)?.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }
}

/// Deletes files. Returns the last error.
fn delete(paths: impl Iterator<Item = PathBuf>) -> Result<()> {
    let mut outcome = Ok(());
    for path in paths {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => outcome = Err(file_error("delete", &path, &error)),
            Ok(()) | Err(_) => {}
        }
    }
    outcome
}

/// Returns the time in the name of a snapshot; `None` if the name has another form.
fn time_of(name: &str) -> Option<SystemTime> {
    let time = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    let fits = |(byte, form): (u8, &u8)| if *form == b'0' { byte.is_ascii_digit() } else { byte == *form };
    if time.len() != TIME_FORM.len() || !time.bytes().zip(TIME_FORM).all(fits) {
        return None;
    }
    let (day, hour) = (&time[..8], &time[9..15]);
    let text = format!("{}-{}-{}T{}:{}:{}Z", &day[..4], &day[4..6], &day[6..], &hour[..2], &hour[2..4], &hour[4..]);
    humantime::parse_rfc3339(&text).ok()
}

fn is_ahead(name: &str, now: SystemTime) -> bool {
    time_of(name).is_some_and(|time| time.duration_since(now).is_ok_and(|ahead| ahead > AHEAD_MAX))
}

fn is_abandoned(path: &Path, now: SystemTime) -> bool {
    let written = path.metadata().and_then(|metadata| metadata.modified());
    written.is_ok_and(|written| now.duration_since(written).is_ok_and(|age| age > ABANDONED_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3_600);

    fn names(folder: &Path) -> Vec<String> {
        DatedFolder::new(folder.to_owned()).names().unwrap()
    }

    #[test]
    fn names_are_times() {
        let folder = DatedFolder::new("backup".into());
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let path = folder.file_at(time);
        assert_eq!(path, Path::new("backup/orlop-20270115T080000Z.db"));
        assert_eq!(time_of("orlop-20270115T080000Z.db"), Some(time));
        for other in [
            "orlop-20270115T080000Z.db.part",
            "orlop-20270115T080000.db",
            "orlop-2027011T0800000Z.db",
            "orlop-20271315T080000Z.db",
            "orlop-\u{1f4a9}0115T080000Z.db",
            "orlop-.db",
            "orlop.db",
            "x-20270115T080000Z.db",
        ] {
            assert_eq!(time_of(other), None, "{other}");
        }
    }

    #[test]
    fn newest_snapshots_and_other_files_are_kept() {
        let home = tempfile::tempdir().unwrap();
        let folder = DatedFolder::new(home.path().to_owned());
        let start = SystemTime::UNIX_EPOCH + 500_000 * HOUR;
        let times: Vec<SystemTime> = (0..5).map(|hour| start + hour * HOUR).collect();
        for time in &times {
            fs::write(folder.file_at(*time), "").unwrap();
        }
        let others = ["orlop.db", "orlop-2027.db", "orlop-snapshot-monday.db", "orlop-snapshot-fresh.tmp"];
        for other in others {
            fs::write(home.path().join(other), "").unwrap();
        }
        let name = |time: &SystemTime| folder.file_at(*time).file_name().unwrap().to_str().unwrap().to_owned();
        let keep = |keep: usize| NonZeroUsize::new(keep).unwrap();
        let check = |kept: &[&SystemTime], others: &[&str]| {
            let mut want: Vec<String> = kept.iter().map(|time| name(time)).collect();
            want.extend(others.iter().map(|other| (*other).to_owned()));
            want.sort();
            assert_eq!(names(home.path()), want);
        };
        let fresh = home.path().join(others[3]).metadata().unwrap().modified().unwrap();
        assert_eq!(folder.newest(times[0]).unwrap(), Some(times[4]));
        folder.prune(&folder.file_at(times[4]), keep(9), fresh).unwrap();
        check(&[&times[0], &times[1], &times[2], &times[3], &times[4]], &others);
        folder.prune(&folder.file_at(times[4]), keep(3), fresh).unwrap();
        check(&[&times[2], &times[3], &times[4]], &others);
        // The clock was set back: the snapshot just taken has the oldest name.
        folder.prune(&folder.file_at(times[2]), keep(1), fresh + 2 * HOUR).unwrap();
        check(&[&times[2]], &others[..3]);
        // The clock was ahead for a while.
        let ahead: Vec<SystemTime> = (0..2).map(|hour| start + (10_000 + hour) * HOUR).collect();
        for time in ahead.iter().chain(&times[3..]) {
            fs::write(folder.file_at(*time), "").unwrap();
        }
        assert_eq!(folder.newest(times[4]).unwrap(), Some(times[4]));
        folder.prune(&folder.file_at(times[4]), keep(4), times[4]).unwrap();
        check(&[&times[2], &times[3], &times[4], &ahead[1]], &others[..3]);
        folder.prune(&folder.file_at(times[4]), keep(3), times[4]).unwrap();
        check(&[&times[2], &times[3], &times[4]], &others[..3]);
        assert_eq!(DatedFolder::new(home.path().join("absent")).newest(start).unwrap(), None);
    }
}
