"""Whatever happens to hicached, at every scrape nothing is missing and nothing is counted twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random

import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.outcome import Outcome
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import http_get, wait_until
from tests.observability.conservation import (
    Scrape,
    check_daemon,
    check_every_scrape_of,
    read_scrape,
    total,
)

KEYS = 60
PAGE = 64 * 1024
STEPS = 60
PASSING_FAULTS = (FaultKind.EIO, FaultKind.ENOSPC, FaultKind.WRONG_BYTES, FaultKind.SHORT)


def look(daemon: ThreadedDaemon) -> Scrape:
    status, text = http_get(daemon.ready.http, "/metrics")
    assert status == 200
    return read_scrape(text)


class Life:
    """One client that does whatever ``rng`` says, and dies now and then in the middle of it: what it thinks of that is
    of no account."""

    def __init__(self, daemon: ThreadedDaemon, rng: Random) -> None:
        self.daemon, self.rng = daemon, rng

    def run(self) -> None:
        steps = STEPS
        while (steps := steps - 1) > 0:
            with contextlib.suppress(Exception), Client(self.daemon.target) as client, Memory(4 * PAGE) as memory:
                region = client.attach(memory).region_id
                while (steps := steps - 1) > 0:
                    self.step(client, region)

    def step(self, client: Client, region: int) -> None:
        keys = [object_key(self.rng.randrange(KEYS)) for _ in range(self.rng.randrange(1, 5))]
        places = list(range(0, len(keys) * PAGE, PAGE))
        moves: list[Callable[[], object]] = [
            lambda: client.lookup(keys, lease_ms=self.rng.choice([0, 5])),
            lambda: client.put(region, keys, places, [PAGE] * len(keys)),
            lambda: client.get(region, keys, places, [PAGE] * len(keys)),
            lambda: client.get(region, keys, places, [PAGE] * len(keys), timeout_s=0.01),
            lambda: client.get(region, keys, [9 * PAGE] * len(keys), [PAGE] * len(keys)),
            lambda: client.put_stream(keys, [payload_of(1, PAGE)] * len(keys)),
            lambda: client.get_stream(keys, [PAGE - 1] * len(keys)),
            lambda: client.delete(keys),
            lambda: client.pin(keys, pin_ms=1),
            lambda: self.daemon.backend.arm(
                self.rng.choice(["get_into", "put", "delete"]), Fault(self.rng.choice(PASSING_FAULTS), times=1)
            ),
            lambda: self.break_off(client, keys),
        ]
        self.rng.choice(moves)()

    def break_off(self, client: Client, keys: list[bytes]) -> None:
        """Half of an upload, and then the connection, or all of the client, is gone."""
        bulk = client.bulk()
        bulk.begin_put(keys, [PAGE] * len(keys))
        bulk.close()
        if self.rng.random() < 0.3:
            client.channel.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_scrape_adds_up_under_faults_aborts_and_kills(
    seed: int, start_thread: Callable[..., ThreadedDaemon]
) -> None:
    daemon = start_thread(capacity_bytes="2MiB", object_bytes_max=PAGE, batch_bytes_max=8 * PAGE, ttl_s=60)
    rng = Random(seed)
    lives = [Life(daemon, Random(rng.random())).run for _ in range(3)]
    check_every_scrape_of(lives, look=lambda: look(daemon), check=check_daemon)
    daemon.backend.disarm()
    wait_until(lambda: total(look(daemon), "hicache_sessions") == 0, what="all clients are gone")
    wait_until(lambda: total(look(daemon), "hicache_items_active") == 0, what="all that they asked is answered")
    wait_until(lambda: total(look(daemon), "hicache_store_open_objects") == 0, what="the store rests")
    last = look(daemon)
    check_daemon(last)
    assert total(last, "hicache_store_leaving_objects") == 0
    assert total(last, "hicache_store_objects") == daemon.store.usage().objects, "the index is what the medium has"
    assert total(last, "hicache_store_removed_objects_total") > 0, "nothing happened"


def test_a_scrape_in_the_middle_of_everything_adds_up(daemon: ThreadedDaemon) -> None:
    stuck = {name: daemon.backend.arm(name, Fault(FaultKind.LATE)) for name in ("get_into", "put")}
    stuck["put"].release()
    with Client(daemon.target) as client, Memory(4 * PAGE) as memory:
        region = client.attach(memory).region_id
        keys = [object_key(1), object_key(2)]
        assert client.put(region, keys, [0, PAGE], [PAGE] * 2) == [Outcome.OK] * 2
        reading = client.begin(client.get, region, keys, [0, PAGE], [PAGE] * 2)
        assert stuck["get_into"].entered.wait(20)
        now = look(daemon)
        check_daemon(now)
        assert total(now, "hicache_store_open_objects", operation="get") == 2
        assert total(now, "hicache_items_active", method="Get") == 2
        assert total(now, "hicache_calls_active", method="Get") == 1
        stuck["get_into"].release()
        assert reading.result() == [Outcome.OK] * 2
        last = look(daemon)
        check_daemon(last)
        assert total(last, "hicache_store_finished_objects_total", operation="get", outcome="ok") == 2


def test_what_was_there_at_the_start_is_in_the_sum(start_thread: Callable[..., ThreadedDaemon]) -> None:
    first = start_thread()
    with Client(first.target) as client:
        client.put_stream([object_key(1), object_key(2)], [b"one", b"three"])
    first.stop()
    second = start_thread()
    now = look(second)
    check_daemon(now)
    assert total(now, "hicache_store_recovered_objects") == 2
    assert total(now, "hicache_store_recovered_bytes") == 8


def test_a_check_that_cannot_fail_is_none() -> None:
    good = """
hicache_calls_started_total{method="Get"} 3.0
hicache_calls_total{method="Get",result="ok"} 2.0
hicache_calls_active{method="Get"} 1.0
hicache_call_seconds_count{method="Get"} 2.0
"""
    check_daemon(read_scrape(good))
    for line in good.split("\n")[1:-1]:
        broken = good.replace(line, line.rpartition(" ")[0] + " 7.0")
        with pytest.raises(AssertionError):
            check_daemon(read_scrape(broken))
