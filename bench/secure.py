"""What TLS and encryption at rest cost, each beside the same without it: `python -m bench.secure`."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bench.certificates import Authority
from bench.daemon_process import TOKEN, DaemonProcess
from bench.limits import touched_memory
from hicache.backends.base import GetItem, PutItem
from hicache.backends.open import open_store
from hicache.client import DaemonL3
from hicache.client.tls import TlsFiles
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.spec import CacheSpec, PagedGroup
from hicache.tenancy import physical_key, tenant_digest

MIB = 1 << 20
BATCH_BYTES = 32 * MIB
BLOCK_BYTES = 512 * 1024  # as the bulk socket sends
SPEC = CacheSpec("tiny", "1", (PagedGroup("full", (0,), heads=1, head_dim=8, dtype="float32"),))

Way = Callable[[], float]  # seconds for BATCH_BYTES


@dataclass(frozen=True, slots=True)
class Row:
    """One way, in GB/s, and the median of its ratios to another way of the same repetition."""

    name: str
    median: float
    lowest: float
    highest: float
    of: str
    share: float


def compare(ways: dict[str, Way], *, repetitions: int, of: dict[str, str]) -> list[Row]:
    """Each way once in each repetition, one after another: what disturbs the machine disturbs all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):
        for name, way in ways.items():
            taken_s = way()
            if repetition:
                seconds[name].append(taken_s)
    rows = []
    for name, base in of.items():
        rates = [BATCH_BYTES / taken_s / 1e9 for taken_s in seconds[name]]
        shares = [other / own for own, other in zip(seconds[name], seconds[base], strict=True)]
        rows.append(Row(name, statistics.median(rates), min(rates), max(rates), base, statistics.median(shares)))
    return rows


def stores(folder: Path, size_bytes: int) -> Iterator[tuple[str, Way]]:
    """Put and get of both backends with and without encryption, by one caller in this process."""
    keys_file = folder / "masters"
    keys_file.write_text(f"bench {secrets.token_hex(32)}\n")
    keys_file.chmod(0o600)
    count = BATCH_BYTES // size_bytes
    keys = [physical_key(tenant_digest("bench"), b"%032d" % number) for number in range(count)]
    memory = memoryview(touched_memory(BATCH_BYTES))
    parts = [memory[number * size_bytes : (number + 1) * size_bytes] for number in range(count)]
    for scheme in ("lmdb", "file"):
        for kind, keys_setting in (("plain", ""), ("sealed", str(keys_file))):
            store = open_store(
                f"{scheme}://{folder}/{scheme}-{kind}-{size_bytes}",
                capacity_bytes=4 * BATCH_BYTES,
                object_bytes_max=size_bytes,
                free_space_floor_bytes=0,
                encryption_keys=keys_setting,
            )

            def put(store: object = store) -> float:
                store.delete(keys)  # type: ignore[attr-defined]  # bound early
                return timed(lambda: store.put([PutItem(*pair) for pair in zip(keys, parts, strict=True)]))  # type: ignore[attr-defined]

            def get(store: object = store) -> float:
                return timed(lambda: store.get_into([GetItem(*pair) for pair in zip(keys, parts, strict=True)]))  # type: ignore[attr-defined]

            yield f"{scheme} {kind} put", put
            yield f"{scheme} {kind} get", get


def links(folder: Path, size_bytes: int, stack: contextlib.ExitStack) -> Iterator[tuple[str, Way]]:
    """Put and get over loopback with and without TLS, and the raw sockets beside them."""
    ca = Authority(folder)
    server, client = ca.issue("server"), ca.issue("client")
    for kind in ("tcp", "tls"):
        tls = {"tls-certificate": str(server), "tls-key": str(server), "tls-client-ca": str(ca.file)}
        daemon = DaemonProcess(
            folder / f"{kind}-{size_bytes}",
            backend="lmdb",
            capacity_bytes=8 * BATCH_BYTES,
            settings=tls if kind == "tls" else {},
        )
        stack.callback(daemon.kill)
        daemon.start()
        address = daemon.address("tcp")
        if kind == "tls":
            address = address.replace("tcp://", "tls://") + f"?ca={ca.file}&certificate={client}"
        memory = Private(BATCH_BYTES)
        l3 = DaemonL3(address, spec=SPEC, memory=memory, token=TOKEN)
        stack.callback(l3.close)
        if not l3.wait_ready(timeout_s=30):
            raise SystemExit(f"no session: {l3.status()}")
        items = [
            L3Item(b"%036d" % number, number * size_bytes, size_bytes) for number in range(BATCH_BYTES // size_bytes)
        ]

        def put(l3: DaemonL3 = l3, items: list[L3Item] = items) -> float:
            l3.delete([item.key for item in items], timeout_s=30)
            return timed(lambda: done(l3.put, items))

        def get(l3: DaemonL3 = l3, items: list[L3Item] = items) -> float:
            return timed(lambda: done(l3.get, items))

        yield f"{kind} put", put
        yield f"{kind} get", get
        files = TlsFiles(str(ca.file), str(client), str(client))
        yield f"raw {kind}", stack.enter_context(raw_socket(server if kind == "tls" else None, ca, files))


@contextlib.contextmanager
def raw_socket(server: Path | None, ca: Authority, files: TlsFiles) -> Iterator[Way]:
    """One thread sends out of one buffer into that of another, over the loopback interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if server is not None:
        context.load_cert_chain(server)
        context.load_verify_locations(ca.file)
        context.verify_mode = ssl.CERT_REQUIRED
    source, target = memoryview(touched_memory(BATCH_BYTES)), memoryview(touched_memory(BATCH_BYTES))

    def serve() -> None:
        connection, _ = listener.accept()
        if server is not None:
            connection = context.wrap_socket(connection, server_side=True)
        with connection:
            while connection.recv(1):
                for start in range(0, BATCH_BYTES, BLOCK_BYTES):
                    connection.sendall(source[start : start + BLOCK_BYTES])

    serving = threading.Thread(target=serve)
    serving.start()
    connection = socket.create_connection(listener.getsockname())
    if server is not None:
        connection = files.wrap(connection, "127.0.0.1", timeout_s=10)

    def receive() -> None:
        connection.sendall(b"g")
        filled = 0
        while filled < BATCH_BYTES:
            filled += connection.recv_into(target[filled : filled + BLOCK_BYTES])

    try:
        yield lambda: timed(receive)
    finally:
        connection.close()
        serving.join()
        listener.close()


class Private:
    """Memory of an engine on another node: it has no descriptor."""

    fd = None

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.buffer = memoryview(touched_memory(size_bytes))


def done(call: Callable[..., None], items: list[L3Item]) -> list[Outcome]:
    """The outcomes of a transfer."""
    outcomes: list[Outcome] = []
    over = threading.Event()

    def note(got: list[Outcome]) -> None:
        outcomes.extend(got)
        over.set()

    call(items, timeout_s=30, done=note)
    over.wait()
    return outcomes


def timed(call: Callable[[], object]) -> float:
    """How long it took. What did not work is no measurement."""
    start_s = time.perf_counter()
    outcomes = call()
    taken_s = time.perf_counter() - start_s
    if isinstance(outcomes, list) and set(outcomes) != {Outcome.OK}:
        raise SystemExit(f"expected OK for all objects, not {set(outcomes)}")
    return taken_s


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write the figures as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="Few repetitions.")
@click.option("--object-mib", default=1, show_default=True, help="Size of an object.")
def main(json_path: str | None, quick: bool, object_mib: int) -> None:
    """Measure TLS against plain TCP and raw TLS, and encrypted stores against plain ones."""
    with tempfile.TemporaryDirectory(prefix="hsec-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ways = dict(stores(folder, object_mib * MIB)) | dict(links(folder, object_mib * MIB, stack))
        of = {name: name.replace("sealed", "plain") for name in ways if "sealed" in name}
        of |= {"raw tls": "raw tcp", "tls put": "tcp put", "tls get": "tcp get"}
        rows = compare(ways, repetitions=3 if quick else 15, of=of)
        rows += compare(
            {name: ways[name] for name in ("tls put", "tls get", "raw tls")},
            repetitions=3 if quick else 15,
            of={"tls put": "raw tls", "tls get": "raw tls"},
        )
    for row in rows:
        click.echo(
            f"{row.name:18} {row.median:6.2f} GB/s ({row.lowest:.2f} to {row.highest:.2f}), {row.share:.2f} of {row.of}"
        )
    if json_path:
        with click.open_file(json_path, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
