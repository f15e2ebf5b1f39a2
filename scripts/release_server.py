"""Starts the server of a release, for the checks, and talks to it with etcdctl."""

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ETCDCTL = ROOT / "target/tools/etcd/usr/bin/etcdctl"
# Under emulation, a start takes a few seconds.
ATTEMPTS = 30


def require_etcdctl() -> None:
    if not ETCDCTL.is_file():
        sys.exit(f"{Path(sys.argv[0]).name}: {ETCDCTL} does not exist; run `just etcd`")


def free_endpoint() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def etcdctl(endpoint: str, *words: str, check: bool = True) -> subprocess.CompletedProcess:
    # Without a server, it waits for the whole timeout.
    timeouts = ["--dial-timeout=2s", "--command-timeout=2s"]
    environment = {**os.environ, "ETCDCTL_API": "3"}
    command = [ETCDCTL, "--endpoints", endpoint, *timeouts, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=check)


@contextmanager
def running(endpoint: str, command: list[str | Path]):
    """Runs a server until the end of the block. It must serve the endpoint, and stop with status 0."""
    with tempfile.TemporaryFile(mode="w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            for _ in range(ATTEMPTS):
                if server.poll() is not None or etcdctl(endpoint, "endpoint", "health", check=False).returncode == 0:
                    break
            if server.poll() is not None:
                log.seek(0)
                sys.exit(f"{Path(sys.argv[0]).name}: the server ended with status {server.returncode}:\n{log.read()}")
            yield
        finally:
            server.terminate()
            status = server.wait(ATTEMPTS)
    if status:
        sys.exit(f"{Path(sys.argv[0]).name}: the server stopped with status {status}")
