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
    flags::{Given, setting_of, settings},
};

/// Maximum number of edits by which a misspelt name differs from the right one.
const MISSPELT_EDITS_MAX: usize = 2;

/// The settings in the environment.
#[derive(Default)]
pub(super) struct Variables {
    pub(super) defaults: Flags,
    pub(super) orlop: Flags,
    pub(super) etcd: Flags,
    /// Of the `ETCD_*` variables.
    pub(super) notices: Notices,
}

impl Variables {
    /// Reads variables. As in etcd, an empty one counts as not set.
    ///
    /// # Errors
    ///
    /// If a value is invalid, or the name of an ORLOP_* variable is almost that of a setting. Other names are ignored:
    /// tests use some, and Kubernetes sets ORLOP_PORT and others in every pod beside a Service named orlop, and
    /// ORLOP_DEFAULT_PORT and others beside one named orlop-default.
    pub(super) fn read(variables: impl Iterator<Item = (String, OsString)>) -> Result<Self, String> {
        let mut read = Self::default();
        let (mut defaults, mut orlop, mut etcd) = (Given::default(), Given::default(), Given::default());
        for (name, text) in variables.filter(|(_, text)| !text.is_empty()) {
            if let Some(key) = name.strip_prefix("ORLOP_DEFAULT_").map(setting_name) {
                match setting_of(&key) {
                    Some(setting) if *setting == key => defaults.add(&key, &text, &name)?,
                    Some(setting) => return Err(format!("unknown variable {name}: the setting is named {setting}")),
                    None if key == "config-file" => {
                        return Err(format!("unknown variable {name}: config-file has no default"));
                    }
                    None => check_name("ORLOP_DEFAULT_", &name)?,
                }
            } else if let Some(key) = name.strip_prefix("ORLOP_").map(setting_name) {
                match setting_of(&key) {
                    Some(setting) if *setting == key => orlop.add(&key, &text, &name)?,
                    _ => check_name("ORLOP_", &name)?,
                }
            } else if let Some(key) = name.strip_prefix("ETCD_").map(setting_name) {
                read.add_etcd(&mut etcd, key, name, &text)?;
            }
        }
        read.defaults = defaults.flags()?;
        read.orlop = orlop.flags()?;
        read.etcd = etcd.flags()?;
        Ok(read)
    }

    fn add_etcd(&mut self, given: &mut Given, key: String, name: String, text: &OsStr) -> Result<(), String> {
        let is_ignored = is_ignored(&key);
        // Images of etcd set the first; the second names the file.
        if key == "version" || key == "config-file" {
            return Ok(());
        }
        if !is_ignored && setting_of(&key).is_none() {
            self.notices.unrecognized.push(name);
            return Ok(());
        }
        given.add(&key, text, &name)?;
        if key == INITIAL_CLUSTER {
            self.notices.initial_cluster = text.to_str().map(str::to_owned);
        }
        if is_ignored {
            self.notices.ignored.push(name);
        }
        if is_deprecated(&key) {
            self.notices.deprecated.push(key);
        }
        Ok(())
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

/// Refuses the name of a variable that is almost that of a setting.
fn check_name(prefix: &str, name: &str) -> Result<(), String> {
    let known: Vec<String> = settings().chain(["config-file"]).map(|setting| variable(prefix, setting)).collect();
    // Kubernetes' PORT differs from CORS in two letters.
    if known.iter().any(|known| known == name) || name.strip_prefix(prefix) == Some("PORT") {
        return Ok(());
    }
    match nearest(name, known.iter().map(String::as_str), MISSPELT_EDITS_MAX) {
        Some(meant) => Err(format!("unknown variable {name}; did you mean {meant}?")),
        None => Ok(()),
    }
}

/// Returns the known name that differs least from `name`, by at most `edits_max` edits.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>, edits_max: usize) -> Option<&'a str> {
    let edits = |known: &&str| strsim::damerau_levenshtein(known, name);
    known.min_by_key(edits).filter(|known| edits(known) <= edits_max)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{Flags, Settings};

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
        ] {
            assert_eq!(read(name), Err(format!("unknown variable {name}; did you mean {meant}?")));
        }
        let no_default = "unknown variable ORLOP_DEFAULT_CONFIG_FILE: config-file has no default";
        assert_eq!(read("ORLOP_DEFAULT_CONFIG_FILE"), Err(no_default.to_owned()));
        // Kubernetes sets these beside a Service.
        for service in ["ORLOP", "ORLOP_DEFAULT"] {
            for rest in ["PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_CLIENT", "PORT_2379_TCP_ADDR"] {
                assert_eq!(read(&format!("{service}_{rest}")), Ok(()), "{service}_{rest}");
            }
        }
    }
}
