"""SBOM of a binary as CycloneDX 1.5 JSON: each crate in the binary with licence, checksum and dependencies, and the C
libraries that crates contain, Rust's standard library and musl. Build tools and procedural macros are left out, because
they are not in the binary.

A script over `cargo metadata` instead of cargo-cyclonedx, because that does not list the C libraries, takes minutes to
install, and writes the time and a random number.
"""

import datetime
import hashlib
import json
import re
import subprocess
import tomllib
import uuid
from pathlib import Path

import release_files

ROOT = release_files.ROOT
# C libraries: the crate that contains the source, the file with the version, a pattern with major, minor and patch, the
# name and the licence.
BUNDLED = [
    (
        "libsqlite3-sys",
        "sqlite3/sqlite3.h",
        r"#define SQLITE_VERSION_NUMBER +(\d)(\d{3})(\d{3})\b",
        "sqlite",
        "blessing",
    ),
    (
        "libmimalloc-sys",
        "c_src/mimalloc/v3/include/mimalloc.h",
        r"#define MI_MALLOC_VERSION +(\d)(\d\d)(\d\d)\b",
        "mimalloc",
        "MIT",
    ),
]


def write(path: Path, version: str, target: str, binary: Path) -> None:
    resolved = metadata(target)
    packages = {package["id"]: package for package in resolved["packages"]}
    graph = crates(resolved, packages, used(target))
    root = next(package_id for package_id in graph if packages[package_id]["name"] == "orlop")
    checksums = {
        (package["name"], package["version"]): package.get("checksum")
        for package in tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    }
    components = [component(packages[package_id], checksums) for package_id in graph if package_id != root]
    dependencies = [
        {"ref": purl(packages[package_id]), "dependsOn": sorted(purl(packages[other]) for other in others)}
        for package_id, others in graph.items()
    ]
    for library, owner in bundled(packages.values()):
        components.append(library)
        next(entry for entry in dependencies if entry["ref"] == owner)["dependsOn"].append(library["bom-ref"])
    # All crates use them, so only the root names them.
    runtime = [standard_library(), musl(target)]
    components += runtime
    needed = next(entry for entry in dependencies if entry["ref"] == purl(packages[root]))["dependsOn"]
    needed += [library["bom-ref"] for library in runtime]
    digest = hashlib.sha256(binary.read_bytes()).hexdigest()
    moment = datetime.datetime.fromtimestamp(release_files.epoch(), datetime.UTC)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        # The same binary has the same number.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                **component(packages[root], checksums),
                "type": "application",
                "version": version,
                "hashes": [{"alg": "SHA-256", "content": digest}],
            },
            "properties": [{"name": "target", "value": target}],
        },
        "components": sorted(components, key=lambda entry: entry["bom-ref"]),
        "dependencies": sorted(dependencies, key=lambda entry: entry["ref"]),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def metadata(target: str) -> dict:
    words = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target]
    return json.loads(subprocess.run(words, check=True, capture_output=True, cwd=ROOT).stdout)


def used(target: str) -> set[str]:
    """Returns the crates in the binary. `cargo metadata` contains also those that tests and other crates enable."""
    options = ["--edges", "normal,no-proc-macro", "--prefix", "none", "--target", target]
    words = ["cargo", "tree", "--locked", "--package", "orlop", *options]
    lines = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    return {f"pkg:cargo/{name}@{version[1:]}" for name, version in (line.split()[:2] for line in lines)}


def crates(metadata: dict, packages: dict[str, dict], used: set[str]) -> dict[str, list[str]]:
    """Returns the crates in the binary and the dependencies of each, as ids."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    waiting = [next(package["id"] for package in packages.values() if package["name"] == "orlop")]
    graph: dict[str, list[str]] = {}
    while waiting:
        package_id = waiting.pop()
        if package_id in graph:
            continue
        graph[package_id] = [
            dependency["pkg"]
            for dependency in nodes[package_id]["deps"]
            if purl(packages[dependency["pkg"]]) in used
            and any(kind["kind"] is None for kind in dependency["dep_kinds"])
        ]
        waiting += graph[package_id]
    return graph


def purl(package: dict) -> str:
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package: dict, checksums: dict[tuple[str, str], str | None]) -> dict:
    entry = {
        "type": "library",
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "purl": purl(package),
    }
    if package["license"]:
        # Old manifests separate alternatives with a slash, which SPDX does not know.
        entry["licenses"] = [{"expression": re.sub(r" ?/ ?", " OR ", package["license"])}]
    checksum = checksums.get((package["name"], package["version"]))
    if checksum:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return entry


def bundled(packages: list[dict]) -> list[tuple[dict, str]]:
    """Returns the C libraries, each with the reference of the crate that contains it."""
    found = []
    for crate, file, pattern, name, licence in BUNDLED:
        package = next(package for package in packages if package["name"] == crate)
        source = Path(package["manifest_path"]).parent / file
        match = re.search(pattern, source.read_text(errors="replace"))
        if not match:
            raise SystemExit(f"release: {source} does not contain the version of {name}")
        library = generic(name, ".".join(str(int(number)) for number in match.groups()), licence)
        found.append((library, purl(package)))
    return found


def generic(name: str, version: str, licence: str) -> dict:
    reference = f"pkg:generic/{name}@{version}"
    entry = {"type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference}
    return {**entry, "licenses": [{"expression": licence}]}


def licence(component: dict) -> str:
    return component["licenses"][0]["expression"]


def standard_library() -> dict:
    return generic("rust-std", rustc("--version").split()[1], "MIT OR Apache-2.0")


def musl(target: str) -> dict:
    """Returns the C library of static binaries, which comes with Rust's standard library of the target."""
    archive = Path(rustc("--print", "target-libdir", "--target", target)) / "self-contained/libc.a"
    # musl stores its version as a string.
    versions = set(re.findall(rb"\0(\d+\.\d+\.\d+)\0", archive.read_bytes())) if archive.is_file() else set()
    if len(versions) != 1:
        raise SystemExit(f"release: {archive} of `rustup target add {target}` does not contain one version of musl")
    return generic("musl", versions.pop().decode(), "MIT")


def rustc(*arguments: str) -> str:
    return subprocess.run(["rustc", *arguments], check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
