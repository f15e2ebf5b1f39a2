"""What scripts/check-docs needs from the machine: the setup that a page assumes, a temporary Postgres, ports, processes."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

# A CA and certificates for this machine, with the names that the pages use.
CERTIFICATES = r"""openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj /CN=ca -keyout ca.key -out ca.crt
for name in server client; do
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj "/CN=$name" -keyout $name.key -out $name.csr
  openssl x509 -req -in $name.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out $name.crt \
    -extfile <(printf 'basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n')
  cp $name.crt $name.pem
done
cp ca.crt ca.pem
cp ca.crt .."""
# Arguments of openssl's certificates for etcdctl.
ETCD = "--endpoints https://etcd.example:2379 --cacert etcd-ca.crt --cert etcd-client.crt --key etcd-client.key"
ETCD_CERTIFICATES = "for file in ca client; do for end in crt key; do cp $file.$end etcd-$file.$end; done; done"
START_ETCD = [
    "etcd --data-dir /var/lib/etcd --listen-client-urls https://etcd.example:2379 --advertise-client-urls "
    "https://etcd.example:2379 --listen-peer-urls http://127.0.0.1:0 --cert-file server.crt --key-file server.key "
    "--trusted-ca-file ca.crt --client-cert-auth",
    f"until etcdctl {ETCD} put /registry/pods/a/b c; do sleep 0.1; done",
    f"for i in 1 2 3; do etcdctl {ETCD} put /registry/events/$i e; done",
]
# Commands before the first block of a page. `postgres: SQL` starts a Postgres and executes SQL in it.
SETUP = {
    "docs/how-to/alerts.md": ["orlop", "etcdctl put /registry/pods/a/b c"],
    "docs/how-to/backup.md": [
        CERTIFICATES,
        "orlop --listen-client-urls http://127.0.0.1:2379,https://orlop.example:2379 --advertise-client-urls "
        "http://127.0.0.1:2379 --cert-file server.crt --key-file server.key --trusted-ca-file ca.crt",
        "postgres: CREATE ROLE orlop LOGIN PASSWORD 'password'; CREATE DATABASE orlop OWNER orlop",
    ],
    "docs/how-to/check.md": [
        "postgres: CREATE ROLE orlop LOGIN PASSWORD 'secret'; CREATE DATABASE orlop OWNER orlop",
        "orlop --data-dir /var/lib/orlop",
        "etcdctl put a b",
        "etcdctl snapshot save backup.db",
        "orlop snapshot restore backup.db --datastore-endpoint postgres://orlop:secret@db.example/orlop",
    ],
    "docs/how-to/migrate.md": [
        CERTIFICATES,
        ETCD_CERTIFICATES,
        *START_ETCD,
        "orlop --data-dir sqlite",
        "postgres: CREATE ROLE orlop LOGIN PASSWORD 'password'; CREATE DATABASE orlop OWNER orlop",
    ],
    # The table of kine, as k3s keeps it.
    "docs/how-to/k3s.md": [
        "sqlite3 /var/lib/rancher/k3s/server/db/state.db 'CREATE TABLE kine (id INTEGER PRIMARY KEY AUTOINCREMENT, "
        "name TEXT, created INTEGER, deleted INTEGER, create_revision INTEGER, prev_revision INTEGER, lease INTEGER, "
        'value BLOB, old_value BLOB); INSERT INTO kine VALUES (1, "compact_rev_key", 1, 0, 0, 0, 0, "", NULL), '
        '(2, "/registry/health", 1, 0, 0, 0, 0, "true", NULL), (3, "/registry/pods/a/b", 1, 0, 0, 0, 0, "c", NULL)\'',
    ],
    "docs/how-to/postgres.md": [CERTIFICATES, "postgres:"],
    "docs/how-to/tls.md": [CERTIFICATES],
    "docs/reference/gateway.md": ["orlop"],
}


class Postgres:
    """A cluster with TLS, which is created when a page needs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "postgres"
        self.port = free_port()
        self.process: subprocess.Popen | None = None
        found = shutil.which("initdb")
        debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda file: int(file.parts[4]))
        self.programs = Path(found).resolve().parent if found else debian[-1].parent if debian else None

    def available(self) -> bool:
        return self.programs is not None

    def start(self, sql: str) -> None:
        if not self.programs:
            return
        self.data.mkdir()
        # Postgres refuses to run as root.
        root = os.geteuid() == 0
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if root else []
        if root:
            shutil.chown(self.data, "postgres", "postgres")
        initdb = [*user, self.programs / "initdb", "--no-sync", "--username=postgres", "--auth-local=trust"]
        initdb += ["--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C", "-D", self.data]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd="/")
        settings = [f"port={self.port}", "listen_addresses=localhost", f"unix_socket_directories={self.data}"]
        if (self.folder / "work/server.crt").is_file():
            for name in ("server.crt", "server.key"):
                shutil.copy(self.folder / "work" / name, self.data)
                if root:
                    shutil.chown(self.data / name, "postgres", "postgres")
                (self.data / name).chmod(0o600)
            settings.append("ssl=on")
        options = [part for setting in settings for part in ("-c", setting)]
        with (self.data / "log").open("w") as log:
            command = [*user, self.programs / "postgres", "-D", self.data, *options]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        self.psql("SELECT 1", retry=True)
        for statement in filter(None, sql.split("; ")):
            self.psql(statement)

    def psql(self, sql: str, retry: bool = False) -> None:
        end = time.monotonic() + 60
        while (result := subprocess.run(["bash", "-c", self.command(sql)], capture_output=True, text=True)).returncode:
            if not retry or time.monotonic() > end:
                raise RuntimeError(f"{sql}: {result.stderr}{(self.data / 'log').read_text()}")
            time.sleep(0.1)

    def command(self, sql: str) -> str:
        """Returns a bash command that executes a statement as the superuser."""
        database = "postgres" if sql.startswith("CREATE") or sql == "SELECT 1" else "orlop"
        sql = sql.replace("'", "'\\''")
        return f"{self.programs}/psql -h {self.data} -p {self.port} -U postgres -d {database} -X -v ON_ERROR_STOP=1 -c '{sql}'"

    def stop(self) -> None:
        if self.process:
            # Fast shutdown: it disconnects the clients.
            self.process.send_signal(signal.SIGINT)
            self.process.wait()


def in_session(session: int) -> list[int]:
    """Returns the processes of a session, without zombies."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and is_in(entry, session)]


def is_in(process: Path, session: int) -> bool:
    fields = status(process)
    return fields[0] not in "ZX" and int(fields[3]) == session


def alive(pid: int | None) -> bool:
    return status(Path(f"/proc/{pid}"))[0] not in "ZX"


def status(process: Path) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; the state is X if the process has ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0", "0", "0"]


def kill(pid: int, sent: signal.Signals) -> None:
    try:
        os.kill(pid, sent)
    except ProcessLookupError:
        pass


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
