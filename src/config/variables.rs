//! Settings from the environment.

use std::convert::Infallible;

use figment::{
    Metadata, Profile, Provider,
    providers::{Env, Serialized},
    value::{Dict, Map, Value},
};

use super::Settings;

/// Maximum number of edits by which a misspelt name differs from the right one.
const MISSPELT_EDITS_MAX: usize = 2;

/// `ORLOP_*` variables. The value of a string setting stays a string if it looks like a number.
pub(super) struct Variables {
    source: Env,
    defaults: Dict,
}

impl Variables {
    /// Creates a source of the variables that name a setting.
    pub(super) fn new() -> Result<Self, Box<figment::Error>> {
        let defaults = Serialized::defaults(Settings::default()).data()?.remove(&Profile::Default).unwrap_or_default();
        let known: Vec<String> = defaults.keys().cloned().collect();
        let source = Env::prefixed("ORLOP_")
            .map(|key| key.as_str().replace('_', "-").to_ascii_lowercase().into())
            .filter(move |key| known.iter().any(|known| known == key.as_str()));
        Ok(Self { source, defaults })
    }

    /// Refuses a variable whose name is almost that of a setting. Other ORLOP_* variables are ignored: tests use some,
    /// and Kubernetes sets ORLOP_PORT and others in every pod beside a Service named orlop.
    ///
    /// # Errors
    ///
    /// A text that names the variable and the one that is probably meant.
    pub(super) fn check_names(&self, names: impl Iterator<Item = String>) -> Result<(), String> {
        let variable = |setting: &str| format!("ORLOP_{}", setting.replace('-', "_").to_uppercase());
        let known: Vec<String> =
            self.defaults.keys().map(String::as_str).chain(["config-file"]).map(variable).collect();
        for name in names.filter(|name| name.starts_with("ORLOP_") && !known.contains(name)) {
            if let Some(meant) = nearest(&name, known.iter().map(String::as_str), MISSPELT_EDITS_MAX) {
                return Err(format!("unknown variable {name}; did you mean {meant}?"));
            }
        }
        Ok(())
    }
}

/// Returns the known name that differs least from `name`, by at most `edits_max` edits.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>, edits_max: usize) -> Option<&'a str> {
    let edits = |known: &&str| strsim::damerau_levenshtein(known, name);
    known.min_by_key(edits).filter(|known| edits(known) <= edits_max)
}

impl Provider for Variables {
    fn metadata(&self) -> Metadata {
        self.source.metadata()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.read(self.source.iter().map(|(key, text)| (key.to_string(), text)))))
    }
}

impl Variables {
    /// Parses variables, given as setting names and texts.
    pub(super) fn read(&self, variables: impl Iterator<Item = (String, String)>) -> Dict {
        let value = |key: &str, text: String| match self.defaults.get(key) {
            Some(Value::String(..) | Value::Array(..)) => Value::from(text),
            _ => text.parse().unwrap_or_else(|never: Infallible| match never {}),
        };
        variables.map(|(key, text)| (key.clone(), value(&key, text))).collect()
    }
}
