//! Settings from the environment: `ORLOP_*` variables, and `ETCD_*` variables as etcd reads them.

use std::convert::Infallible;

use figment::{
    Metadata, Profile, Provider,
    providers::Serialized,
    value::{Dict, Map, Value},
};

use super::{Settings, etcd_only::is_ignored, flags::setting_of};

/// Maximum number of edits by which a misspelt name differs from the right one.
const MISSPELT_EDITS_MAX: usize = 2;

/// The settings in the environment. The value of a string setting stays a string if it looks like a number.
#[derive(Default)]
pub(super) struct Variables {
    orlop: Dict,
    etcd: Dict,
    /// `ETCD_*` variables without a meaning here.
    pub(super) ignored: Vec<String>,
    /// `ETCD_*` variables that etcd does not know either.
    pub(super) unrecognized: Vec<String>,
}

impl Variables {
    /// Reads variables.
    ///
    /// # Errors
    ///
    /// If the name of an ORLOP_* variable is almost that of a setting. Others are ignored: tests use some, and
    /// Kubernetes sets ORLOP_PORT and others in every pod beside a Service named orlop.
    pub(super) fn read(variables: impl Iterator<Item = (String, String)>) -> Result<Self, String> {
        let defaults = defaults().map_err(|error| error.to_string())?;
        let mut read = Self::default();
        for (name, text) in variables {
            if let Some(key) = name.strip_prefix("ORLOP_") {
                let key = setting_name(key);
                match defaults.get(&key) {
                    Some(default) => drop(read.orlop.insert(key, value(default, text))),
                    None => check_name(&name, &defaults)?,
                }
            } else if let Some(key) = name.strip_prefix("ETCD_") {
                let key = setting_name(key);
                match setting_of(&key).and_then(|setting| Some((defaults.get(&setting)?, setting))) {
                    Some((default, setting)) => drop(read.etcd.insert(setting, value(default, text))),
                    None if is_ignored(&key) => read.ignored.push(name),
                    // Images of etcd set the first; the second names the file.
                    None if key == "version" || key == "config-file" => {}
                    None => read.unrecognized.push(name),
                }
            }
        }
        Ok(read)
    }

    /// Refuses an `ETCD_*` variable whose flag is also given, as etcd does.
    pub(super) fn check_flags(&self, flags: &Dict) -> Result<(), String> {
        match self.etcd.keys().find(|setting| flags.contains_key(*setting)) {
            None => Ok(()),
            Some(setting) => Err(format!(
                "conflicting environment variable {} is shadowed by the flag --{setting}: unset the variable or remove the \
                 flag",
                variable("ETCD_", setting)
            )),
        }
    }
}

fn defaults() -> Result<Dict, Box<figment::Error>> {
    Ok(Serialized::defaults(Settings::default()).data()?.remove(&Profile::Default).unwrap_or_default())
}

/// Returns `data-dir` for `DATA_DIR`.
fn setting_name(variable: &str) -> String {
    variable.replace('_', "-").to_ascii_lowercase()
}

fn variable(prefix: &str, setting: &str) -> String {
    format!("{prefix}{}", setting.replace('-', "_").to_uppercase())
}

/// Parses the text of a variable. The value of a string setting stays a string if it looks like a number.
fn value(default: &Value, text: String) -> Value {
    if matches!(default, Value::String(..) | Value::Array(..)) {
        return Value::from(text);
    }
    text.parse().unwrap_or_else(|never: Infallible| match never {})
}

fn check_name(name: &str, defaults: &Dict) -> Result<(), String> {
    let known = defaults.keys().map(String::as_str).chain(["config-file"]);
    let known: Vec<String> = known.map(|setting| variable("ORLOP_", setting)).collect();
    if known.iter().any(|known| known == name) {
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

impl Variables {
    /// Returns the two sources; the second overrides the first.
    pub(super) fn sources(&self) -> [Source; 2] {
        [
            Source { prefix: "ETCD_", settings: self.etcd.clone() },
            Source { prefix: "ORLOP_", settings: self.orlop.clone() },
        ]
    }
}

/// The settings of the variables with one prefix.
pub(super) struct Source {
    prefix: &'static str,
    settings: Dict,
}

impl Provider for Source {
    fn metadata(&self) -> Metadata {
        let prefix = self.prefix;
        // The name of the setting in an error.
        Metadata::named("environment").interpolater(move |_, keys| variable(prefix, &keys.join("-")))
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.settings.clone()))
    }
}
