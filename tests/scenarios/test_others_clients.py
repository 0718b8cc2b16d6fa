"""What others met between a client and its daemon."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.client import DaemonL3
from hicache.keys import BlockKeys
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from tests.client.hicached import HicachedProcess
from tests.client.memory import SmallMemory
from tests.client.support import QUICK, SPEC, get, key, put, wait_until
from tests.daemon.client import DESCRIPTOR, Client
from tests.daemon.raw_links import object_key, payload_of
from tests.daemon.rig import ALICE, BOB, DaemonProcess, scrape
from tests.daemon.rig import wait_until as wait_for
from tests.engine.specs import paged_spec

Start = Callable[..., DaemonProcess]

SIZE = 5000
PAGE = 64 * 1024


@pytest.fixture
def memory() -> Iterator[SmallMemory]:
    memory = SmallMemory()
    yield memory
    memory.close()


def test_ot_040_an_engine_out_of_descriptors_computes_and_comes_back_when_it_has_some(
    folder: Path, memory: SmallMemory
) -> None:
    daemon, door = HicachedProcess(folder), folder / "door"  # which needs no descriptor to be opened
    door.symlink_to(folder)
    daemon.start()
    client = DaemonL3(f"unix://{door}/hicached.sock", spec=SPEC, memory=memory, settings=QUICK)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert client.wait_ready(timeout_s=30)
        items = [L3Item(key(number), number * SIZE, SIZE) for number in range(8)]
        assert put(client, items) == [Outcome.OK] * 8
        count = len(os.listdir("/proc/self/fd"))
        door.unlink()
        daemon.signal(signal.SIGKILL)
        wait_until(lambda: client.lookup([key(1)], timeout_s=1) == [Outcome.UNAVAILABLE], timeout_s=30)
        daemon.start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), before[1]))
        door.symlink_to(folder)
        wait_until(lambda: "Too many open files" in client.status().reason, timeout_s=30, what="an attempt to connect")
        assert client.status().reason.isprintable()
        assert client.lookup([key(1)], timeout_s=5) == [Outcome.UNAVAILABLE]
        assert not get(client, items, timeout_s=5)[0].is_ok
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        wait_until(lambda: client.lookup([key(1)], timeout_s=1) == [Outcome.OK], timeout_s=60)
        wait_until(lambda: get(client, items, timeout_s=5) == [Outcome.OK] * 8, timeout_s=60)
        client.close()
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= count)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        client.close()
        daemon.end()


def lowest_free_descriptor() -> int:
    """With so many as the limit, nothing can be opened, whichever others there are."""
    number = os.dup(0)
    os.close(number)
    return number


def test_ot_041_a_lease_is_ended_by_nobody_but_its_session_and_never_outlives_it(
    start: Start, two_tenants: str
) -> None:
    daemon = start(tenants_file=two_tenants)
    with Client(daemon.target, token=BOB) as bob:
        with Client(daemon.target, token=ALICE) as alice:
            assert alice.put_stream([object_key(1)], [payload_of(1, PAGE)]) == [Outcome.OK]
            _, lease = alice.lookup([object_key(1)], lease_ms=60_000)
            for number in range(lease + 3):
                assert not bob.lease(number, lease_ms=0)
                assert not bob.lease(number, lease_ms=60_000)
            assert alice.lease(lease, lease_ms=60_000)
            assert scrape(daemon.ready["http"])["hicache_store_leases"] == 1
        wait_for(lambda: scrape(daemon.ready["http"])["hicache_store_leases"] == 0, what="it ends with its session")


def test_ot_042_the_type_of_what_is_stored_is_in_its_key(start: Start) -> None:
    roots = set()
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        spec = paged_spec(dtype=dtype)
        roots.add(BlockKeys(spec.namespace, page_tokens=spec.page_tokens).root(salt=b"of a tenant"))
    assert len(roots) == 3
    daemon = start()
    with Client(daemon.target, descriptor=DESCRIPTOR | {"dtype": "bfloat16"}, deployment="d") as first:
        assert first.welcome.session_secret
        with pytest.raises(Exception, match=r"DEPLOYMENT_MISMATCH.*dtype"):
            Client(daemon.target, descriptor=DESCRIPTOR | {"dtype": "float8_e4m3fn"}, deployment="d")
