//! The configuration file: TOML, or YAML in Orlop's form or in etcd's.
//!
//! etcd's form has the same keys. In addition it groups the TLS settings in `client-transport-security` and
//! `peer-transport-security`, writes durations as numbers of nanoseconds, and has empty values and keys without a
//! meaning here.

use std::path::Path;

use figment::{
    Metadata, Profile, Provider,
    providers::{Format as _, Toml, Yaml},
    value::{Dict, Map, Value},
};

use super::{etcd_only::is_ignored, flags::setting_of};

/// The keys of etcd's section with the TLS settings of clients, and the settings that they mean.
const CLIENT_SECURITY: [(&str, &str); 7] = [
    ("cert-file", "cert-file"),
    ("key-file", "key-file"),
    ("client-cert-auth", "client-cert-auth"),
    ("trusted-ca-file", "trusted-ca-file"),
    ("auto-tls", "auto-tls"),
    ("crl-file", "client-crl-file"),
    ("allowed-hostname", "client-cert-allowed-hostname"),
];

/// The content of a file in Orlop's form.
pub(super) struct ConfigFile {
    metadata: Metadata,
    settings: Dict,
    /// Keys of etcd without a meaning here.
    pub(super) ignored: Vec<String>,
}

impl ConfigFile {
    /// Reads a file; its extension tells the format.
    pub(super) fn read(file: &Path) -> Result<Self, String> {
        if !file.is_file() {
            return Err(format!("cannot read config-file {}", file.display()));
        }
        let yaml = file.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
        if yaml { Self::of(&Yaml::file(file)) } else { Self::of(&Toml::file(file)) }
    }

    /// Reads a source and brings etcd's form into Orlop's.
    pub(super) fn of(source: &dyn Provider) -> Result<Self, String> {
        let metadata = source.metadata();
        let located = |error: figment::Error| format!("{error} in {}", metadata.name);
        let read = source.data().map_err(located)?.remove(&Profile::Default).unwrap_or_default();
        let mut file = Self { metadata, settings: Dict::new(), ignored: Vec::new() };
        for (key, value) in read {
            match (key.as_str(), value) {
                // An empty value in YAML means the default.
                (_, Value::Empty(..)) => {}
                ("client-transport-security", Value::Dict(_, section)) => file.add_security(section),
                ("peer-transport-security", _) => file.ignored.push(key),
                (name, value) => file.add(name, value),
            }
        }
        Ok(file)
    }

    fn add(&mut self, name: &str, value: Value) {
        if is_ignored(name) {
            self.ignored.push(name.to_owned());
        } else {
            self.settings.insert(setting_of(name).unwrap_or_else(|| name.to_owned()), value);
        }
    }

    fn add_security(&mut self, section: Dict) {
        for (key, value) in section {
            match CLIENT_SECURITY.iter().find(|(known, _)| *known == key) {
                _ if matches!(value, Value::Empty(..)) => {}
                Some((_, setting)) => self.add(setting, value),
                None => self.add(&key, value),
            }
        }
    }
}

impl Provider for ConfigFile {
    fn metadata(&self) -> Metadata {
        self.metadata.clone()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.settings.clone()))
    }
}
