"""Tarballs and Debian packages of scripts/release. The same input gives the same bytes: names are sorted, owners are
root, and all times are SOURCE_DATE_EPOCH.
"""

import functools
import gzip
import io
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Architectures as `uname -m` prints them, which is also how Rust's targets begin.
TARGETS = {arch: f"{arch}-unknown-linux-musl" for arch in ("x86_64", "aarch64")}
DEBIAN_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Segment types: content that is loaded, and the path of the dynamic loader, which a static binary lacks.
PT_LOAD = 1
PT_INTERP = 3
UNIT = ROOT / "packaging/systemd/orlop.service"


def version() -> str:
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def epoch() -> int:
    return int(os.environ["SOURCE_DATE_EPOCH"])


def texts(binary: Path) -> dict[str, bytes]:
    """Returns the texts that programs print, by their names in a tarball: manual pages, completions, other licences."""
    commands = {"THIRD-PARTY": [sys.executable, ROOT / "scripts/third-party"]} | {
        f"completions/{name}": [binary, "completions", shell]
        for shell, name in {"bash": "orlop", "zsh": "_orlop", "fish": "orlop.fish"}.items()
    }
    run = functools.partial(subprocess.run, check=True)
    printed = {name: run(words, stdout=subprocess.PIPE).stdout for name, words in commands.items()}
    with tempfile.TemporaryDirectory() as folder:
        run([binary, "man", folder])
        return printed | {f"man/{page.name}": page.read_bytes() for page in Path(folder).iterdir()}


def pages() -> dict[str, bytes]:
    """Returns README.md, the documentation with its pictures, and what these pages link, by their paths."""
    linked = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "tests/data/README.md")
    used = ("packaging/compose.yaml", "packaging/systemd/orlop.env")
    docs = [file for file in (ROOT / "docs").rglob("*") if file.suffix in (".md", ".png", ".svg")]
    # The files of monitoring are symbolic links into the chart, whose README links its other files.
    folders = [ROOT / name for name in ("charts", "monitoring", "packaging/quickstart")]
    whole = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    files = [*(ROOT / name for name in linked + used), *docs, *whole]
    return {str(file.relative_to(ROOT)): file.read_bytes() for file in files}


def missing_links(folder: Path) -> list[str]:
    """Returns the links of the pages below a folder that lead to no file or directory, as `page: link`."""
    links = [
        (page, link)
        for page in sorted(folder.rglob("*.md"))
        for link in re.findall(r"\]\(([^)\s#]+)", page.read_text())
    ]
    return [
        f"{page.relative_to(folder)}: {link}"
        for page, link in links
        if "://" not in link and not (page.parent / link).exists()
    ]


def tarball(folder: Path, version: str, arch: str, binary: Path, texts: dict[str, bytes]) -> Path:
    name = f"orlop-{version}-linux-{arch}"
    files = {"orlop": (0o755, binary.read_bytes())}
    for source in (ROOT / "LICENSE", *(ROOT / "packaging/systemd").iterdir()):
        place = source.name if source.parent == ROOT else f"systemd/{source.name}"
        files[place] = (0o644, source.read_bytes())
    files |= {place: (0o644, content) for place, content in (texts | pages()).items()}
    path = folder / f"{name}.tar.gz"
    path.write_bytes(archive({f"{name}/{place}": file for place, file in files.items()}))
    return path


def archive(files: dict[str, tuple[int, bytes]]) -> bytes:
    """Returns a .tar.gz of files, given as name: (mode, content)."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, (mode, content) in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(content), mode, epoch()
            entry.uname = entry.gname = "root"
            tar.addfile(entry, io.BytesIO(content))
    return compressed(plain.getvalue())


def compressed(content: bytes) -> bytes:
    # The header has no file name, and no time of its own.
    return gzip.compress(content, compresslevel=9, mtime=0)


def debian_package(folder: Path, version: str, arch: str, binary: Path, texts: dict[str, bytes]) -> Path:
    """Builds a Debian package with dpkg-deb, which validates the control file and honours SOURCE_DATE_EPOCH. cargo-deb
    would take minutes to install and adds nothing here: the files and the scripts are the same.
    """
    # A pre-release sorts before its release.
    debian_version = version.replace("-", "~")
    architecture = DEBIAN_ARCHITECTURES[arch]
    path = folder / f"orlop_{debian_version}_{architecture}.deb"
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "orlop"
        for name, (mode, content) in debian_files(binary, texts).items():
            write(tree / name, mode, content)
        size = sum(file.stat().st_size for file in tree.rglob("*") if file.is_file())
        fields = {"@VERSION@": debian_version, "@ARCHITECTURE@": architecture, "@SIZE@": str(size // 1024)}
        control = (ROOT / "packaging/debian/control").read_text()
        for field, value in fields.items():
            control = control.replace(field, value)
        write(tree / "DEBIAN/control", 0o644, control.encode())
        write(tree / "DEBIAN/conffiles", 0o644, b"/etc/orlop/orlop.env\n")
        for script in ("postinst", "prerm", "postrm"):
            write(tree / "DEBIAN" / script, 0o755, (ROOT / "packaging/debian" / script).read_bytes())
        # With several threads, xz splits its output by their number.
        options = ["--root-owner-group", "-Zxz", "--threads-max=1"]
        subprocess.run(["dpkg-deb", *options, "--build", tree, path], check=True, stdout=subprocess.DEVNULL)
    return path


def debian_files(binary: Path, texts: dict[str, bytes]) -> dict[str, tuple[int, bytes]]:
    unit = UNIT.read_text()
    # Only the administrator writes to /usr/local.
    packaged = unit.replace("ExecStart=/usr/local/bin/orlop\n", "ExecStart=/usr/bin/orlop\n")
    if packaged == unit:
        raise SystemExit(f"release: {UNIT} does not start /usr/local/bin/orlop")
    doc = "usr/share/doc/orlop"
    manual = [(name.removeprefix("man/"), page) for name, page in texts.items() if name.startswith("man/")]
    # Pages are not compressed, because they link each other.
    return {f"{doc}/{place}": (0o644, content) for place, content in pages().items()} | {
        f"usr/share/man/man1/{name}.gz": (0o644, compressed(page)) for name, page in manual
    } | {
        "usr/bin/orlop": (0o755, binary.read_bytes()),
        "usr/lib/systemd/system/orlop.service": (0o644, packaged.encode()),
        # postinst gives it to the group orlop, which does not exist yet.
        "etc/orlop/orlop.env": (0o640, (ROOT / "packaging/systemd/orlop.env").read_bytes()),
        "usr/share/bash-completion/completions/orlop": (0o644, texts["completions/orlop"]),
        "usr/share/zsh/vendor-completions/_orlop": (0o644, texts["completions/_orlop"]),
        "usr/share/fish/vendor_completions.d/orlop.fish": (0o644, texts["completions/orlop.fish"]),
        f"{doc}/copyright": (0o644, (ROOT / "LICENSE").read_bytes()),
        f"{doc}/THIRD-PARTY.gz": (0o644, compressed(texts["THIRD-PARTY"])),
        f"{doc}/changelog.gz": (0o644, compressed((ROOT / "CHANGELOG.md").read_bytes())),
    }


def segments(binary: Path) -> list[tuple[int, int]]:
    """Returns the type of each segment of a 64-bit little-endian ELF file, and its size in the file."""
    content = binary.read_bytes()
    (offset,) = struct.unpack_from("<Q", content, 32)
    entry, count = struct.unpack_from("<HH", content, 54)
    headers = [content[offset + number * entry :] for number in range(count)]
    return [(struct.unpack_from("<I", header)[0], struct.unpack_from("<Q", header, 32)[0]) for header in headers]


def loaded_size(binary: Path) -> int:
    """Returns the bytes that are loaded, which are nearly all of a binary without symbols."""
    return sum(size for kind, size in segments(binary) if kind == PT_LOAD)


def write(path: Path, mode: int, content: bytes) -> None:
    # The umask must not change the modes of directories.
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir()
            parent.chmod(0o755)
    path.write_bytes(content)
    path.chmod(mode)
