//! The URL of a database with one or more hosts, in the form of libpq.
//!
//! sqlx's URL has one host. This module divides a URL with several hosts into one URL per host, and takes out the
//! parameters that concern the choice of a host. It is pure: names are resolved and files are read at each connection
//! (see [`super::primary`]).
//!
//! The source of the rules is <https://www.postgresql.org/docs/current/libpq-connect.html>, sections "Connection URIs"
//! and "Specifying Multiple Hosts". No error contains a value that may be part of a password.

#[cfg(test)]
mod tests;

use std::{net::IpAddr, path::PathBuf, time::Duration};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use super::tls_files::{TlsFile, TlsFiles};

/// Maximum time to connect to one host, if the URL does not set it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const DEFAULT_PORT: u16 = 5432;
/// Characters of a host that are encoded in a URL.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b'-').remove(b'_');

/// Parameters that a URL may have: those of [`Own`], and those that sqlx reads, except for `application_name` and
/// `options[…]`.
pub const PARAMETERS: [&str; 22] = [
    "sslmode",
    "ssl-mode",
    "sslrootcert",
    "ssl-root-cert",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "statement-cache-capacity",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "passfile",
    "target_session_attrs",
    "load_balance_hosts",
    "connect_timeout",
    "channel_binding",
    "options",
];

/// The order in which hosts are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostOrder {
    AsListed,
    Random,
}

/// One host of a database.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Host {
    /// `HOST:PORT` or the folder of a socket, for messages. With `hostaddr`, the address.
    pub(super) name: String,
    /// The URL with this host alone. It may contain a password. Without one in the URL or in `PGPASSWORD` it contains an
    /// empty one.
    pub(super) url: String,
    /// As the URL names it: the host in a file of passwords.
    pub(super) listed: String,
    /// The address to connect to, if it is not that of the listed name.
    pub(super) address: Option<String>,
}

/// A parsed URL.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Hosts {
    /// At least one.
    pub(super) hosts: Vec<Host>,
    pub(super) order: HostOrder,
    /// Maximum time to connect to one host.
    pub(super) connect_timeout: Duration,
    /// The file with passwords that the URL names, if it is to be read.
    pub(super) passfile: Option<PathBuf>,
    /// Whether the URL or `PGPASSWORD` has a password that is not empty, so that no file is read.
    pub(super) has_password: bool,
    pub(super) tls_files: TlsFiles,
}

/// The settings of the process's environment that apply if the URL lacks them.
pub(super) struct Environment<'a> {
    /// Returns a variable.
    pub(super) variable: &'a dyn Fn(&str) -> Option<String>,
    /// The host, or hosts, if the URL names none.
    pub(super) default_host: String,
}

impl Environment<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }
}

/// The parameters that this module reads.
#[derive(Default)]
struct Own {
    host: Option<String>,
    hostaddr: Option<String>,
    port: Option<String>,
    target_session_attrs: Option<String>,
    load_balance_hosts: Option<String>,
    connect_timeout: Option<String>,
    passfile: Option<String>,
    channel_binding: Option<String>,
    // These four are also sqlx's.
    /// Whether the parameter `password` has a value, if it is there.
    has_password: Option<bool>,
    ssl_mode: Option<String>,
    has_root_certificate: bool,
    tls_files: Vec<TlsFile>,
}

impl Own {
    /// Returns the place of the parameter's value; `None` if the parameter is sqlx's.
    fn place(&mut self, name: &str) -> Option<&mut Option<String>> {
        Some(match name {
            "host" => &mut self.host,
            "hostaddr" => &mut self.hostaddr,
            "port" => &mut self.port,
            "target_session_attrs" => &mut self.target_session_attrs,
            "load_balance_hosts" => &mut self.load_balance_hosts,
            "connect_timeout" => &mut self.connect_timeout,
            "passfile" => &mut self.passfile,
            "channel_binding" => &mut self.channel_binding,
            _ => return None,
        })
    }
}

impl Hosts {
    /// Parses a URL.
    ///
    /// # Errors
    ///
    /// A text that names the parameter and its accepted values.
    pub(super) fn parse(endpoint: &str, environment: &Environment<'_>) -> Result<Self, String> {
        let (scheme, rest) = endpoint.split_once("://").ok_or("it has no ://")?;
        let rest = rest.split('#').next().unwrap_or_default();
        let (before_query, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = before_query.split_at(before_query.find('/').unwrap_or(before_query.len()));
        let (user, listed) = authority.rsplit_once('@').map_or((None, authority), |(user, hosts)| (Some(user), hosts));
        let (own, mut passed) = divide(query)?;
        check_channel_binding(own.channel_binding.as_deref())?;
        let mut ssl_mode = ssl_mode(&own, environment)?;
        // As in libpq: who names the authority wants the server's certificate verified. sqlx would ignore the file.
        let has_root_certificate = own.has_root_certificate || environment.get("PGSSLROOTCERT").is_some();
        if has_root_certificate && ssl_mode.as_ref().is_some_and(|mode| mode.eq_ignore_ascii_case("require")) {
            passed.push_str("sslmode=verify-ca&");
            ssl_mode = Some("verify-ca".to_owned());
        }
        let tls_files = TlsFiles::new(&own.tls_files, ssl_mode.as_deref(), |name| environment.get(name));
        let places = places(listed, &own, environment)?;
        let is_verified = ssl_mode.is_some_and(|mode| mode.eq_ignore_ascii_case("verify-full"));
        if is_verified && places.iter().any(|place| place.address.is_some()) {
            let text = "with hostaddr, sslmode=verify-full would verify the address instead of the name of the host; \
                        remove hostaddr, and give the name this address in /etc/hosts";
            return Err(text.to_owned());
        }
        check_target(own.target_session_attrs.or_else(|| environment.get("PGTARGETSESSIONATTRS")))?;
        let order = order(own.load_balance_hosts.or_else(|| environment.get("PGLOADBALANCEHOSTS")))?;
        let connect_timeout = connect_timeout(own.connect_timeout.or_else(|| environment.get("PGCONNECT_TIMEOUT")))?;
        let has_password = own.has_password.unwrap_or_else(|| {
            let written = user.and_then(|user| user.split_once(':'));
            written.is_some_and(|(_, password)| !password.is_empty()) || environment.get("PGPASSWORD").is_some()
        });
        if !has_password {
            // Without it, sqlx would look for a password in files, and log their malformed lines as they are. For a login,
            // sqlx treats an empty password like none.
            passed.push_str("password=&");
        }
        let user = user.map_or_else(String::new, |user| format!("{user}@"));
        // sqlx lets the parameters override the host of the authority, which must not be empty if there is a user.
        let url = |host: &str, port: u16| {
            format!("{scheme}://{user}host{path}?{passed}host={}&port={port}", utf8_percent_encode(host, ENCODED))
        };
        let host = |Place { listed, address, port }: Place| Host {
            name: name(address.as_ref().unwrap_or(&listed), port),
            url: url(&listed, port),
            listed,
            address,
        };
        let hosts = places.into_iter().map(host).collect();
        let passfile = own.passfile.filter(|_| !has_password).map(PathBuf::from);
        Ok(Self { hosts, order, connect_timeout, passfile, has_password, tls_files })
    }
}

/// Returns the name of a host for messages. A port also names a socket in its folder.
fn name(host: &str, port: u16) -> String {
    match (host.starts_with('/'), host.contains(':')) {
        (true, _) => host.to_owned(),
        (false, true) => format!("[{host}]:{port}"),
        (false, false) => format!("{host}:{port}"),
    }
}

/// Divides the parameters into those of this module and the text of the others, with an `&` after each.
fn divide(query: &str) -> Result<(Own, String), String> {
    let (mut own, mut passed) = (Own::default(), String::new());
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        match own.place(name) {
            Some(place) => *place = Some(percent_decode(value).ok_or_else(|| format!("{name} is not UTF-8"))?),
            None => {
                // sqlx has several names for some of these.
                match name {
                    "password" => own.has_password = Some(!value.is_empty()),
                    "sslmode" | "ssl-mode" => own.ssl_mode = percent_decode(value),
                    "sslrootcert" | "ssl-root-cert" | "ssl-ca" => own.has_root_certificate = !value.is_empty(),
                    _ => {}
                }
                own.tls_files.extend(TlsFile::of_parameter(name, value));
                // As in libpq, a plus is a plus. sqlx would take it for a space.
                passed.push_str(&parameter.replace('+', "%2B"));
                passed.push('&');
            }
        }
    }
    Ok((own, passed))
}

/// Returns the value of `sslmode`. sqlx would ignore an invalid variable, and use no TLS if the server has none.
fn ssl_mode(own: &Own, environment: &Environment<'_>) -> Result<Option<String>, String> {
    // With `allow`, libpq's third value, sqlx uses no TLS.
    const ACCEPTED: [&str; 6] = ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"];
    let parameter = own.ssl_mode.clone().map(|mode| ("sslmode", mode));
    let Some((name, mode)) = parameter.or_else(|| Some(("PGSSLMODE", environment.get("PGSSLMODE")?))) else {
        return Ok(None);
    };
    if ACCEPTED.contains(&mode.to_ascii_lowercase().as_str()) {
        return Ok(Some(mode));
    }
    Err(format!("{name} must be disable, prefer, require, verify-ca or verify-full"))
}

/// Orlop writes, so it needs the primary, whichever of these values is set.
fn check_target(value: Option<String>) -> Result<(), String> {
    const ACCEPTED: [&str; 3] = ["read-write", "primary", "any"];
    let is_accepted = value.is_none_or(|value| ACCEPTED.contains(&value.as_str()));
    is_accepted.then_some(()).ok_or_else(|| {
        "target_session_attrs must be read-write, primary or any; Orlop needs the primary, so all three have the same \
         effect"
            .to_owned()
    })
}

/// sqlx never binds a login to the TLS channel, so the values that permit this have no effect.
fn check_channel_binding(value: Option<&str>) -> Result<(), String> {
    match value {
        None | Some("disable" | "prefer") => Ok(()),
        Some("require") => Err("channel_binding=require is not supported; remove it, and verify the server with \
                                sslmode=verify-full instead"
            .to_owned()),
        Some(_) => Err("channel_binding must be disable or prefer".to_owned()),
    }
}

fn order(value: Option<String>) -> Result<HostOrder, String> {
    match value.as_deref() {
        None | Some("disable") => Ok(HostOrder::AsListed),
        Some("random") => Ok(HostOrder::Random),
        Some(_) => Err("load_balance_hosts must be disable or random".to_owned()),
    }
}

fn connect_timeout(value: Option<String>) -> Result<Duration, String> {
    let Some(value) = value else { return Ok(CONNECT_TIMEOUT) };
    match value.parse() {
        Ok(0) => Ok(CONNECT_TIMEOUT),
        Ok(secs @ 1..=3600) => Ok(Duration::from_secs(secs)),
        Ok(_) | Err(_) => {
            Err(format!("connect_timeout must be 1 to 3600 seconds, or 0 for {CONNECT_TIMEOUT:?}, the default"))
        }
    }
}

/// One entry of the lists of hosts, addresses and ports.
struct Place {
    listed: String,
    /// `None`: the listed name is resolved.
    address: Option<String>,
    port: u16,
}

/// Returns hosts and ports. As with libpq, parameters override the part of the URL before the path, and one port is the
/// port of all hosts.
fn places(listed: &str, own: &Own, environment: &Environment<'_>) -> Result<Vec<Place>, String> {
    let (mut hosts, mut ports) = (Vec::new(), Vec::new());
    for (number, entry) in (1..).zip(listed.split(',')) {
        let (host, port) = divide_entry(entry).ok_or_else(|| format!("host {number} has a [ without a ]"))?;
        hosts.push(percent_decode(host).ok_or_else(|| format!("host {number} is not UTF-8"))?);
        ports.push(port.to_owned());
    }
    let hosts = own.host.as_deref().map_or(hosts, split);
    let hosts = match &own.hostaddr {
        Some(addresses) => with_addresses(hosts, addresses, environment)?,
        None => or_defaults(hosts, environment).into_iter().map(|host| (host, None)).collect(),
    };
    if let Some(port) = &own.port {
        ports = split(port);
    } else if ports.iter().all(String::is_empty) {
        ports = split(&environment.get("PGPORT").unwrap_or_default());
    }
    if ports.len() == 1 {
        ports.resize(hosts.len(), ports[0].clone());
    }
    if ports.len() != hosts.len() {
        return Err(format!(
            "it has {} hosts and {} ports; list one port per host, or one port for all",
            hosts.len(),
            ports.len()
        ));
    }
    let place = |(number, ((listed, address), port)): (usize, ((String, Option<String>), &String))| {
        Ok(Place { listed, address, port: parse_port(number, port)? })
    };
    (1..).zip(hosts.into_iter().zip(&ports)).map(place).collect()
}

/// Fills empty places in a list of hosts.
fn or_defaults(hosts: Vec<String>, environment: &Environment<'_>) -> Vec<String> {
    let defaults = split(&environment.default_host);
    if hosts.iter().all(String::is_empty) {
        return defaults;
    }
    let first = defaults.into_iter().next().unwrap_or_default();
    hosts.into_iter().map(|host| if host.is_empty() { first.clone() } else { host }).collect()
}

/// Pairs hosts with the addresses of `hostaddr`. If there is no name, or that of a socket, the address is the name.
fn with_addresses(
    mut hosts: Vec<String>,
    addresses: &str,
    environment: &Environment<'_>,
) -> Result<Vec<(String, Option<String>)>, String> {
    let addresses = split(addresses);
    if addresses.iter().any(|address| address.parse::<IpAddr>().is_err()) {
        return Err("hostaddr must be a list of IP addresses".to_owned());
    }
    if hosts.iter().all(String::is_empty) {
        hosts = environment.get("PGHOST").map_or_else(|| vec![String::new(); addresses.len()], |hosts| split(&hosts));
    }
    let (names, count) = (hosts.len(), addresses.len());
    if names != count {
        return Err(format!("it has {names} hosts, but {count} in hostaddr; list one address per host"));
    }
    let pair = |(host, address): (String, String)| {
        let is_name = !host.is_empty() && !host.starts_with('/') && host != address;
        if is_name { (host, Some(address)) } else { (address, None) }
    };
    Ok(hosts.into_iter().zip(addresses).map(pair).collect())
}

fn split(list: &str) -> Vec<String> {
    list.split(',').map(str::to_owned).collect()
}

/// Divides `HOST:PORT`, in which an IPv6 address has brackets. Returns `None` if a bracket is not closed.
fn divide_entry(entry: &str) -> Option<(&str, &str)> {
    if let Some(entry) = entry.strip_prefix('[') {
        let (host, rest) = entry.split_once(']')?;
        return Some((host, rest.strip_prefix(':').unwrap_or(rest)));
    }
    Some(entry.rsplit_once(':').unwrap_or((entry, "")))
}

fn parse_port(number: usize, text: &str) -> Result<u16, String> {
    match text.parse() {
        _ if text.is_empty() => Ok(DEFAULT_PORT),
        Ok(port @ 1..) => Ok(port),
        Ok(0) | Err(_) => Err(format!("the port of host {number} must be a number from 1 to 65535")),
    }
}

/// Returns `None` if the text is not UTF-8 or an escape is not complete.
fn percent_decode(text: &str) -> Option<String> {
    let is_complete = |escape: &str| {
        let digits = escape.as_bytes().first_chunk::<2>();
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    // The decoder would keep an incomplete escape as it is.
    let are_complete = text.split('%').skip(1).all(is_complete);
    let decoded = percent_decode_str(text).decode_utf8().ok().filter(|_| are_complete)?;
    Some(decoded.into_owned())
}
