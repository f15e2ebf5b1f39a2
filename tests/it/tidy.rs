//! Checks the source tree: docs/architecture.md names every module and tests/README.md every test module, and no file is too
//! long.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Folders with Rust sources.
const SOURCES: &[&str] = &["src", "crates", "tests", "benches", "fuzz"];
const FILE_LINES_MAX: usize = 500;

#[test]
fn architecture_page_names_every_module() {
    let page = text(&root().join("docs/architecture.md"));
    let map = page.split("\n## ").find(|section| section.starts_with("Where things are\n")).expect("the map");
    // The page describes the tools as a whole.
    let is_tool =
        |file: &PathBuf| file.starts_with(root().join("crates/bench")) || file.starts_with(root().join("fuzz"));
    let is_root_or_tests = |file: &PathBuf| ["lib", "tests"].contains(&&*stem(file));
    let modules = sources().into_iter().filter(|file| depth_in_src(file) == Some(1));
    for file in modules.filter(|file| !is_tool(file) && !is_root_or_tests(file)) {
        let name = stem(&file);
        // `src` or, for example, `crates/sql`.
        let source = file.strip_prefix(root()).expect("it is below the root").display().to_string();
        let folder = source.split_once("/src/").map_or("src", |(folder, _)| folder);
        let rows: String = map.lines().filter(|row| paths(row).contains(&format!("`{folder}"))).collect();
        // As the end of a path, such as `src/api.rs`, or alone, such as `endpoint`.
        let is_named = ["/", "`"]
            .iter()
            .any(|start| ["`", ".rs`"].iter().any(|end| rows.contains(&format!("{start}{name}{end}"))));
        assert!(is_named, "the map in docs/architecture.md does not name {source} in a row of {folder}");
    }
}

#[test]
fn page_of_the_tests_names_every_module() {
    let page = text(&root().join("tests/README.md"));
    let table = page.split("\n\n").find(|block| block.starts_with("| module |")).expect("the table of modules");
    for entry in fs::read_dir(root().join("tests/it")).expect("the folder can be read") {
        let file = entry.expect("the folder can be read").path();
        let name = stem(&file);
        let is_named = table.lines().any(|row| paths(row).contains(&format!("`{name}`")));
        assert!(
            is_named || file.is_dir() || ["main", "support"].contains(&&*name),
            "the table in tests/README.md does not name {name}"
        );
    }
}

#[test]
fn no_file_is_too_long() {
    let lines = |file: &PathBuf| text(file).lines().count();
    let long: Vec<String> = sources()
        .into_iter()
        .filter(|file| lines(file) > FILE_LINES_MAX)
        .map(|file| format!("{}: {} lines", file.display(), lines(&file)))
        .collect();
    assert!(long.is_empty(), "longer than {FILE_LINES_MAX} lines: {long:#?}");
}

/// Number of levels below the nearest `src` folder: 1 for a module of a crate, 2 for a submodule.
fn depth_in_src(file: &Path) -> Option<usize> {
    let parts: Vec<_> = file.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    let src = parts.iter().rposition(|part| part == "src")?;
    Some(parts.len() - 1 - src)
}

/// Returns the first column of a row.
fn paths(row: &str) -> &str {
    row.split('|').nth(1).unwrap_or_default()
}

fn stem(file: &Path) -> String {
    file.file_stem().expect("a source has a name").to_string_lossy().into_owned()
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn text(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn sources() -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders: Vec<PathBuf> = SOURCES.iter().map(|folder| root().join(folder)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the folder can be read") {
            let path = entry.expect("the folder can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    assert!(!files.is_empty());
    files
}
