//! The command line without secrets.

/// Flags whose whole value is hidden: a password in a URL may contain any character.
const SECRET: [&str; 3] = ["datastore-endpoint", "endpoint", "discovery-password"];
const HIDDEN: &str = "***";

/// Returns the words of the command line.
pub(super) fn shown() -> Vec<String> {
    without_secrets(std::env::args_os().map(|word| word.to_string_lossy().into_owned()))
}

fn without_secrets(words: impl Iterator<Item = String>) -> Vec<String> {
    let mut is_value_secret = false;
    let shown = |word: String| {
        if std::mem::take(&mut is_value_secret) {
            return HIDDEN.to_owned();
        }
        let name = word.trim_start_matches('-');
        let (name, value) = name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
        let is_secret = word.starts_with('-') && SECRET.contains(&name);
        is_value_secret = is_secret && value.is_none();
        match value {
            Some(_) if is_secret => format!("--{name}={HIDDEN}"),
            // A URL with a user, of an unknown flag or without a flag.
            _ if word.contains("://") && word.contains('@') => HIDDEN.to_owned(),
            _ => word,
        }
    };
    words.map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_hidden() {
        for (words, expected) in [
            ("orlop --name a --metrics=extensive", "orlop --name a --metrics=extensive"),
            ("orlop --datastore-endpoint postgres://u:p@h/d --name a", "orlop --datastore-endpoint *** --name a"),
            ("orlop --datastore-endpoint=postgres://u:p@h/d", "orlop --datastore-endpoint=***"),
            ("orlop -endpoint sqlite://x?password=p", "orlop -endpoint ***"),
            ("orlop -endpoint=p", "orlop --endpoint=***"),
            ("orlop --other=postgres://u:p@h postgres://u:p@h", "orlop *** ***"),
            (
                "orlop --discovery-password p --datastore-endpoint",
                "orlop --discovery-password *** --datastore-endpoint",
            ),
        ] {
            let found = without_secrets(words.split(' ').map(str::to_owned));
            assert_eq!(found.join(" "), expected, "{words}");
        }
    }
}
