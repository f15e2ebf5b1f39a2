//! Passes the commit of the source to the compiler as `ORLOP_COMMIT`: the variable of that name, else what git says, else
//! "unknown", for example in a source archive.

use std::{path::Path, process::Command};

fn main() {
    println!("cargo::rerun-if-env-changed=ORLOP_COMMIT");
    // git writes to this file at each commit and checkout.
    let moves = Path::new(".git/logs/HEAD");
    println!("cargo::rerun-if-changed={}", if moves.exists() { ".git/logs/HEAD" } else { "build.rs" });
    let commit = std::env::var("ORLOP_COMMIT").ok().filter(|commit| !commit.is_empty()).or_else(from_git);
    println!("cargo::rustc-env=ORLOP_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

fn from_git() -> Option<String> {
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output().ok()?;
    let commit = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !commit.is_empty()).then_some(commit)
}
