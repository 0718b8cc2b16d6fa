"""L3 in the engine's own process: slow, broken and full backends are misses, and no call outlives its deadline."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from hicache.backends.base import GetItem, PutItem
from hicache.connect import open_l3
from hicache.embedded import EmbeddedL3, EmbeddedSettings
from hicache.errors import BackendError, ConfigError
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.tenancy import TENANT_BYTES, physical_key, tenant_digest
from tests.client.memory import SmallMemory
from tests.client.support import SPEC, Answer, get, key, payload, put, wait_until
from tests.client.test_contract import DictStore

SIZE = 5000


class SlowStore(DictStore):
    """Stands still in every get and put until ``release`` is set."""

    def __init__(self) -> None:
        super().__init__({})
        self.release = threading.Event()
        self.started = threading.Semaphore(0)

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        self.started.release()
        self.release.wait(30)
        return super().get_into(items)

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        self.started.release()
        self.release.wait(30)
        return super().put(items)


class SlowLookups(SlowStore):
    """Stands still in every lookup, too."""

    def lookup(self, keys: Sequence[bytes], *, lease_s: float = 0.0) -> tuple[list[Outcome], int]:
        self.started.release()
        self.release.wait(30)
        return super().lookup(keys, lease_s=lease_s)


class BrokenStore(DictStore):
    """Every call raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__({})
        self._error = error

    def lookup(self, keys: Sequence[bytes], *, lease_s: float = 0.0) -> tuple[list[Outcome], int]:
        raise self._error

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        raise self._error

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        raise self._error


def test_a_slow_medium_gives_the_caller_its_thread_and_keeps_the_bytes(memory: SmallMemory) -> None:
    store = SlowStore()
    l3 = EmbeddedL3(store, memory=memory)
    memory.buffer[:SIZE] = payload(1, SIZE)
    answer = Answer()
    started_s = time.monotonic()
    l3.put([L3Item(key(1), 0, SIZE)], timeout_s=0.1, done=answer)
    assert time.monotonic() - started_s < 2
    assert not answer.is_there, "the medium still reads the memory"
    store.release.set()
    assert answer.wait() == [Outcome.OK], "it was stored after all, and that is what is said"
    l3.close()


def test_a_transfer_that_waits_behind_slow_ones_is_given_up_at_its_deadline(memory: SmallMemory) -> None:
    store = SlowStore()
    l3 = EmbeddedL3(store, memory=memory, settings=EmbeddedSettings(io_threads=1))
    first, second = Answer(), Answer()
    l3.put([L3Item(key(1), 0, SIZE)], timeout_s=0.05, done=first)
    l3.put([L3Item(key(2), SIZE, SIZE)], timeout_s=0.05, done=second)
    assert second.wait() == [Outcome.DEADLINE]
    assert l3.lookup([key(1)], timeout_s=5) == [Outcome.ABSENT], "lookups do not wait for the bulk"
    store.release.set()
    assert first.wait() == [Outcome.OK]
    l3.close()
    assert list(store.objects) == [physical_key(tenant_digest("default"), key(1))]


def test_calls_above_the_bound_are_refused_at_once(memory: SmallMemory) -> None:
    store = SlowStore()
    l3 = EmbeddedL3(store, memory=memory, settings=EmbeddedSettings(io_threads=1, calls_max=2))
    running = [Answer(), Answer()]
    callers = [
        threading.Thread(
            target=l3.put, args=([L3Item(key(number), 0, SIZE)],), kwargs={"timeout_s": 30.0, "done": running[number]}
        )
        for number in range(2)
    ]
    for caller in callers:
        caller.start()
    assert store.started.acquire(timeout=10)
    outcomes: list[Outcome] = []
    while outcomes != [Outcome.UNAVAILABLE]:  # the second caller may still be on its way
        outcomes = l3.lookup([key(1)], timeout_s=5)
    store.release.set()
    for caller in callers:
        caller.join()
    assert [answer.wait() for answer in running] == [[Outcome.OK], [Outcome.OK]]
    l3.close()


@pytest.mark.parametrize(
    ("error", "outcome"), [(BackendError("gone"), Outcome.UNAVAILABLE), (OSError(5, "I/O"), Outcome.IO_ERROR)]
)
def test_a_broken_backend_is_a_miss_with_a_reason_and_never_an_exception(
    memory: SmallMemory, error: Exception, outcome: Outcome
) -> None:
    l3 = EmbeddedL3(BrokenStore(error), memory=memory)
    assert l3.lookup([key(1), key(2)], timeout_s=5) == [outcome] * 2
    assert put(l3, [L3Item(key(1), 0, SIZE)]) == [outcome]
    assert get(l3, [L3Item(key(1), 0, SIZE), L3Item(key(2), -1, SIZE)]) == [outcome, Outcome.BAD_RANGE]
    l3.close()


def test_close_cancels_what_waits_and_leaves_a_store_open_that_still_works(memory: SmallMemory) -> None:
    store = SlowStore()
    l3 = EmbeddedL3(store, memory=memory, settings=EmbeddedSettings(io_threads=1, close_timeout_s=0.1))
    running, waiting = Answer(), Answer()
    callers = []
    for number, answer in enumerate((running, waiting)):
        callers.append(
            threading.Thread(
                target=l3.put, args=([L3Item(key(number), 0, SIZE)],), kwargs={"timeout_s": 30.0, "done": answer}
            )
        )
        callers[-1].start()
        if number == 0:
            assert store.started.acquire(timeout=10)
    wait_until(lambda: l3.calls_running == 2)
    l3.close()
    assert waiting.wait() == [Outcome.CANCELLED]
    assert not store.is_closed
    assert not running.is_there
    store.release.set()
    assert running.wait() == [Outcome.OK]
    for caller in callers:
        caller.join()


def test_a_lookup_that_waits_when_the_l3_is_closed_is_cancelled(memory: SmallMemory) -> None:
    store = SlowLookups()
    l3 = EmbeddedL3(store, memory=memory, settings=EmbeddedSettings(close_timeout_s=0.1))
    outcomes: dict[int, list[Outcome]] = {}
    callers = []
    for number in range(2):
        callers.append(
            threading.Thread(
                target=lambda number=number: outcomes.update({number: l3.lookup([key(1), key(2)], timeout_s=30)})
            )
        )
        callers[-1].start()
        if number == 0:
            assert store.started.acquire(timeout=10)
    wait_until(lambda: l3.calls_running == 2)
    l3.close()
    callers[1].join(timeout=30)
    assert outcomes == {1: [Outcome.CANCELLED] * 2}
    store.release.set()
    callers[0].join(timeout=30)
    assert outcomes[0] == [Outcome.ABSENT] * 2


STUCK_AT_THE_END = """
import threading
from hicache.embedded import EmbeddedL3, EmbeddedSettings
from hicache.l3 import L3Item
from tests.client.memory import SmallMemory
class Stuck:
    def get_into(self, items): threading.Event().wait()
    def close(self): pass
l3 = EmbeddedL3(Stuck(), memory=SmallMemory(), settings=EmbeddedSettings(close_timeout_s=0.1))
l3.get([L3Item(b"k", 0, 10)], timeout_s=0.1, done=print)
l3.close()
print("the end")
"""


def test_a_stuck_medium_does_not_keep_the_process_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK_AT_THE_END], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (0, "the end\n"), ended.stderr


IN_A_CHILD = """
import os
from hicache.embedded import EmbeddedL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from tests.client.memory import SmallMemory
from tests.client.test_contract import DictStore
store = DictStore({})
l3 = EmbeddedL3(store, memory=SmallMemory())
l3._lock.acquire()  # as another thread may have it when the process forks
child = os.fork()
if child == 0:
    told = []
    l3.get([L3Item(b"k", 0, 10)], timeout_s=5, done=told.extend)
    l3.put([L3Item(b"k", 0, 10)], timeout_s=5, done=told.extend)
    told += l3.lookup([b"k"], timeout_s=5)
    l3.close()
    os._exit(0 if told == [Outcome.UNAVAILABLE] * 3 and not store.is_closed else 1)
print(os.waitpid(child, 0)[1])
l3._lock.release()
l3.close()
"""


def test_a_forked_child_has_no_l3_and_closes_nothing_of_its_parent() -> None:
    ended = subprocess.run([sys.executable, "-c", IN_A_CHILD], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


def test_tenants_of_one_store_do_not_see_each_other(memory: SmallMemory) -> None:
    store = DictStore({})
    alice, bob = (EmbeddedL3(store, memory=memory, tenant=name) for name in ("alice", "bob"))
    assert put(alice, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    assert bob.lookup([key(1)], timeout_s=5) == [Outcome.ABSENT]
    assert alice.lookup([key(1)], timeout_s=5) == [Outcome.OK]
    alice.close()
    bob.close()


def test_the_tenant_digest_is_what_it_always_was() -> None:
    assert tenant_digest("default").hex() == "5195d45d74cb61e3b6395dd6e3f683c3"
    assert len(physical_key(tenant_digest("default"), key(1))) == TENANT_BYTES + 36


def test_an_unknown_scheme_names_those_that_work(memory: SmallMemory) -> None:
    for address in ("redis://host", "hicached.sock", "", "unix://relative", "tcp://host", "tcp://host:99999"):
        with pytest.raises(ConfigError, match="l3"):
            open_l3(address, spec=SPEC, memory=memory)
    with pytest.raises(ConfigError, match=r"unix://.*tcp://.*lmdb://.*file://"):
        open_l3("redis://host", spec=SPEC, memory=memory)
    assert open_l3(None, spec=SPEC, memory=memory) is None


def test_a_token_for_a_backend_in_this_process_is_a_contradiction(memory: SmallMemory) -> None:
    with pytest.raises(ConfigError, match="token"):
        open_l3("lmdb:///nowhere", spec=SPEC, memory=memory, token="secret")


def test_choosing_l3_loads_neither_grpc_nor_torch_nor_lmdb_before_it_is_needed() -> None:
    script = (
        "import sys, hicache, hicache.connect, hicache.breaker, hicache.embedded;"
        "print([name for name in ('grpc', 'torch', 'lmdb', 'aiohttp') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[]", ended.stderr
