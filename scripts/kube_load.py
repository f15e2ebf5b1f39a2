#!/usr/bin/env python3
"""Load on a Kubernetes API server, with the standard library alone: objects are created, listed and updated.

    kube_load.py measure URL TOKEN CAFILE    throughput and latencies, one line per operation
    kube_load.py write URL TOKEN CAFILE DIR  writes until DIR/stop exists, then verifies that nothing acknowledged is lost

URL is that of the configmaps of a namespace, or of its objects of the kind Lamp, which scripts/try-kube-apiserver defines.
`write` replaces DIR/acknowledged with the number of acknowledged writes while it runs. A write that fails is not repeated:
whether it was applied is unknown, so both are accepted.
"""

import http.client
import json
import random
import ssl
import string
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

CLIENTS = 16
OBJECTS = 2000
LISTS = 300
VALUE_BYTES = 1024
# A request that takes longer counts as failed.
TIMEOUT_SECS = 30


class Api:
    """A client with one connection, which is opened again after a failure."""

    def __init__(self, url: str, token: str, cafile: str) -> None:
        parts = urlsplit(url)
        self.address, self.path = parts.netloc, parts.path
        self.context = ssl.create_default_context(cafile=cafile)
        self.headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self.connection: http.client.HTTPSConnection | None = None

    def create(self, name: str, value: str) -> None:
        self.call("POST", "", self.encoded(name, value), {"Content-Type": "application/json"})

    def replace(self, name: str, value: str) -> None:
        self.call("PUT", f"/{name}", self.encoded(name, value), {"Content-Type": "application/json"})

    def patch(self, name: str, value: str) -> None:
        body = json.dumps({"data": {"value": value}}).encode()
        self.call("PATCH", f"/{name}", body, {"Content-Type": "application/merge-patch+json"})

    def encoded(self, name: str, value: str) -> bytes:
        version, kind = ("v1", "ConfigMap") if self.path.endswith("/configmaps") else ("example.com/v1", "Lamp")
        form = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "data": {"value": value}}
        return json.dumps(form).encode()

    def call(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
        """Returns the body of the answer. Raises OSError if there is none, or one that reports a failure."""
        if not self.connection:
            self.connection = http.client.HTTPSConnection(self.address, context=self.context, timeout=TIMEOUT_SECS)
        try:
            self.connection.request(method, self.path + path, body, {**self.headers, **(headers or {})})
            answer = self.connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            self.connection = None
            raise OSError(str(error)) from error
        if answer.status >= 300:
            raise OSError(f"{answer.status} {content[:300]!r}")
        return content


def random_name() -> str:
    return "load-" + "".join(random.choices(string.ascii_lowercase, k=8))


def measure(connect) -> int:
    prefix = random_name()
    apis = [connect() for _ in range(CLIENTS)]
    value = "".join(random.choices(string.ascii_letters, k=VALUE_BYTES))
    protobuf = {"Accept": "application/vnd.kubernetes.protobuf"}
    loads = {
        "creates": (OBJECTS, lambda api, i: api.create(f"{prefix}-{i}", value)),
        # Without a resource version: the API server reads the store, not its cache.
        "lists": (LISTS, lambda api, _: api.call("GET", "", headers=protobuf)),
        "updates": (OBJECTS, lambda api, i: api.replace(f"{prefix}-{i}", f"{i} {value}")),
    }
    for name, (total, operation) in loads.items():
        latencies: list[float] = []

        def client(number: int) -> None:
            for i in range(number, total, CLIENTS):
                before = time.perf_counter()
                operation(apis[number], i)
                latencies.append(time.perf_counter() - before)

        began = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(CLIENTS)))
        elapsed = time.perf_counter() - began
        latencies.sort()
        p50, p99 = (latencies[int(len(latencies) * part)] * 1000 for part in (0.5, 0.99))
        print(f"{name}\t{total / elapsed:.0f}/s\tp50 {p50:.1f} ms\tp99 {p99:.1f} ms", flush=True)
    return 0


class Writer:
    """Creates objects with the names NAME-0, NAME-1, ... and stores the number of the last one in the object NAME."""

    def __init__(self, api: Api, name: str) -> None:
        self.api, self.name = api, name
        self.created: set[str] = set()
        # The last value of the counter that was acknowledged, and the last that was sent.
        self.counted = self.sent = -1
        self.acknowledged = 0
        self.failures: list[str] = []
        self.pause = 0.0

    def run(self, stop: Path) -> None:
        self.attempt(self.api.create, self.name, "-1")
        number = 0
        last = time.monotonic()
        while not stop.exists():
            name = f"{self.name}-{number}"
            if self.attempt(self.api.create, name, name):
                self.created.add(name)
            self.sent = number
            if self.attempt(self.api.patch, self.name, str(number)):
                self.counted = number
                self.pause = max(self.pause, time.monotonic() - last)
                last = time.monotonic()
            number += 1

    def attempt(self, write, name: str, value: str) -> bool:
        try:
            write(name, value)
        except OSError as error:
            self.failures.append(str(error))
            time.sleep(0.1)
            return False
        self.acknowledged += 1
        return True

    def lost(self, found: dict[str, str]) -> list[str]:
        lost = [name for name in self.created if found.get(name) != name]
        if not self.counted <= int(found.get(self.name, -2)) <= self.sent:
            lost.append(f"{self.name}: {found.get(self.name)} instead of {self.counted} to {self.sent}")
        return lost


def write(connect, folder: Path) -> int:
    prefix = random_name()
    writers = [Writer(connect(), f"{prefix}-w{i}") for i in range(4)]
    threads = [threading.Thread(target=writer.run, args=[folder / "stop"]) for writer in writers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        report(folder / "acknowledged", sum(writer.acknowledged for writer in writers))
        time.sleep(0.1)
    items = json.loads(connect().call("GET", ""))["items"]
    found = {item["metadata"]["name"]: item.get("data", {}).get("value") for item in items}
    lost = [name for writer in writers for name in writer.lost(found)]
    failures = [failure for writer in writers for failure in writer.failures]
    for line in [*lost[:5], *sorted(set(failures))[:5]]:
        print(f"{line}")
    print(
        f"{sum(writer.acknowledged for writer in writers)} writes acknowledged, {len(lost)} lost, {len(failures)} failed, "
        f"longest pause of a client {max(writer.pause for writer in writers):.1f} s"
    )
    return 1 if lost else 0


def report(file: Path, number: int) -> None:
    """Replaces the file, so that a reader never sees a part of it."""
    new = file.with_suffix(".new")
    new.write_text(str(number))
    new.rename(file)


def main() -> int:
    mode, url, token, cafile, *rest = sys.argv[1:]

    def connect() -> Api:
        return Api(url, token, cafile)

    return measure(connect) if mode == "measure" else write(connect, Path(rest[0]))


sys.exit(main())
