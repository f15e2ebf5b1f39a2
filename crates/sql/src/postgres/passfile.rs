//! Files of passwords in the form of libpq's `.pgpass`: the one that the URL's parameter `passfile` names, or else
//! `PGPASSFILE` and `~/.pgpass`. They are read at each connection, so a changed password needs no restart. No line of them
//! is ever logged. sqlx, which would log malformed lines, reads none (see [`super::hosts`]).
//!
//! As with libpq, other users must not be able to read a file. If `passfile` names a file of root that only its group can
//! read, it is also accepted, as Postgres accepts it for keys: Kubernetes mounts Secrets in this form.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use tracing::warn;

/// The connection for which a password is wanted.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) host: &'a str,
    pub(super) port: u16,
    pub(super) database: &'a str,
    pub(super) user: &'a str,
}

/// Returns the password of the first line that matches in the file that `passfile` names.
///
/// # Errors
///
/// If the file cannot be read, or others can read it.
pub(super) fn password(file: &Path, wanted: Wanted<'_>) -> io::Result<Option<String>> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("passfile {}: {error}", file.display()));
    let metadata = fs::metadata(file).map_err(named)?;
    let (mode, is_of_root) = (metadata.mode(), metadata.uid() == 0);
    let excess = if is_of_root { mode & 0o037 } else { mode & 0o077 };
    if excess != 0 {
        return Err(named(io::Error::other(format!("its mode is {:o}, but must be 0600 or stricter", mode & 0o777))));
    }
    Ok(find(&fs::read_to_string(file).map_err(named)?, wanted))
}

/// Returns the password of the first line that matches in `PGPASSFILE`, or else in `~/.pgpass`. Ignores files that cannot be
/// used, of which [`warn_of_unusable`] warns.
pub(super) fn usual_password(wanted: Wanted<'_>) -> Option<String> {
    usual_files().filter(|file| unusable(file).is_none()).find_map(|file| {
        // The lines of other connections may be in another encoding.
        let text = fs::read(file).ok()?;
        find(&String::from_utf8_lossy(&text), wanted)
    })
}

/// Warns of files that [`usual_password`] ignores.
pub(super) fn warn_of_unusable() {
    for file in usual_files() {
        if let Some(reason) = unusable(&file) {
            warn!(file = %file.display(), reason, "cannot use the file of passwords");
        }
    }
}

/// Returns `PGPASSFILE` and `~/.pgpass`, which need not exist.
fn usual_files() -> impl Iterator<Item = PathBuf> {
    let named = std::env::var_os("PGPASSFILE").map(PathBuf::from);
    let usual = std::env::home_dir().map(|home| home.join(".pgpass"));
    named.into_iter().chain(usual)
}

/// Returns why a usual file cannot be used, if it exists.
fn unusable(file: &Path) -> Option<String> {
    match fs::File::open(file).and_then(|file| file.metadata()) {
        Ok(metadata) if metadata.mode() & 0o077 == 0 => None,
        Ok(metadata) => Some(format!("its mode is {:o}, but must be 0600 or stricter", metadata.mode() & 0o777)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => Some(error.to_string()),
    }
}

fn find(text: &str, wanted: Wanted<'_>) -> Option<String> {
    let port = wanted.port.to_string();
    let expected = [wanted.host, &port, wanted.database, wanted.user];
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let fields = fields(line);
        let is_match = fields.len() > expected.len()
            && expected.iter().zip(&fields).all(|(expected, field)| field == "*" || field == expected);
        is_match.then(|| fields[expected.len()].clone())
    })
}

/// Divides a line at colons. A backslash escapes the next character.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        let character = match character {
            ':' if fields.len() < 5 => {
                fields.push(String::new());
                continue;
            }
            '\\' => characters.next().unwrap_or('\\'),
            other => other,
        };
        if let Some(field) = fields.last_mut() {
            field.push(character);
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::{Wanted, find, fs, password, unusable};

    const WANTED: Wanted<'_> = Wanted { host: "a", port: 5432, database: "db", user: "u" };

    #[test]
    fn usual_file_that_others_can_read_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pgpass");
        assert_eq!(unusable(&file), None);
        fs::write(&file, "").unwrap();
        for (mode, is_usable) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false)] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(unusable(&file).is_none(), is_usable, "{mode:o}");
        }
    }

    #[test]
    fn first_matching_line_has_the_password() {
        for (text, expected) in [
            ("a:5432:db:u:p", Some("p")),
            ("# a:5432:db:u:x\n*:*:*:*:p\na:5432:db:u:q", Some("p")),
            ("b:5432:db:u:p\na:*:db:u:q", Some("q")),
            ("a:5433:db:u:p", None),
            (r"a:5432:db:u:p\:q\\r", Some(r"p:q\r")),
            ("a:5432:db:u:p:q", Some("p:q")),
            ("a:5432:db:u", None),
            ("", None),
        ] {
            assert_eq!(find(text, WANTED).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn file_that_others_can_read_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(&file, "*:*:*:*:p\n").expect("it can be written");
        let is_of_root = fs::metadata(file.path()).expect("it exists").uid() == 0;
        for (mode, is_read) in
            [(0o600, true), (0o400, true), (0o440, is_of_root), (0o640, is_of_root), (0o604, false), (0o660, false)]
        {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("it is ours");
            assert_eq!(password(file.path(), WANTED).is_ok(), is_read, "{mode:o}");
        }
        assert!(password(std::path::Path::new("/no/such/file"), WANTED).is_err());
    }
}
