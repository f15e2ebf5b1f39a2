"""Virtual environments for the checks, below target/tools.

A script calls `enter` first, which restarts the script in an environment with the given packages. An environment is
created once, and again when its list of packages changes. The only system package that may be installed is Debian's
python3-venv.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def enter(name: str, packages: list[str]) -> None:
    folder = ROOT / "target" / "tools" / name
    if Path(sys.prefix).resolve() == folder.resolve():
        return
    stamp = folder / "packages.txt"
    if not stamp.is_file() or stamp.read_text() != "\n".join(packages):
        shutil.rmtree(folder, ignore_errors=True)
        make(folder)
        pip = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, *packages], check=True)
        # Written last, so that an incomplete environment is created again.
        stamp.write_text("\n".join(packages))
    python = str(folder / "bin" / "python")
    os.execv(python, [python, *sys.argv])


def make(folder: Path) -> None:
    if subprocess.run([sys.executable, "-c", "import ensurepip"], stderr=subprocess.DEVNULL).returncode:
        if os.geteuid() or not shutil.which("apt-get"):
            sys.exit("Python's venv module is missing: install python3-venv")
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        install = ["apt-get", "-qq", "install", "-y", "--no-install-recommends", "python3-venv"]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)


def settings() -> set[str]:
    """Returns the settings that docs/reference/configuration.md lists, as flags without dashes."""
    names = set()
    for line in (ROOT / "docs/reference/configuration.md").read_text().splitlines():
        if line.startswith("| `"):
            names.update(cell.strip(" `") for cell in line.split("|")[1].split(","))
    # A configuration file cannot name itself, so the table lacks this flag.
    return names | {"config-file"}


def unknown_settings(text: str) -> list[str]:
    """Returns the ORLOP_* variables in a text that match no setting."""
    known = settings()
    variables = {found.lower().replace("_", "-") for found in re.findall(r"\bORLOP_([A-Z][A-Z_]*[A-Z])\b", text)}
    return sorted(variables - known)
