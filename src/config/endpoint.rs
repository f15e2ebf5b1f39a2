//! `datastore-endpoint`: the kind of database, its location and its parameters. Errors do not contain the endpoint,
//! because it may contain a password.

use std::{
    fs,
    path::{Path, PathBuf},
};

use orlop_sql::POSTGRES_PARAMETERS;

use super::{Datastore, variables::nearest};

/// Returns the location of the log. An empty endpoint means SQLite in the data directory.
///
/// # Errors
///
/// If the kind of endpoint or a parameter is unknown, or the file is a link that leads nowhere.
pub(super) fn datastore(endpoint: &str, data_dir: &Path) -> Result<Datastore, String> {
    if endpoint.is_empty() {
        return file(data_dir.join("orlop.db"));
    }
    match endpoint.split_once("://") {
        Some(("sqlite", path)) if path.contains('?') => {
            Err("datastore-endpoint: a sqlite:// URL has no parameters; remove the ? and what follows it".to_owned())
        }
        Some(("sqlite", path)) if !path.is_empty() => file(path.into()),
        Some(("postgres" | "postgresql", address)) if !address.is_empty() => {
            check_parameters(address)?;
            Ok(Datastore::Postgres(endpoint.to_owned()))
        }
        _ => Err("datastore-endpoint must be sqlite://PATH-OF-FILE or postgres://USER:PASSWORD@HOST:PORT,.../DATABASE"
            .to_owned()),
    }
}

/// Follows links, as SQLite does: the WAL and the files of Orlop, such as its lock, are beside the file itself.
fn file(path: PathBuf) -> Result<Datastore, String> {
    // SQLite takes `file:NAME` for a URI, and `:memory:` for no file.
    let is_special =
        [b"file:".as_slice(), b":"].iter().any(|start| path.as_os_str().as_encoded_bytes().starts_with(start));
    let path = if is_special { Path::new(".").join(path) } else { path };
    let is_link = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_symlink());
    if !is_link {
        return Ok(Datastore::Sqlite(path));
    }
    let found = fs::canonicalize(&path);
    found.map(Datastore::Sqlite).map_err(|error| format!("the database file {} is a link: {error}", path.display()))
}

fn check_parameters(address: &str) -> Result<(), String> {
    let Some((_, query)) = address.split_once('?') else { return Ok(()) };
    let names = query.split('&').filter(|pair| !pair.is_empty());
    for name in names.map(|pair| pair.split_once('=').map_or(pair, |(name, _)| name)) {
        if POSTGRES_PARAMETERS.contains(&name) || name == "application_name" || name.starts_with("options[") {
            continue;
        }
        if query.contains('@') {
            // The name may be a part of a password that is not percent-encoded.
            return Err("datastore-endpoint: unknown parameter with an @ behind it; special characters must be \
                        percent-encoded in the password (? is %3F, & is %26, @ is %40)"
                .to_owned());
        }
        let meant = nearest(name, POSTGRES_PARAMETERS.iter().copied(), usize::MAX).unwrap_or_default();
        return Err(format!("datastore-endpoint: unknown parameter {name}; did you mean {meant}?"));
    }
    Ok(())
}
