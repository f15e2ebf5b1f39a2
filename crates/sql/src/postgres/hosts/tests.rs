//! URLs, variables, and the hosts and settings that result.

use std::time::Duration;

use super::{Environment, HostOrder, Hosts};

fn parse(url: &str, variables: &[(&str, &str)]) -> Result<Hosts, String> {
    let get = |name: &str| variables.iter().find(|(it, _)| *it == name).map(|(_, value)| (*value).to_owned());
    let default_host = get("PGHOST").unwrap_or_else(|| "localhost".to_owned());
    Hosts::parse(url, &Environment { variable: &get, default_host })
}

#[test]
fn hosts_and_ports_are_those_of_libpq() {
    type Variables = &'static [(&'static str, &'static str)];
    let table: [(&str, Variables, &str); 20] = [
        ("postgres://u:p@a:1/db", &[], "a:1"),
        ("postgres://u:p@a:1,b:2/db", &[], "a:1 b:2"),
        ("postgres://u:p@a:1,b,c:3/db", &[], "a:1 b:5432 c:3"),
        ("postgres://u@a,b/db?port=7", &[], "a:7 b:7"),
        ("postgres://u@a,b/db?port=7,8", &[], "a:7 b:8"),
        ("postgres://u@a,b/db?port=7,", &[], "a:7 b:5432"),
        ("postgres:///db?host=a,b&port=1,2", &[], "a:1 b:2"),
        ("postgres:///db?host=a%2Cb", &[], "a:5432 b:5432"),
        ("postgres://x:9/db?host=a&port=1", &[], "a:1"),
        ("postgresql://[::1]:1,[fe80::2]/db", &[], "[::1]:1 [fe80::2]:5432"),
        ("postgres://%2Fvar%2Frun,b/db", &[], "/var/run b:5432"),
        ("postgres:///db?host=/var/run", &[], "/var/run"),
        ("postgres:///db?hostaddr=127.0.0.1,::1", &[], "127.0.0.1:5432 [::1]:5432"),
        ("postgres://a,b/db?hostaddr=127.0.0.1,::1", &[], "127.0.0.1:5432 [::1]:5432"),
        ("postgres://u:p@/db", &[], "localhost:5432"),
        ("postgres:///db", &[("PGHOST", "a,b"), ("PGPORT", "1,2")], "a:1 b:2"),
        ("postgres://c,d/db", &[("PGHOST", "a,b"), ("PGPORT", "1,2")], "c:1 d:2"),
        ("postgres://a,,c/db", &[], "a:5432 localhost:5432 c:5432"),
        ("postgres://u:a,b:1@c/db", &[], "c:5432"),
        ("postgres://a", &[], "a:5432"),
    ];
    for (url, variables, expected) in table {
        let parsed = parse(url, variables).unwrap_or_else(|error| panic!("{url}: {error}"));
        let names: Vec<&str> = parsed.hosts.iter().map(|host| host.name.as_str()).collect();
        assert_eq!(names.join(" "), expected, "{url} {variables:?}");
    }
}

#[test]
fn url_of_one_host_keeps_user_path_and_other_parameters() {
    let url =
        "postgres://u%40:p%2Cq@a:1,%2Frun/d%20b?sslmode=require&target_session_attrs=primary&options=-c%20x%3D1#x";
    let urls = parse(url, &[]).expect("it is valid").hosts;
    let urls: Vec<&str> = urls.iter().map(|host| host.url.as_str()).collect();
    let rest = "/d%20b?sslmode=require&options=-c%20x%3D1";
    assert_eq!(
        urls,
        [
            format!("postgres://u%40:p%2Cq@host{rest}&host=a&port=1"),
            format!("postgres://u%40:p%2Cq@host{rest}&host=%2Frun&port=5432")
        ]
    );
}

#[test]
fn address_replaces_the_resolution_of_a_name_only() {
    type Variables = &'static [(&'static str, &'static str)];
    let table: [(&str, Variables, &str, Option<&str>); 5] = [
        ("postgres://a/db?hostaddr=::1", &[], "a", Some("::1")),
        ("postgres:///db?hostaddr=::1", &[("PGHOST", "a")], "a", Some("::1")),
        ("postgres:///db?hostaddr=::1&sslmode=verify-full", &[], "::1", None),
        ("postgres:///db?host=/run&hostaddr=::1", &[], "::1", None),
        ("postgres://a/db?sslmode=verify-full", &[], "a", None),
    ];
    for (url, variables, listed, address) in table {
        let host = parse(url, variables).expect("it is valid").hosts.remove(0);
        assert_eq!((host.listed.as_str(), host.address.as_deref()), (listed, address), "{url} {variables:?}");
        let named = format!("host={}&port=5432", listed.replace(':', "%3A"));
        assert!(host.url.ends_with(&named), "{url}: {}", host.url);
    }
}

#[test]
fn server_is_verified_if_its_authority_is_named() {
    type Variables = &'static [(&'static str, &'static str)];
    let table: [(&str, Variables, bool); 6] = [
        ("sslmode=require&sslrootcert=/ca", &[], true),
        ("sslmode=require", &[("PGSSLROOTCERT", "/ca")], true),
        ("sslrootcert=/ca", &[("PGSSLMODE", "require")], true),
        ("sslmode=require", &[], false),
        ("sslmode=verify-full&sslrootcert=/ca", &[], false),
        ("sslmode=prefer&sslrootcert=/ca", &[], false),
    ];
    for (query, variables, is_raised) in table {
        let parsed = parse(&format!("postgres://a/db?{query}"), variables).expect("it is valid");
        assert_eq!(parsed.hosts[0].url.contains("&sslmode=verify-ca&"), is_raised, "{query} {variables:?}");
    }
}

#[test]
fn settings_come_from_the_url_then_from_the_environment() {
    let variables = [("PGLOADBALANCEHOSTS", "random"), ("PGCONNECT_TIMEOUT", "2"), ("PGTARGETSESSIONATTRS", "any")];
    let from = |url: &str| {
        let parsed = parse(url, &variables).expect("it is valid");
        (parsed.order, parsed.connect_timeout)
    };
    assert_eq!(from("postgres://a,b/db"), (HostOrder::Random, Duration::from_secs(2)));
    let url = "postgres://a/db?load_balance_hosts=disable&connect_timeout=3&target_session_attrs=read-write";
    assert_eq!(from(url), (HostOrder::AsListed, Duration::from_secs(3)));
    assert_eq!(from("postgres://a/db?connect_timeout=0").1, Duration::from_secs(5));
    for value in ["disable", "prefer"] {
        let parsed = parse(&format!("postgres://a/db?channel_binding={value}"), &[]).expect("it is valid");
        assert!(!parsed.hosts[0].url.contains("channel_binding"), "sqlx does not know it");
    }
}

/// sqlx gets an empty password if ours is to come from a file. Otherwise it would read files itself.
#[test]
fn file_of_passwords_is_used_unless_a_password_is_set() {
    type Variables = &'static [(&'static str, &'static str)];
    let table: [(&str, Variables, bool); 9] = [
        ("postgres://u@a/db?passfile=/x", &[], true),
        ("postgres://u:p@a/db?passfile=/x", &[], false),
        ("postgres://u:@a/db?passfile=/x", &[], true),
        ("postgres://u@a/db?password=p&passfile=/x", &[], false),
        ("postgres://u:p@a/db?password=&passfile=/x", &[], true),
        ("postgres://u@a/db?passfile=/x", &[("PGPASSWORD", "p")], false),
        ("postgres://u:@a/db?passfile=/x", &[("PGPASSWORD", "p")], false),
        ("postgres://u@a/db?password=&passfile=/x", &[("PGPASSWORD", "p")], true),
        ("postgres://u@a/db?passfile=/x", &[("PGPASSWORD", "")], true),
    ];
    for (url, variables, is_used) in table {
        let parsed = parse(url, variables).expect("it is valid");
        assert_eq!((parsed.passfile.is_some(), parsed.has_password), (is_used, !is_used), "{url} {variables:?}");
        assert_eq!(parsed.hosts[0].url.contains("password=&"), is_used, "{url} {variables:?}");
    }
}

#[test]
fn error_names_the_accepted_values_and_no_secret() {
    let table = [
        ("postgres://u:secret@a/db?target_session_attrs=standby", "read-write, primary or any"),
        ("postgres://u:secret@a/db?target_session_attrs=", "read-write, primary or any"),
        ("postgres://u:secret@a/db?load_balance_hosts=round", "disable or random"),
        ("postgres://u:secret@a/db?connect_timeout=soon", "1 to 3600 seconds"),
        ("postgres://u:secret@a/db?connect_timeout=-1", "1 to 3600 seconds"),
        ("postgres://u:secret@a/db?channel_binding=require", "channel_binding=require is not supported"),
        ("postgres://u:secret@a/db?channel_binding=on", "disable or prefer"),
        ("postgres://u:secret@a,b,c/db?port=1,2", "3 hosts and 2 ports"),
        ("postgres://u:secret@a:0/db", "host 1 must be a number from 1 to 65535"),
        ("postgres://u:secret@a,b:x/db", "host 2 must be a number"),
        ("postgres://u:secret@[::1/db", "host 1 has a [ without a ]"),
        ("postgres://u:secret@a,b%2/db", "host 2 is not UTF-8"),
        ("postgres://u:secret@a%zz/db", "host 1 is not UTF-8"),
        ("postgres://u:secret@a%ff/db", "host 1 is not UTF-8"),
        ("postgres://u:secret@a/db?hostaddr=b", "IP addresses"),
        ("postgres://u:secret@a,b/db?hostaddr=::1", "2 hosts, but 1 in hostaddr"),
        ("postgres://u:secret@a/db?hostaddr=::1&sslmode=verify-full", "/etc/hosts"),
        ("postgres://u:secret@a/db?sslmode=verify_full", "sslmode must be disable, prefer, require, verify-ca or"),
        // A password with an unescaped slash and without a host.
        ("postgres://u:secret/", "host 1 must be a number"),
    ];
    for (url, expected) in table {
        let error = parse(url, &[]).err().unwrap_or_else(|| panic!("{url} is accepted"));
        assert!(error.contains(expected) && !error.contains("secret"), "{url}: {error}");
    }
    let error = parse("postgres://a/db", &[("PGSSLMODE", "verify_full")]).err();
    assert!(error.is_some_and(|error| error.starts_with("PGSSLMODE must be disable, prefer")));
    for mode in ["", "Verify-Full"] {
        assert!(parse("postgres://a/db", &[("PGSSLMODE", mode)]).is_ok(), "{mode}");
    }
}
