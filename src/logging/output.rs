//! Where the log is written: standard error, standard output, and files, which are rotated if that is enabled.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt as _, fchown},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use serde::Deserialize;
use tracing_subscriber::fmt::MakeWriter;

use super::stream::{Notice, Stream};
use crate::config::Settings;
use orlop_core::{clock, files::folder_of, private};

/// The settings of etcd's `--log-rotation-config-json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Rotation {
    /// Size in MiB at which a new file begins; 0: 100.
    maxsize: u64,
    /// Days after which an old file is deleted; 0: never.
    maxage: u64,
    /// Number of old files to keep; 0: all.
    maxbackups: usize,
    localtime: bool,
    compress: bool,
}

impl Default for Rotation {
    fn default() -> Self {
        Self { maxsize: MAX_SIZE_DEFAULT, maxage: 0, maxbackups: 0, localtime: false, compress: false }
    }
}

const MAX_SIZE_DEFAULT: u64 = 100;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// All places to which the log is written.
pub(super) struct Outputs {
    places: Vec<Output>,
    notice: Notice,
}

enum Output {
    Stderr(Stream<io::Stderr>),
    Stdout(Stream<io::Stdout>),
    File(Mutex<LogFile>),
}

impl Outputs {
    /// Opens the places in `log-outputs`.
    ///
    /// # Errors
    ///
    /// If a file cannot be opened, or rotation is enabled without a single file.
    pub(super) fn open(settings: &Settings) -> Result<Self, String> {
        let rotation = if settings.enable_log_rotation { Some(rotation(settings)?) } else { None };
        let open = |place: &String| match place.as_str() {
            // etcd's name for journald, which reads standard error.
            "default" | "stderr" | "systemd/journal" => Ok(Output::Stderr(Stream::new(io::stderr()))),
            "stdout" => Ok(Output::Stdout(Stream::new(io::stdout()))),
            file => LogFile::open(file.into(), rotation).map(|file| Output::File(Mutex::new(file))),
        };
        let mut places: Vec<Output> = settings.log_outputs.0.iter().map(open).collect::<Result<_, String>>()?;
        if places.is_empty() {
            places.push(Output::Stderr(Stream::new(io::stderr())));
        }
        match places.as_slice() {
            [Output::File(_)] => {}
            _ if rotation.is_none() => {}
            _ => return Err("enable-log-rotation requires a single file path in log-outputs".to_owned()),
        }
        Ok(Self { places, notice: super::text_notice })
    }

    /// Returns whether the log is written to standard error alone.
    pub(super) fn is_stderr(&self) -> bool {
        self.places.iter().all(|output| matches!(output, Output::Stderr(_)))
    }

    /// Reports lost lines in this form.
    pub(super) fn with_notice(self, notice: Notice) -> Self {
        Self { notice, ..self }
    }
}

fn rotation(settings: &Settings) -> Result<Rotation, String> {
    let text = &settings.log_rotation_config_json;
    let rotation: Rotation = serde_json::from_str(text).map_err(|error| {
        format!("log-rotation-config-json: {error}; example: {{\"maxsize\": 100, \"maxage\": 0, \"maxbackups\": 0}}")
    })?;
    for (given, key) in [(rotation.localtime, "localtime"), (rotation.compress, "compress")] {
        if given {
            return Err(format!("log-rotation-config-json: {key} is not supported; leave it out or set it to false"));
        }
    }
    Ok(rotation)
}

impl<'a> MakeWriter<'a> for Outputs {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

/// An event is written with one call. It is written to every place, even if one fails.
impl Write for &Outputs {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut outcome = Ok(text.len());
        for output in &self.places {
            let written = match output {
                Output::Stderr(stream) => stream.write(text, self.notice),
                Output::Stdout(stream) => stream.write(text, self.notice),
                Output::File(file) => file.lock().write(text),
            };
            outcome = written.and(outcome);
        }
        outcome
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A log file.
struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    rotation: Option<Rotation>,
    /// Whether the last line may lack its end, because it could not be written.
    is_torn: bool,
}

impl LogFile {
    fn open(path: PathBuf, rotation: Option<Rotation>) -> Result<Self, String> {
        let failed = |error: io::Error| format!("log-outputs: cannot open {}: {error}", path.display());
        let file = private::file_options().append(true).open(&path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        Ok(Self { path, file, bytes, rotation, is_torn: false })
    }

    /// Writes a line. If the file cannot be rotated, the line is added to it, and the next one tries again.
    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        let mut rotated = Ok(());
        if let Some(rotation) = self.rotation {
            let max = if rotation.maxsize == 0 { MAX_SIZE_DEFAULT } else { rotation.maxsize };
            if self.bytes > 0 && self.bytes.saturating_add(line.len() as u64) > max.saturating_mul(1 << 20) {
                rotated = self.rotate(rotation);
            }
        }
        self.append(line).and(rotated)
    }

    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        if self.is_torn {
            self.file.write_all(b"\n")?;
            (self.bytes, self.is_torn) = (self.bytes + 1, false);
        }
        let written = self.file.write_all(line);
        match written {
            Ok(()) => self.bytes += line.len() as u64,
            Err(_) => {
                let bytes = self.file.metadata().map_or(self.bytes, |file| file.len());
                (self.bytes, self.is_torn) = (bytes, bytes > self.bytes);
            }
        }
        written
    }

    /// Renames the file and begins a new one, then deletes old files.
    fn rotate(&mut self, rotation: Rotation) -> io::Result<()> {
        let now = clock::now();
        let (stem, extension) = name_parts(&self.path);
        let renamed = |time| {
            let time = humantime::format_rfc3339_millis(time).to_string().replace(':', "-");
            self.path.with_file_name(format!("{stem}-{}{extension}", time.trim_end_matches('Z')))
        };
        let mut time = now;
        while renamed(time).exists() {
            time += Duration::from_millis(1);
        }
        // The file is not found if it was moved or deleted.
        if let Err(error) = fs::rename(&self.path, renamed(time))
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        let file = private::file_options().append(true).open(&self.path)?;
        keep_access(&self.file, &file);
        self.file = file;
        (self.bytes, self.is_torn) = (0, false);
        let mut old = old_files(&self.path)?;
        old.sort_by_key(|(modified, _)| std::cmp::Reverse(*modified));
        for (number, (modified, file)) in old.iter().enumerate() {
            let is_excess = rotation.maxbackups > 0 && number >= rotation.maxbackups;
            let age = now.duration_since(*modified).unwrap_or_default();
            if is_excess || (rotation.maxage > 0 && age > DAY * u32::try_from(rotation.maxage).unwrap_or(u32::MAX)) {
                fs::remove_file(file)?;
            }
        }
        Ok(())
    }
}

/// Gives a new file the group and the mode of the one before, so that a program which may read the log can go on. If the
/// group cannot be kept, the new file stays private.
fn keep_access(before: &File, file: &File) {
    let kept = before.metadata().and_then(|before| {
        fchown(file, None, Some(before.gid()))?;
        file.set_permissions(before.permissions())
    });
    // The log cannot tell of its own file.
    drop(kept);
}

/// Returns `etcd` and `.log` of `logs/etcd.log`.
fn name_parts(path: &Path) -> (String, String) {
    let part = |part: Option<&std::ffi::OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
    let extension = path.extension().map_or(String::new(), |_| format!(".{}", part(path.extension())));
    (part(path.file_stem()), extension)
}

/// Returns the rotated files of a log file with their times of modification.
fn old_files(path: &Path) -> io::Result<Vec<(SystemTime, PathBuf)>> {
    let (stem, extension) = name_parts(path);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder_of(path))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let middle = name.strip_prefix(&format!("{stem}-")).and_then(|rest| rest.strip_suffix(&extension));
        if middle.is_some_and(|middle| middle.starts_with(|c: char| c.is_ascii_digit())) {
            found.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn full_file_is_renamed_and_old_files_are_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("orlop.log");
        let rotation = Rotation { maxsize: 1, maxbackups: 2, ..Rotation::default() };
        let mut log = LogFile::open(path.clone(), Some(rotation)).unwrap();
        fs::write(folder.path().join("orlop-notes.log"), "not a rotated file").unwrap();
        let half = vec![b'x'; 600 << 10];
        for files in [1, 2, 3, 3, 3] {
            log.write(&half).unwrap();
            assert_eq!(old_files(&path).unwrap().len() + 1, files);
            assert_eq!(fs::metadata(&path).unwrap().len(), half.len() as u64);
        }
        assert!(folder.path().join("orlop-notes.log").exists());
    }

    #[test]
    fn new_file_has_the_mode_of_the_rotated_one() {
        let rotation = Rotation { maxsize: 1, ..Rotation::default() };
        for given in [None, Some(0o640)] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("orlop.log");
            if let Some(given) = given {
                File::create(&path).unwrap().set_permissions(fs::Permissions::from_mode(given)).unwrap();
            }
            let mut log = LogFile::open(path.clone(), Some(rotation)).unwrap();
            for _ in 0..2 {
                log.write(&vec![b'x'; 600 << 10]).unwrap();
            }
            let rotated = old_files(&path).unwrap().remove(0).1;
            for file in [&path, &rotated] {
                let mode = fs::metadata(file).unwrap().mode() & 0o777;
                assert_eq!(mode, given.unwrap_or(0o600), "{}", file.display());
            }
        }
    }

    #[test]
    fn line_is_written_if_the_file_is_gone_or_cannot_be_rotated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("orlop.log");
        let rotation = Rotation { maxsize: 1, ..Rotation::default() };
        let mut log = LogFile::open(path.clone(), Some(rotation)).unwrap();
        let half = vec![b'x'; 600 << 10];
        log.write(&half).unwrap();
        fs::remove_file(&path).unwrap();
        log.write(&half).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), half.len() as u64);

        // The new file cannot be opened: the line is in the old one.
        log.path = folder.path().join("none/orlop.log");
        log.write(&half).unwrap_err();
        assert_eq!(fs::metadata(&path).unwrap().len(), 2 * half.len() as u64);
        log.path.clone_from(&path);
        log.write(b"later\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "later\n");
    }

    #[test]
    fn line_after_a_failed_write_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("orlop.log");
        let mut log = LogFile::open("/dev/full".into(), None).unwrap();
        log.write(b"lost\n").unwrap_err();
        assert!(!log.is_torn, "nothing of the line is in the file");
        log.is_torn = true;
        log.file = File::options().create(true).append(true).open(&path).unwrap();
        for line in ["a\n", "b\n"] {
            log.write(line.as_bytes()).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "\na\nb\n");
    }

    #[test]
    fn default_of_the_setting_is_that_of_its_fields() {
        assert_eq!(rotation(&Settings::default()), Ok(Rotation::default()));
    }

    #[test]
    fn log_without_outputs_is_written_to_stderr() {
        let settings = Settings { log_outputs: crate::config::List::default(), ..Settings::default() };
        let outputs = Outputs::open(&settings).unwrap();
        assert!(matches!(outputs.places.as_slice(), [Output::Stderr(_)]));
    }
}
