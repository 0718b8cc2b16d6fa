"""Whatever the code has, the documentation lists, and the other way round; and no metric stands still for ever."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.daemon.calls import STATUS_OF
from hicache.daemon.config import FIELDS, DaemonConfig
from hicache.daemon.settings import size
from hicache.daemon.tenants import Tenant
from hicache.errors import BackendError
from hicache.outcome import Outcome
from hicache.wire.protocol import RefusalCode
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Attachment, Memory, MemoryRefused, object_key, payload_of
from tests.daemon.rig import http_get, scrape, wait_until

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "hicached.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
PAGE = 64 * 1024


def table(section: str, *, number: int = 0, text: str = TEXT) -> dict[str, list[str]]:
    """Rows of the ``number``-th table of a section by the word in their first column."""
    body = text.split(f"\n## {section}\n")[1].split("\n## ", maxsplit=1)[0]
    tables = re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in tables[number].splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_every_setting_is_documented_with_its_default() -> None:
    documented = table("Settings")
    assert list(documented) == list(FIELDS)
    defaults = DaemonConfig()
    for name, (default, _) in documented.items():
        value = getattr(defaults, name)
        shown = "" if default == "(none)" else default.strip("`")
        written = str(value).lower() if isinstance(value, bool) else str(value)  # as in TOML
        assert shown == written or ((name.endswith("_bytes") or "bytes" in name) and size(0)(name, shown) == value)


def test_every_refusal_is_documented_with_its_status() -> None:
    documented = table("Refusals")
    assert list(documented) == [code.value for code in RefusalCode]
    assert {code: row[0] for code, row in documented.items()} == {
        code.value: status.name for code, status in STATUS_OF.items()
    }


def test_every_outcome_is_documented() -> None:
    assert set(table("Refusals", number=1)) == {outcome.name for outcome in Outcome}


def test_every_route_is_documented(daemon: ThreadedDaemon) -> None:
    for route in table("HTTP"):
        assert http_get(daemon.ready.http, route)[0] == 200


def families(daemon: ThreadedDaemon) -> set[str]:
    """Names of all metrics as Prometheus users write them."""
    names = set()
    for metric in daemon.daemon.metrics.registry.collect():
        names.add(metric.name + "_total" if metric.type == "counter" else metric.name)
    return names


def test_every_metric_is_documented(daemon: ThreadedDaemon) -> None:
    assert families(daemon) == set(table("hicached", text=METRICS))


TOKENS = {"main": "token-of-main-12345", "small": "token-of-small-1234", "slow": "token-of-slow-12345"}
TENANTS = f"""
main  {TOKENS["main"]}
small {TOKENS["small"]}  quota_objects=1 ttl_s=0.001
slow  {TOKENS["slow"]}  calls_per_s_max=0.001
"""


def test_br_111_every_metric_moves(
    start_thread: Callable[..., ThreadedDaemon], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.backends.events.QUEUED_EVENTS_MAX", 1)
    (folder / "tenants").write_text(TENANTS)
    settings = {
        "capacity_bytes": "8MiB",
        "object_bytes_max": PAGE,
        "session_inflight_bytes_max": PAGE,
        "tenants_file": str(folder / "tenants"),
    }
    first = start_thread(**settings)
    samples = [scrape(first.ready.http)]
    with Client(first.target, token=TOKENS["main"]) as client:
        client.put_stream([object_key(9)], [b"x"])
    first.stop()
    daemon = start_thread(**settings)
    still = {"hicache_daemon_info", "hicache_store_capacity_bytes", "hicache_process_max_fds"}
    still |= {"hicache_process_start_time_seconds", "hicache_process_virtual_memory_bytes"}
    still |= {"hicache_tls_certificate_expiration_timestamp_seconds"}  # moves in tests/security/test_tls.py
    samples.append(scrape(daemon.ready.http))

    def look() -> None:
        samples.append(scrape(daemon.ready.http))

    with Client(daemon.target, token=TOKENS["main"]) as client, Memory(PAGE) as memory:
        region = client.attach(memory).region_id
        drive_calls(daemon, client, region, look)
        drive_refusals(daemon, client, memory)
        drive_the_store(daemon, client, region, look)
        drive_limits(daemon, client, look)
        look()
    daemon.daemon.metrics.ready.set(0)
    look()

    moved = {
        name.partition("{")[0]
        for before, after in itertools.pairwise(samples)
        for name, value in after.items()
        if before.get(name, 0.0) != value
    }
    moved |= {name.removesuffix("_count") for name in moved}
    assert set(table("hicached", text=METRICS)) - still - moved == set()


def drive_calls(daemon: ThreadedDaemon, client: Client, region: int, look: Callable[[], None]) -> None:
    keys = [object_key(number) for number in range(3)]
    assert client.put(region, keys, [0, 8, 16], [8] * 3) == [Outcome.OK] * 3
    assert client.put_stream([object_key(4)], [b"x"]) == [Outcome.OK]
    assert client.get_stream([object_key(4)], [1]) == [b"x"]
    _, lease = client.lookup(keys, lease_ms=60_000)
    look()
    assert client.lease(lease, lease_ms=0)
    stuck = daemon.backend.arm("get_into", Fault(FaultKind.LATE))
    waiting = [
        client.begin(client.get, region, keys, [0, 8, 16], [8] * 3) for _ in range(3)
    ]  # one more than there are threads
    assert daemon.daemon._storage is not None
    threads = daemon.daemon._storage.bulk.thread_count
    wait_until(lambda: daemon.metric("hicache_storage_busy_threads") == threads, what="all threads are stuck")
    wait_until(lambda: daemon.metric("hicache_storage_queued_chunks") > 0, what="a chunk waits")
    waiting.append(
        client.begin(client.get, region, [object_key(5)], [0], [PAGE])
    )  # all that a session may move at a time
    wait_until(lambda: daemon.metric("hicache_inflight_waiting") > 0, what="a transfer waits")
    look()
    stuck.release()
    for call in waiting:
        call.result()
    stuck = daemon.backend.arm("delete", Fault(FaultKind.LATE))
    deleting = client.begin(client.delete, keys)
    wait_until(lambda: daemon.store.stats().leaving.objects > 0, what="objects are being removed")
    look()
    stuck.release()
    deleting.result()


def drive_limits(daemon: ThreadedDaemon, client: Client, look: Callable[[], None]) -> None:
    client.put_stream([object_key(500)], [b"x"])
    assert client.pin([object_key(500)], pin_ms=60_000) == [Outcome.OK]
    told = daemon.store.watch(Tenant.named("main").digest, wake=lambda: None)
    for number in (501, 502, 503):
        client.put_stream([object_key(number)], [b"x"])
    look()
    daemon.store.unwatch(told)
    with Client(daemon.target, token=TOKENS["small"]) as small:
        for number in range(2):
            assert small.put_stream([object_key(number)], [b"x"]) == [Outcome.OK]
    wait_until(lambda: daemon.store.sweep() > 0, what="the last object of the small tenant has expired")
    with Client(daemon.target, token=TOKENS["slow"]) as slow:
        slow.present([object_key(1)])
        with pytest.raises(grpc.RpcError):
            slow.present([object_key(1)])
    look()


def drive_refusals(daemon: ThreadedDaemon, client: Client, memory: Memory) -> None:
    with pytest.raises(grpc.RpcError):
        Client(daemon.target, token="nobody")
    with pytest.raises(MemoryRefused):
        Attachment(client.welcome.memory_socket, b"?" * 32, [memory.fd], PAGE)
    assert http_get(daemon.ready.http, "/metrics", host="evil.example")[0] == 421


def drive_the_store(daemon: ThreadedDaemon, client: Client, region: int, look: Callable[[], None]) -> None:
    daemon.backend.arm("delete", Fault(FaultKind.EIO, times=1))
    for number in range(100, 400):
        client.put_stream([object_key(number)], [payload_of(number, PAGE)])
    daemon.backend.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1))
    assert client.get(region, [object_key(399)], [0], [PAGE]) == [Outcome.CORRUPT]

    def broken(_: object) -> list[Outcome]:
        raise BackendError("the medium is gone")

    daemon.backend.get_into = broken  # type: ignore[method-assign,assignment]  # a backend that is broken as a whole
    assert client.get(region, [object_key(398)], [0], [PAGE]) == [Outcome.IO_ERROR]
    del daemon.backend.get_into
    look()
