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

use super::{
    etcd_only::{check_ignored, is_deprecated, is_ignored},
    flags::setting_of,
};

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
    /// Keys of etcd that have another name now.
    pub(super) deprecated: Vec<String>,
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
        let mut file = Self { metadata, settings: Dict::new(), ignored: Vec::new(), deprecated: Vec::new() };
        for (key, value) in read {
            let added = match (key.as_str(), value) {
                ("client-transport-security", Value::Dict(_, section)) => file.add_security(section),
                ("peer-transport-security", _) => {
                    file.ignored.push(key);
                    Ok(())
                }
                (name, value) => file.add(name, value),
            };
            added.map_err(|error| format!("{error} in {}", file.metadata.name))?;
        }
        Ok(file)
    }

    fn add(&mut self, name: &str, value: Value) -> Result<(), String> {
        // As in etcd, an empty value means the default.
        if matches!(value, Value::Empty(..)) || value.as_str().is_some_and(str::is_empty) {
            return Ok(());
        }
        if is_deprecated(name) {
            self.deprecated.push(name.to_owned());
        }
        if is_ignored(name) {
            check_ignored(name, &value)?;
            self.ignored.push(name.to_owned());
        } else {
            self.settings.insert(setting_of(name).map_or(name, String::as_str).to_owned(), value);
        }
        Ok(())
    }

    fn add_security(&mut self, section: Dict) -> Result<(), String> {
        section.into_iter().try_for_each(|(key, value)| {
            let setting = CLIENT_SECURITY.iter().find(|(known, _)| *known == key).map(|(_, setting)| *setting);
            self.add(setting.unwrap_or(&key), value)
        })
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
