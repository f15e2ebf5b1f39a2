//! Settings from the environment: `ORLOP_*` variables, and `ETCD_*` variables as etcd reads them. The value of a variable
//! is written like that of the flag.
//!
//! `ORLOP_DEFAULT_*` replaces a default. Images and packages set these, so that all that an operator sets overrides them, a
//! file, too.

use std::ffi::{OsStr, OsString};

use figment::{Profile, Provider as _, value::Dict};

use super::{
    Flags,
    etcd_only::{INITIAL_CLUSTER, Notices, is_deprecated, is_ignored},
    flags::{Given, setting_names, setting_of},
};

/// The name of the file is no setting; clap reads its variable.
const CONFIG_FILE: &str = "config-file";
/// Maximum number of edits by which a misspelt name differs from the right one.
pub(super) const MISSPELT_EDITS_MAX: usize = 2;

/// The settings in the environment.
#[derive(Default)]
pub(super) struct Variables {
    pub(super) defaults: Flags,
    pub(super) orlop: Flags,
    pub(super) etcd: Flags,
    pub(super) notices: Notices,
}

impl Variables {
    /// Reads variables. As in etcd, an empty one counts as not set.
    ///
    /// # Errors
    ///
    /// If a value is invalid, or the name of an ORLOP_* variable is almost that of a setting. Other names are only
    /// reported: tests use some.
    pub(super) fn read(variables: impl Iterator<Item = (String, OsString)>) -> Result<Self, String> {
        let mut read = Self::default();
        let (mut defaults, mut orlop, mut etcd) = (Given::default(), Given::default(), Given::default());
        let mut variables: Vec<_> = variables.filter(|(_, text)| !text.is_empty()).collect();
        // ETCD_* before ORLOP_*, which overrides it.
        variables.sort();
        for (name, text) in variables {
            if let Some(key) = name.strip_prefix("ORLOP_DEFAULT_").map(setting_name) {
                match setting_of(&key) {
                    Some(setting) if *setting == key => defaults.add(&key, &text, &name)?,
                    Some(setting) => return Err(format!("unknown variable {name}: the setting is named {setting}")),
                    None if key == CONFIG_FILE => {
                        return Err(format!("unknown variable {name}: config-file has no default"));
                    }
                    None => read.add_unknown("ORLOP_DEFAULT_", name)?,
                }
            } else if let Some(key) = name.strip_prefix("ORLOP_").map(setting_name) {
                if is_known(&key) {
                    read.add(&mut orlop, key, name, &text)?;
                } else if key != CONFIG_FILE {
                    read.add_unknown("ORLOP_", name)?;
                }
            } else if let Some(key) = name.strip_prefix("ETCD_").map(setting_name) {
                if is_known(&key) {
                    read.add(&mut etcd, key, name, &text)?;
                } else if key != CONFIG_FILE && key != "version" {
                    // Images of etcd set the version.
                    read.notices.unrecognized.push(name);
                }
            }
        }
        read.defaults = defaults.flags()?;
        read.orlop = orlop.flags()?;
        read.etcd = etcd.flags()?;
        Ok(read)
    }

    /// Adds a variable that names a setting, an alias of one, or a setting of etcd that is ignored.
    fn add(&mut self, given: &mut Given, key: String, name: String, text: &OsStr) -> Result<(), String> {
        given.add(&key, text, &name)?;
        if key == INITIAL_CLUSTER {
            self.notices.initial_cluster = text.to_str().map(str::to_owned);
        }
        if is_ignored(&key) {
            self.notices.ignored.push(name);
        }
        if is_deprecated(&key) {
            self.notices.deprecated.push(key);
        }
        Ok(())
    }

    /// Adds an `ORLOP_*` variable that names no setting.
    ///
    /// # Errors
    ///
    /// If the name is almost that of a setting.
    fn add_unknown(&mut self, prefix: &str, name: String) -> Result<(), String> {
        if is_of_service(&name) {
            return Ok(());
        }
        let known: Vec<String> =
            setting_names().chain([CONFIG_FILE]).map(|setting| variable(prefix, setting)).collect();
        match nearest(&name, known.iter().map(String::as_str), MISSPELT_EDITS_MAX) {
            Some(meant) => Err(format!("unknown variable {name}; did you mean {meant}?")),
            None => {
                self.notices.unrecognized.push(name);
                Ok(())
            }
        }
    }

    /// Refuses an `ETCD_*` variable whose flag is also given, as etcd does.
    pub(super) fn check_flags(&self, flags: &Flags) -> Result<(), String> {
        let (variables, flags) = (dict(&self.etcd)?, dict(flags)?);
        match variables.keys().find(|setting| flags.contains_key(*setting)) {
            None => Ok(()),
            Some(setting) => Err(format!(
                "conflicting environment variable {} is shadowed by the flag --{setting}: unset the variable or remove the \
                 flag",
                variable("ETCD_", setting)
            )),
        }
    }
}

/// Returns the given settings.
fn dict(flags: &Flags) -> Result<Dict, String> {
    let data = flags.data().map_err(|error| error.to_string())?;
    Ok(data.get(&Profile::Default).cloned().unwrap_or_default())
}

/// Returns `data-dir` for `DATA_DIR`.
fn setting_name(variable: &str) -> String {
    variable.replace('_', "-").to_ascii_lowercase()
}

fn variable(prefix: &str, setting: &str) -> String {
    format!("{prefix}{}", setting.replace('-', "_").to_uppercase())
}

/// Returns whether a flag has this name: that of a setting, an alias of one, or a flag of etcd that is ignored.
fn is_known(key: &str) -> bool {
    is_ignored(key) || setting_of(key).is_some()
}

/// Returns whether Kubernetes sets a variable with this name in every pod beside a Service: for one named orlop,
/// ORLOP_SERVICE_HOST, ORLOP_SERVICE_PORT_CLIENT, ORLOP_PORT, ORLOP_PORT_2379_TCP_ADDR and others.
fn is_of_service(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST") || name.ends_with("_PORT") || name.contains("_PORT_")
}

/// Returns the known name that differs least from `name`, by at most `edits_max` edits.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>, edits_max: usize) -> Option<&'a str> {
    let edits = |known: &&str| strsim::damerau_levenshtein(known, name);
    known.min_by_key(edits).filter(|known| edits(known) <= edits_max)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::Variables;
    use crate::config::{Flags, Settings};

    #[test]
    fn defaults_of_a_package_are_overridden_by_all_else() {
        let packaged = ("ORLOP_DEFAULT_DATA_DIR", "/packaged");
        for (toml, variable, expected) in [
            (None, None, "/packaged"),
            (Some("data-dir = '/file'"), None, "/file"),
            (None, Some(("ETCD_DATA_DIR", "/etcd")), "/etcd"),
            (None, Some(("ORLOP_DATA_DIR", "/orlop")), "/orlop"),
        ] {
            let variables = variable.into_iter().chain([packaged]);
            let variables: Vec<_> = variables.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
            let settings = Settings::of_texts(toml, None, &variables, &Flags::default()).expect("it is valid");
            assert_eq!(settings.data_dir, Path::new(expected), "{toml:?} {variable:?}");
        }
    }

    #[test]
    fn only_names_that_are_almost_settings_are_refused() {
        let read = |name: &str| {
            let variables = [(name.to_owned(), "tcp://10.0.0.1:2379".to_owned())];
            Settings::of_texts(None, None, &variables, &Flags::default()).map(drop)
        };
        for (name, meant) in [
            ("ORLOP_DATADIR", "ORLOP_DATA_DIR"),
            ("ORLOP_DEFAULT_DATADIR", "ORLOP_DEFAULT_DATA_DIR"),
            ("ORLOP_CORSS", "ORLOP_CORS"),
            ("ORLOP_ENDPONT", "ORLOP_ENDPOINT"),
        ] {
            assert_eq!(read(name), Err(format!("unknown variable {name}; did you mean {meant}?")));
        }
        let no_default = "unknown variable ORLOP_DEFAULT_CONFIG_FILE: config-file has no default";
        assert_eq!(read("ORLOP_DEFAULT_CONFIG_FILE"), Err(no_default.to_owned()));
    }

    #[test]
    fn aliases_of_flags_are_names_of_variables() {
        for prefix in ["ORLOP_", "ETCD_"] {
            let variables = [("ENDPOINT", "postgres://a/db"), ("SERVER_CERT_FILE", "c"), ("SERVER_KEY_FILE", "k")];
            let variables = variables.map(|(name, text)| (format!("{prefix}{name}"), text.to_owned()));
            let settings = Settings::of_texts(None, None, &variables, &Flags::default()).expect("they are valid");
            assert_eq!(settings.datastore_endpoint.text(), "postgres://a/db", "{prefix}");
            assert_eq!((&*settings.cert_file, &*settings.key_file), (Path::new("c"), Path::new("k")), "{prefix}");
            let twice =
                ["ENDPOINT", "DATASTORE_ENDPOINT"].map(|name| (format!("{prefix}{name}"), "sqlite://a".to_owned()));
            let error = Settings::of_texts(None, None, &twice, &Flags::default()).expect_err("one would be ignored");
            let names =
                format!("{prefix}DATASTORE_ENDPOINT and {prefix}ENDPOINT are the same setting: set one of them");
            assert_eq!(error, names);
        }
        let file = "datastore-endpoint = 'sqlite://a'\nendpoint = 'sqlite://b'";
        let error = Settings::of_texts(Some(file), None, &[], &Flags::default()).expect_err("one would be ignored");
        assert!(error.contains("the setting datastore-endpoint, which is given twice"), "{error}");
    }

    #[test]
    fn names_without_a_setting_are_reported() {
        let read = |name: &str| {
            let read = Variables::read(std::iter::once((name.to_owned(), "1".into())));
            read.map(|read| (read.notices.unrecognized, read.notices.ignored))
        };
        for name in ["ORLOP_DATASTORE_URL", "ORLOP_CONFIG", "ORLOP_CA_FILE", "ORLOP_DEFAULT_DATABASE", "ETCD_FOO"] {
            assert_eq!(read(name), Ok((vec![name.to_owned()], Vec::new())));
        }
        for name in ["ORLOP_SNAPSHOT_COUNT", "ETCD_SNAPSHOT_COUNT"] {
            assert_eq!(read(name), Ok((Vec::new(), vec![name.to_owned()])));
        }
        // Kubernetes sets these beside a Service.
        let of_service = ["ORLOP", "ORLOP_DEFAULT", "ORLOP_EVENTS"].map(|service| {
            let rest = ["PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_CLIENT", "PORT_2379_TCP_ADDR"];
            rest.map(|rest| format!("{service}_{rest}"))
        });
        for name in of_service.as_flattened().iter().map(String::as_str).chain(["ORLOP_CONFIG_FILE", "ETCD_VERSION"]) {
            assert_eq!(read(name), Ok((Vec::new(), Vec::new())), "{name}");
        }
    }

    #[test]
    fn members_in_orlops_variable_override_those_of_etcds() {
        for prefixes in [["ETCD_", "ORLOP_"], ["ORLOP_", "ETCD_"]] {
            let variables = prefixes.map(|prefix| (format!("{prefix}INITIAL_CLUSTER"), format!("{prefix}=x").into()));
            let members = Variables::read(variables.into_iter()).map(|read| read.notices.initial_cluster);
            assert_eq!(members, Ok(Some("ORLOP_=x".to_owned())));
        }
    }
}
