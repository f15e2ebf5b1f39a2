//! The configuration file: TOML, or YAML in Orlop's form or in etcd's.
//!
//! etcd's form has the same keys. In addition it groups the TLS settings in `client-transport-security` and
//! `peer-transport-security`, writes durations as numbers of nanoseconds, and has empty values and keys without a
//! meaning here.

use std::{fs, path::Path};

use figment::{
    Metadata, Profile, Provider,
    providers::{Format as _, Toml, Yaml},
    value::{Dict, Map, Value},
};

use super::{
    etcd_only::{INITIAL_CLUSTER, Notices, check_ignored, is_deprecated, is_ignored},
    flags::{is_duration, setting_names, setting_of},
    variables::{MISSPELT_EDITS_MAX, nearest},
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

/// The language of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Language {
    Toml,
    Yaml,
}

impl Language {
    fn name(self) -> &'static str {
        match self {
            Self::Toml => "TOML",
            Self::Yaml => "YAML",
        }
    }
}

/// The content of a file in Orlop's form.
pub(super) struct ConfigFile {
    metadata: Metadata,
    language: Language,
    settings: Dict,
    /// Keys that are no settings.
    unknown: Vec<String>,
    pub(super) notices: Notices,
}

impl ConfigFile {
    /// Reads a file; its extension tells the language.
    pub(super) fn read(file: &Path) -> Result<Self, String> {
        let text =
            fs::read_to_string(file).map_err(|error| format!("cannot read config-file {}: {error}", file.display()))?;
        let extension = file.extension().and_then(|extension| extension.to_str());
        let language = if matches!(extension, Some("yaml" | "yml")) { Language::Yaml } else { Language::Toml };
        let metadata = Metadata::from(format!("{} file", language.name()), file);
        let read = Self::parse(&text, language, metadata).map_err(|error| {
            let hint = match extension {
                Some("toml" | "yaml" | "yml") => "",
                Some(_) | None => ": the file is read as TOML, because its name does not end in .yaml or .yml",
            };
            format!("{error} in {} file {}{hint}", language.name(), file.display())
        })?;
        read.check_keys().map_err(|error| format!("config-file {}: {error}", file.display()))?;
        Ok(read)
    }

    /// Reads a text that is not in a file.
    pub(super) fn of(text: &str, language: Language) -> Result<Self, String> {
        let read = Self::parse(text, language, Metadata::named(format!("{} text", language.name())))?;
        read.check_keys()?;
        Ok(read)
    }

    /// Reads a text and brings etcd's form into Orlop's.
    fn parse(text: &str, language: Language, metadata: Metadata) -> Result<Self, String> {
        let read = match language {
            Language::Toml => Toml::string(text).data(),
            Language::Yaml => Yaml::string(text).data(),
        };
        let read = read.map_err(|error| without_content(&error))?.remove(&Profile::Default).unwrap_or_default();
        let (settings, unknown, notices) = (Dict::new(), Vec::new(), Notices::default());
        let mut file = Self { metadata, language, settings, unknown, notices };
        for (key, value) in read {
            match (key.as_str(), value) {
                ("client-transport-security", Value::Dict(_, section)) => file.add_security(section)?,
                ("peer-transport-security", _) => file.notices.ignored.push(key),
                (name, value) => file.add(name, value)?,
            }
        }
        Ok(file)
    }

    fn add(&mut self, name: &str, value: Value) -> Result<(), String> {
        // As in etcd, an empty value means the default.
        if matches!(value, Value::Empty(..)) || value.as_str().is_some_and(str::is_empty) {
            return Ok(());
        }
        if is_deprecated(name) {
            self.notices.deprecated.push(name.to_owned());
        }
        if is_ignored(name) {
            check_ignored(name, &value)?;
            self.notices.ignored.push(name.to_owned());
            if name == INITIAL_CLUSTER {
                self.notices.initial_cluster = value.as_str().map(str::to_owned);
            }
            return Ok(());
        }
        let Some(setting) = setting_of(name) else {
            self.unknown.push(name.to_owned());
            return Ok(());
        };
        if self.language == Language::Toml && is_duration(setting) {
            check_unit(name, &value)?;
        }
        match self.settings.insert(setting.clone(), value) {
            Some(_) => Err(format!("{name} is the setting {setting}, which is given twice: give it once")),
            None => Ok(()),
        }
    }

    /// Refuses keys that are no settings.
    fn check_keys(&self) -> Result<(), String> {
        let Some(key) = self.unknown.first() else { return Ok(()) };
        let hyphenated = key.replace('_', "-").to_ascii_lowercase();
        Err(match nearest(&hyphenated, setting_names(), MISSPELT_EDITS_MAX) {
            Some(meant) => format!("unknown key {key}; did you mean {meant}?"),
            None => format!("unknown key {key}; orlop --help lists the settings"),
        })
    }

    fn add_security(&mut self, section: Dict) -> Result<(), String> {
        section.into_iter().try_for_each(|(key, value)| {
            let setting = CLIENT_SECURITY.iter().find(|(known, _)| *known == key).map(|(_, setting)| *setting);
            self.add(setting.unwrap_or(&key), value)
        })
    }
}

/// Refuses a duration without a unit. A file in YAML may be one of etcd, whose numbers are nanoseconds. In TOML, the
/// author probably means seconds.
fn check_unit(name: &str, value: &Value) -> Result<(), String> {
    let Value::Num(_, number) = value else { return Ok(()) };
    match number.to_u128_lossy() {
        Some(0) => Ok(()),
        Some(number) => Err(format!("{name} is a duration: write a unit, for example \"{number}s\"")),
        None => Err(format!("{name} is a duration: write a number with a unit, for example \"10m\"")),
    }
}

/// Returns the error of a parser without lines and values of the file, which may contain a password.
fn without_content(error: &figment::Error) -> String {
    let text = error.to_string();
    if let Some((_, place)) = text.rsplit_once(", expected a map") {
        return format!("expected keys and values{place}");
    }
    // The parser of TOML shows the line as ` 3 | key = value` and marks the place below it.
    let is_shown = |line: &str| line.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ').starts_with('|');
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty() && !is_shown(line)).collect();
    lines.join(": ")
}

impl Provider for ConfigFile {
    fn metadata(&self) -> Metadata {
        self.metadata.clone()
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.settings.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Flags, Settings};

    /// Reads a file with this name and text. Returns the error, with the name of the file alone.
    fn refused(name: &str, text: &str) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join(name);
        fs::write(&file, text).expect("a file can be written");
        let error = ConfigFile::read(&file).err().unwrap_or_else(|| panic!("{name} is read: {text}"));
        error.replace(&format!("{}/", folder.path().display()), "")
    }

    #[test]
    fn errors_tell_the_place_and_not_the_content() {
        let misread = ": the file is read as TOML, because its name does not end in .yaml or .yml";
        for (name, text, want) in [
            (
                "a.toml",
                "a = 1\ndatastore-endpoint = \"postgres://u:secret@h/db\n",
                "TOML parse error at line 2, column 47: invalid basic string in TOML file a.toml",
            ),
            ("a.yml", "datastore-endpoint=\"postgres://u:secret@h/db\"", "expected keys and values in YAML file a.yml"),
            ("a.yaml", "- postgres://u:secret@h/db", "expected keys and values in YAML file a.yaml"),
        ] {
            assert_eq!(refused(name, text), want);
        }
        for name in ["etcd.conf", "etcd"] {
            let error = refused(name, "name: secret\n");
            assert!(error.ends_with(&format!(" in TOML file {name}{misread}")), "{error}");
            assert!(error.starts_with("TOML parse error at line 1, column 5: "), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
        let absent = ConfigFile::read(Path::new("/none/orlop.toml")).err();
        let reason = "cannot read config-file /none/orlop.toml: No such file or directory (os error 2)";
        assert_eq!(absent.as_deref(), Some(reason));
    }

    #[test]
    fn unknown_key_is_named_with_the_one_that_was_meant() {
        for (name, text, want) in [
            ("a.toml", "name = 'a'\ndata-dirr = 'b'", "unknown key data-dirr; did you mean data-dir?"),
            ("a.toml", "max_txn_ops = 5", "unknown key max_txn_ops; did you mean max-txn-ops?"),
            ("a.yaml", "endpont: sqlite://a", "unknown key endpont; did you mean endpoint?"),
            ("a.yaml", "client-transport-security: {certfile: a}", "unknown key certfile; did you mean cert-file?"),
            ("a.yaml", "database: {url: a}", "unknown key database; orlop --help lists the settings"),
        ] {
            assert_eq!(refused(name, text), format!("config-file {name}: {want}"));
        }
    }

    fn read(toml: Option<&str>, yaml: Option<&str>) -> Result<Settings, String> {
        Settings::of_texts(toml, yaml, &[], &Flags::default())
    }

    #[test]
    fn durations_in_toml_have_units() {
        let error = read(Some("history-retention = 604800"), None).expect_err("no unit");
        assert_eq!(error, "history-retention is a duration: write a unit, for example \"604800s\"");
        for text in ["grpc-keepalive-timeout = -5", "snapshot-interval = 1.5"] {
            assert!(read(Some(text), None).is_err_and(|error| error.contains("write a number with a unit")), "{text}");
        }
        let alias = "experimental-watch-progress-notify-interval = 5000000000";
        assert!(read(Some(alias), None).is_err_and(|error| error.contains("write a unit")));
        let secs = |read: Result<Settings, String>| read.expect("valid").history_retention.0.as_secs();
        assert_eq!(secs(read(Some("history-retention = 0"), None)), 0);
        assert_eq!(secs(read(Some("history-retention = '7d'"), None)), 604_800);
        // Nanoseconds, as in etcd's file.
        assert_eq!(secs(read(None, Some("history-retention: 5000000000"))), 5);
    }

    #[test]
    fn numbers_have_no_units() {
        for text in ["auth-token-ttl: 5m", "bcrypt-cost: 10k"] {
            let error = read(None, Some(text)).expect_err(text);
            assert!(error.contains(text.split_once(':').expect("a key").0), "{error}");
        }
        let settings = read(None, Some("auth-token-ttl: 60\nbcrypt-cost: 4")).expect("valid");
        assert_eq!((settings.auth_token_ttl, settings.bcrypt_cost), (60, 4));
    }
}
