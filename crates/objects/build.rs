//! Compiles the proto files of Kubernetes' built-in kinds to a compressed descriptor set, `kubernetes.bin`.
//!
//! The files come with the crate `k8s-rs-pb`. Its generated code is not used: that takes minutes to compile and adds
//! megabytes, while the names, numbers and types of all fields take a tenth of a megabyte.

use std::{
    env,
    error::Error,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use flate2::{Compression, write::ZlibEncoder};
use prost::Message as _;

/// The crate that contains the proto files, and their directory in it: one per release of Kubernetes.
const CRATE: &str = "k8s-rs-pb";
const RELEASE: &str = "src/v1_35";
/// Groups that etcd never stores, as directories below [`RELEASE`].
const NOT_STORED: [&str; 3] = ["apimachinery/pkg/apis/testapigroup", "api/imagepolicy", "metrics"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    let root = crate_dir()?.join(RELEASE);
    println!("cargo:rerun-if-changed={}", root.display());
    let mut files = Vec::new();
    proto_files(&root, &mut files)?;
    files.retain(|file| file.strip_prefix(&root).is_ok_and(is_stored));
    files.sort();

    let mut set = protox::Compiler::new([&root])?.include_source_info(false).open_files(&files)?.file_descriptor_set();
    for file in &mut set.file {
        file.options = None;
        let messages = file.message_type.iter_mut().flat_map(|message| &mut message.field);
        messages.for_each(|field| field.json_name = None);
    }
    let out = PathBuf::from(env::var("OUT_DIR")?).join("kubernetes.bin");
    let mut compressed = ZlibEncoder::new(Vec::new(), Compression::best());
    io::Write::write_all(&mut compressed, &set.encode_to_vec())?;
    fs::write(out, compressed.finish()?)?;
    Ok(())
}

fn is_stored(file: &Path) -> bool {
    !NOT_STORED.iter().any(|dir| file.starts_with(dir))
}

/// Returns the directory of the crate's sources. Only Cargo knows it: a registry's cache or a vendored copy.
fn crate_dir() -> Result<PathBuf, Box<dyn Error>> {
    // What the build uses is there, so the network is needed only if packages of other targets are missing.
    let metadata = metadata(&["--offline"]).or_else(|_| metadata(&[]))?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata has no packages")?;
    let package = packages.iter().find(|package| package["name"] == CRATE);
    let manifest = package.and_then(|package| package["manifest_path"].as_str()).ok_or("no k8s-rs-pb")?;
    Ok(Path::new(manifest).parent().ok_or("a manifest is in a directory")?.to_owned())
}

fn metadata(flags: &[&str]) -> Result<serde_json::Value, Box<dyn Error>> {
    let output = Command::new(env::var("CARGO")?)
        .args(["metadata", "--locked", "--format-version=1", "--filter-platform"])
        .arg(env::var("HOST")?)
        .args(flags)
        .current_dir(env::var("CARGO_MANIFEST_DIR")?)
        .output()?;
    if !output.status.success() {
        return Err(format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn proto_files(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            proto_files(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path);
        }
    }
    Ok(())
}
