//! The address of kine's database: kine's own URLs, and the path of a file. Errors do not contain the address, because
//! it may contain a password.

use std::{path::PathBuf, str::FromStr as _};

use orlop_core::log::{Error, Result};
use sqlx::{
    ConnectOptions as _,
    mysql::{MySqlConnectOptions, MySqlSslMode},
    postgres::PgConnectOptions,
};

use crate::postgres::has_unescaped_password;

/// The database that kine uses if its URL names none.
const DEFAULT_DATABASE: &str = "kubernetes";
const ACCEPTED: &str = "use sqlite://PATH, the path of a SQLite file, postgres://USER:PASSWORD@HOST:PORT/DATABASE or \
    mysql://USER:PASSWORD@tcp(HOST:PORT)/DATABASE";

pub(super) enum Address {
    Sqlite(PathBuf),
    Postgres(Box<PgConnectOptions>),
    MySql(Box<MySqlConnectOptions>),
}

impl Address {
    /// # Errors
    ///
    /// [`Error::Open`] with the accepted forms.
    pub(super) fn parse(from: &str) -> Result<Self> {
        let file = |path: &str| {
            // kine's parameters, such as the journal mode, do not matter to a reader.
            let path = path.split_once('?').map_or(path, |(path, _)| path);
            if path.is_empty() { Err(invalid("it names no file")) } else { Ok(Self::Sqlite(path.into())) }
        };
        match from.split_once("://") {
            None => file(from),
            Some(("sqlite", path)) => file(path),
            Some(("postgres" | "postgresql", _)) => postgres(from),
            Some(("mysql" | "mariadb", address)) => match go_form(address) {
                Some(parts) => parts.options(),
                None => mysql(address),
            },
            Some(_) => Err(invalid("kine has no table in this kind of database")),
        }
    }

    /// Returns the name for messages, without user and password.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Sqlite(file) => file.display().to_string(),
            Self::Postgres(options) => {
                let host = format!("{}:{}", options.get_host(), options.get_port());
                let host = options.get_socket().map_or(host, |socket| socket.display().to_string());
                format!("postgres://{host}/{}", options.get_database().unwrap_or_default())
            }
            Self::MySql(options) => {
                let host = format!("{}:{}", options.get_host(), options.get_port());
                let host = options.get_socket().map_or(host, |socket| socket.display().to_string());
                format!("mysql://{host}/{}", options.get_database().unwrap_or_default())
            }
        }
    }
}

fn postgres(url: &str) -> Result<Address> {
    refuse_unescaped(url)?;
    let options = PgConnectOptions::from_str(url).map_err(|error| invalid(&error.to_string()))?;
    let options = match options.get_database() {
        Some(_) => options,
        None => options.database(DEFAULT_DATABASE),
    };
    let options = options.extra_float_digits(None).application_name("orlop").disable_statement_logging();
    Ok(Address::Postgres(Box::new(options)))
}

fn mysql(address: &str) -> Result<Address> {
    let url = format!("mysql://{address}");
    refuse_unescaped(&url)?;
    let options = MySqlConnectOptions::from_str(&url).map_err(|error| invalid(&error.to_string()))?;
    Ok(Address::mysql(options))
}

/// The parts of an address in the form of Go's driver: `USER:PASSWORD@NETWORK(ADDRESS)/DATABASE?PARAMETERS`, in which
/// nothing is percent-encoded.
struct GoForm<'a> {
    credentials: &'a str,
    network: &'a str,
    address: &'a str,
    database: &'a str,
    parameters: &'a str,
}

/// Returns the parts, if the address has this form.
fn go_form(text: &str) -> Option<GoForm<'_>> {
    let (before, database) = text.rsplit_once('/')?;
    let (database, parameters) = database.split_once('?').unwrap_or((database, ""));
    let (credentials, server) = before.rsplit_once('@').unwrap_or(("", before));
    let (network, address) = server.strip_suffix(')')?.split_once('(')?;
    matches!(network, "tcp" | "unix").then_some(GoForm { credentials, network, address, database, parameters })
}

impl GoForm<'_> {
    fn options(self) -> Result<Address> {
        let mut options = MySqlConnectOptions::new();
        let (user, password) = self.credentials.split_once(':').unwrap_or((self.credentials, ""));
        if !user.is_empty() {
            options = options.username(user);
        }
        if !password.is_empty() {
            options = options.password(password);
        }
        if self.network == "unix" {
            options = options.socket(self.address);
        } else {
            let (host, port) = match self.address.rsplit_once(':') {
                Some((host, port)) if !port.ends_with(']') => {
                    (host, port.parse().map_err(|_| invalid("its port is not a number"))?)
                }
                Some(_) | None => (self.address, 3306),
            };
            options = options.host(host.trim_start_matches('[').trim_end_matches(']')).port(port);
        }
        if !self.database.is_empty() {
            options = options.database(self.database);
        }
        for parameter in self.parameters.split('&') {
            options = match parameter {
                "tls=true" => options.ssl_mode(MySqlSslMode::VerifyIdentity),
                "tls=skip-verify" => options.ssl_mode(MySqlSslMode::Required),
                "tls=preferred" => options.ssl_mode(MySqlSslMode::Preferred),
                "tls=false" => options.ssl_mode(MySqlSslMode::Disabled),
                _ => options,
            };
        }
        Ok(Address::mysql(options))
    }
}

impl Address {
    fn mysql(options: MySqlConnectOptions) -> Self {
        let options = match options.get_database() {
            Some(_) => options,
            None => options.database(DEFAULT_DATABASE),
        };
        Self::MySql(Box::new(options.disable_statement_logging()))
    }
}

fn refuse_unescaped(url: &str) -> Result<()> {
    if has_unescaped_password(url) {
        return Err(invalid(
            "it contains an @ after the host; special characters of a password must be percent-encoded",
        ));
    }
    Ok(())
}

fn invalid(what: &str) -> Error {
    Error::Open(format!("the address of kine's database is invalid: {what}; {ACCEPTED}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_kine_are_understood_and_named_without_a_password() {
        for (from, expected) in [
            ("/var/lib/rancher/k3s/server/db/state.db", Ok("/var/lib/rancher/k3s/server/db/state.db")),
            ("sqlite://state.db?_journal=WAL&cache=shared", Ok("state.db")),
            ("postgres://k:secret@db.example:5433/k3s?sslmode=disable", Ok("postgres://db.example:5433/k3s")),
            ("postgres://k:secret@db.example:5433/", Ok("postgres://db.example:5433/kubernetes")),
            ("mysql://k:se/cr@t@tcp(db.example:3307)/k3s?tls=skip-verify", Ok("mysql://db.example:3307/k3s")),
            ("mysql://k:secret@tcp([::1]:3307)/k3s", Ok("mysql://::1:3307/k3s")),
            ("mysql://k:secret@tcp(db.example)/", Ok("mysql://db.example:3306/kubernetes")),
            ("mysql://k@unix(/run/mysqld/mysqld.sock)/k3s", Ok("mysql:///run/mysqld/mysqld.sock/k3s")),
            ("mysql://k:secret@db.example:3307/k3s", Ok("mysql://db.example:3307/k3s")),
            ("mariadb://k:secret@db.example/k3s", Ok("mysql://db.example:3306/k3s")),
            ("mysql://k:secret@tcp(db.example:port)/k3s", Err("port is not a number")),
            ("mysql://k:se/cret@db.example/k3s", Err("percent-encoded")),
            ("postgres://k:se/cret@db.example/k3s", Err("percent-encoded")),
            ("nats://db.example", Err("no table in this kind")),
            ("sqlite://", Err("names no file")),
        ] {
            match (Address::parse(from), expected) {
                (Ok(address), Ok(name)) => assert_eq!(address.name(), name, "{from}"),
                (Err(error), Err(part)) => {
                    let text = error.to_string();
                    assert!(text.contains(part) && !text.contains("cret"), "{from}: {text}");
                }
                (Ok(address), Err(_)) => panic!("{from} is accepted as {}", address.name()),
                (Err(error), Ok(_)) => panic!("{from}: {error}"),
            }
        }
    }
}
