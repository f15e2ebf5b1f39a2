//! Holds the shape of the sources: who may import whom, and that the map of the code is complete.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Of each module, the modules that it may name.
const IMPORTS: &[(&str, &[&str])] = &[
    ("types", &["proto"]),
    ("metrics", &[]),
    ("trace", &[]),
    ("private", &[]),
    ("supervise", &[]),
    ("turns", &[]),
    ("gather", &[]),
    ("watchdog", &[]),
    ("index", &["types"]),
    ("lease", &["types"]),
    ("log", &["types", "private", "supervise"]),
    ("watch", &["types", "log", "metrics", "supervise"]),
    ("store", &["types", "index", "lease", "log", "metrics", "supervise", "trace", "turns", "watch", "watchdog"]),
    ("simulation", &["types", "index", "log", "metrics", "watch", "store", "proto"]),
    ("proto", &[]),
    ("config", &[]),
    ("listen", &["config", "gather", "private", "supervise", "turns"]),
    ("bench", &["gather", "proto"]),
    ("snapshot", &["types", "config", "log", "private", "store"]),
    ("check", &["types", "config", "index", "log", "store"]),
    (
        "api",
        &["types", "index", "log", "metrics", "watch", "store", "snapshot", "supervise", "trace", "turns", "proto"],
    ),
    ("http", &["api", "log", "metrics", "store", "supervise", "proto"]),
    (
        "server",
        &[
            "api",
            "config",
            "http",
            "listen",
            "log",
            "metrics",
            "snapshot",
            "store",
            "supervise",
            "trace",
            "turns",
            "watchdog",
        ],
    ),
    ("logging", &["config"]),
    (
        "internals",
        &["api", "config", "http", "index", "lease", "log", "proto", "snapshot", "store", "turns", "types", "watch"],
    ),
    ("main", &["bench", "check", "config", "logging", "server", "snapshot", "supervise"]),
    ("lib", &[]),
];

#[test]
fn imports_point_down() {
    let mut wrong = Vec::new();
    for file in sources() {
        let module = module(&file);
        let Some((_, allowed)) = IMPORTS.iter().find(|(name, _)| *name == module) else {
            panic!("{} is a module that the table does not know", file.display());
        };
        for named in named_modules(&text(&file)) {
            if named != module && !allowed.contains(&named.as_str()) {
                wrong.push(format!("{}: {module} may not name {named}", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_the_log_names_sqlx() {
    for file in sources().into_iter().filter(|file| module(file) != "log") {
        assert!(!text(&file).contains("sqlx::"), "{} names sqlx", file.display());
    }
}

#[test]
fn the_map_of_the_code_is_complete() {
    let map = text(&root().join("docs/architecture.md"));
    for file in sources() {
        let path = file.strip_prefix(root()).expect("a source lies below the root");
        let parent = path.parent().expect("a source lies in a folder");
        let name = if parent == Path::new("src") { path } else { parent };
        let name = name.display().to_string();
        // A folder inside a folder is the upper one's business.
        if name.matches('/').count() == 1 {
            assert!(map.contains(&name), "docs/architecture.md does not name {name}");
        }
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn text(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn sources() -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![root().join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("src can be read") {
            let path = entry.expect("src can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_string_lossy().ends_with(".rs") && !path.to_string_lossy().ends_with("_tests.rs") {
                files.push(path);
            }
        }
    }
    assert!(!files.is_empty());
    files
}

/// The first part of the path below src.
fn module(file: &Path) -> String {
    let path = file.strip_prefix(root().join("src")).expect("a source lies in src");
    let first = path.components().next().expect("a source has a name").as_os_str().to_string_lossy();
    first.trim_end_matches(".rs").to_owned()
}

/// Modules named behind `crate::` or, in main.rs, `orlop::`, in groups of imports too; comments and the tests at a file's
/// end left out.
fn named_modules(text: &str) -> Vec<String> {
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let code: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n");
    let mut named = Vec::new();
    for prefix in ["crate::", "use orlop::"] {
        for (at, _) in code.match_indices(prefix) {
            let rest = &code[at + prefix.len()..];
            match rest.strip_prefix('{') {
                Some(group) => named.extend(group_names(group)),
                None => named.extend(first_name(rest)),
            }
        }
    }
    named
}

fn group_names(group: &str) -> Vec<String> {
    let (mut depth, mut start, mut names) = (0, true, Vec::new());
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => start = true,
            letter if start && letter.is_alphabetic() => {
                names.extend(first_name(&group[at..]));
                start = false;
            }
            _ => {}
        }
    }
    names
}

fn first_name(text: &str) -> Option<String> {
    let name: String = text.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect();
    (!name.is_empty()).then_some(name)
}
