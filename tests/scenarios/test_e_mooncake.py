"""A Mooncake master that restarts and knows nothing, while daemons and engines are in the middle of reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hicache.backends.base import Backend, GetItem
from hicache.backends.mooncake_layout import HEADER_BYTES, object_name
from hicache.backends.ram_tier import SharedRamTier
from hicache.backends.shared_store import SharedStore
from hicache.backends.tenant_limits import StoreLimits
from hicache.client import DaemonL3
from hicache.daemon.config import DaemonConfig
from hicache.daemon.recovery import OpenedStore
from hicache.daemon.store_look import StoreLook
from hicache.outcome import Outcome
from tests.backends.fake_mooncake import MIB, Clock, FakeMooncake, open_fake
from tests.backends.payloads import get, get_many, key, payload, put
from tests.client.memory import SmallMemory
from tests.client.support import QUICK, SPEC
from tests.core.small_engine import PAGE, Make, prompt
from tests.daemon.rig import DaemonThread

SIZE = 9000
NUMBERS = range(4)


class Restart:
    """The master forgets everything right before the next call of one kind; then its nodes give segments out anew.

    ``written`` is what the old places hold by then, by number.
    """

    def __init__(self, fake: FakeMooncake, call: str, written: Callable[[dict[int, bytes]], dict[int, bytes]]) -> None:
        self._fake = fake
        self._call = call
        self._written = written
        fake.before = self

    def __call__(self, call: str) -> None:
        if call == self._call:
            self._fake.before = lambda call: None
            old = {number: self._fake.values.get(object_name(key(number)), b"") for number in NUMBERS}
            self._fake.values.clear()
            self._fake.values.update({object_name(key(n)): value for n, value in self._written(old).items()})


def nothing(old: dict[int, bytes]) -> dict[int, bytes]:
    return {}


def of_another_key(old: dict[int, bytes]) -> dict[int, bytes]:
    """Whole objects, each where another one was."""
    return {number: old[(number + 1) % len(old)] for number in old}


def half_overwritten(old: dict[int, bytes]) -> dict[int, bytes]:
    """The own header and beginning, and the end of another object."""
    middle = HEADER_BYTES + SIZE // 2
    return {number: old[number][:middle] + old[(number + 1) % len(old)][middle:] for number in old}


def zeroed(old: dict[int, bytes]) -> dict[int, bytes]:
    return {number: bytes(len(value)) for number, value in old.items()}


def of_an_earlier_life(old: dict[int, bytes]) -> dict[int, bytes]:
    """The same header over other bytes of the same length."""
    return {number: value[:HEADER_BYTES] + payload(99, SIZE) for number, value in old.items()}


@pytest.mark.parametrize("has_ram", [False, True], ids=["asked", "with a tier in memory"])
@pytest.mark.parametrize(
    ("written", "outcome"),
    [
        (nothing, Outcome.ABSENT),
        (of_another_key, Outcome.CORRUPT),
        (half_overwritten, Outcome.CORRUPT),
        (zeroed, Outcome.CORRUPT),
        (of_an_earlier_life, Outcome.CORRUPT),
    ],
)
def test_br_072_objects_of_before_a_restart_are_misses_and_can_be_stored_again(
    written: Callable[[dict[int, bytes]], dict[int, bytes]], outcome: Outcome, has_ram: bool
) -> None:
    fake = FakeMooncake()
    backend: Backend = open_fake(fake)
    if has_ram:
        backend = SharedRamTier(backend, capacity_bytes=MIB)  # type: ignore[arg-type]  # of a Mooncake backend
    store = SharedStore(backend, object_bytes_max=MIB)  # type: ignore[arg-type]
    objects = [(key(number), payload(number, SIZE)) for number in NUMBERS]
    assert put(backend, *objects) == [Outcome.OK] * 4
    outcomes, lease_id = store.lookup([name for name, _ in objects], lease_s=60.0)
    assert outcomes == [Outcome.OK] * 4
    Restart(fake, "get", written)
    targets = [bytearray(SIZE) for _ in objects]
    items = [GetItem(name, memoryview(target)) for (name, _), target in zip(objects, targets, strict=True)]
    assert store.get_into(items) == [outcome] * 4
    assert not store.renew(lease_id, lease_s=60.0), "a lease on what is gone is no promise"
    assert store.lookup([name for name, _ in objects])[0] == [Outcome.ABSENT] * 4
    assert put(backend, *objects) == [Outcome.OK] * 4
    for _ in range(3):
        assert get_many(backend, [(name, SIZE) for name, _ in objects]) == [(Outcome.OK, it) for _, it in objects]
    store.close()


def test_br_072_a_put_across_the_restart_is_not_said_to_be_stored_when_it_is_not() -> None:
    fake = FakeMooncake()
    backend = open_fake(fake)
    answered = 0

    def forget_after_the_put(call: str) -> None:
        nonlocal answered
        answered += call == "put"
        if call == "exist" and answered == 1:
            answered += 1
            fake.values.clear()

    fake.before = forget_after_the_put
    assert put(backend, (key(1), payload(1, SIZE))) == [Outcome.OK]
    assert get(backend, key(1), SIZE) == (Outcome.OK, payload(1, SIZE)), "the second try has stored it"
    backend.close()


def test_br_072_a_master_that_was_away_comes_back_as_another_store_without_a_restart_here() -> None:
    fake, clock = FakeMooncake(), Clock()
    backend = open_fake(fake, clock=clock)
    before = backend.store_id
    put(backend, (key(1), payload(1, SIZE)))
    fake.is_unreachable = True
    for _ in range(10):
        assert backend.find([key(1)]) == [Outcome.UNAVAILABLE]
    fake.values.clear()
    fake.is_unreachable = False
    clock.now_s += 60.0
    assert backend.find([key(1)]) == [Outcome.ABSENT]
    assert put(backend, (key(1), payload(1, SIZE))) == [Outcome.OK]
    assert get(backend, key(1), SIZE) == (Outcome.OK, payload(1, SIZE))
    assert backend.store_id != before
    backend.close()


class Rig:
    """hicached, in a thread, over a Mooncake store whose master a test restarts."""

    def __init__(self, folder: Path) -> None:
        self.fake = FakeMooncake()
        self.clock = Clock()
        self.daemon = DaemonThread(folder, self._open)

    def _open(self, config: DaemonConfig, limits: StoreLimits) -> OpenedStore:
        store = SharedStore(open_fake(self.fake, clock=self.clock), object_bytes_max=config.object_bytes_max)
        return OpenedStore(store, store.store_id, StoreLook.at(store))

    @property
    def address(self) -> str:
        return f"unix://{self.daemon.config.socket}"

    def store_id_of_a_new_client(self) -> bytes:
        memory = SmallMemory()
        client = DaemonL3(self.address, spec=SPEC, memory=memory, settings=QUICK)
        try:
            assert client.wait_ready(timeout_s=10)
            return client.status().store_id
        finally:
            client.close()
            memory.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        rig = Rig(Path(stack.enter_context(TemporaryDirectory(prefix="hic"))))
        stack.callback(rig.daemon.stop)
        yield rig


@pytest.mark.parametrize("call", ["exist", "get"])
def test_br_072_an_engine_in_the_middle_of_a_load_computes_what_the_restart_took(
    rig: Rig, make: Make, call: str
) -> None:
    writer = make(address=rig.address)
    assert writer.cache.l3 is not None
    assert writer.cache.l3.wait_ready(timeout_s=10)  # type: ignore[attr-defined]  # a client of hicached
    writer.serve(prompt(6))
    writer.settle()
    reader = make(address=rig.address)
    assert reader.cache.l3.wait_ready(timeout_s=10)  # type: ignore[attr-defined, union-attr]
    Restart(rig.fake, call, nothing)
    assert reader.serve(prompt(6)).by_source["l3"] == 0  # and what it computed is checked
    reader.settle()
    again = make(address=rig.address)
    assert again.cache.l3.wait_ready(timeout_s=10)  # type: ignore[attr-defined, union-attr]
    assert again.serve(prompt(6)).by_source["l3"] == 6 * PAGE


def test_br_072_clients_are_told_the_id_that_the_store_has_by_then(rig: Rig) -> None:
    before = rig.store_id_of_a_new_client()
    assert before == rig.store_id_of_a_new_client()
    rig.fake.is_unreachable = True
    storage = rig.daemon.daemon._storage
    assert storage is not None
    for _ in range(10):
        storage.store.lookup([key(1)])
    rig.fake.values.clear()
    rig.fake.is_unreachable = False
    rig.clock.now_s += 60.0
    assert storage.store.lookup([key(1)])[0] == [Outcome.ABSENT]
    storage.store.lookup([key(1)])
    assert rig.store_id_of_a_new_client() == storage.store.store_id != before
