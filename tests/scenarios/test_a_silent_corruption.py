"""Silent corruption: whatever fails, is shared or is oddly sized, a hit has the bytes of its own tokens."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from hicache.backends.faulty import Fault, FaultKind
from hicache.errors import HandleError
from hicache.keys import object_key as object_name
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy
from hicache.slots import SlotPool
from hicache.spec import PagedGroup
from hicache.tenancy import tenant_digest
from tests.core.small_engine import ATTENTION, PAGE, SmallEngine, prompt
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of

StartThread = Callable[..., ThreadedDaemon]
Connect = Callable[..., SmallEngine]

SENTINEL = 66


@pytest.fixture
def connect(daemon: ThreadedDaemon) -> Iterator[Connect]:
    """Engines on ``daemon``."""
    engines: list[SmallEngine] = []

    def engine(*groups: PagedGroup, **settings: object) -> SmallEngine:
        address = f"unix://{daemon.config.socket}"
        engines.append(SmallEngine(groups or (ATTENTION,), address=address, **settings))  # type: ignore[arg-type]
        assert engines[-1].cache.l3 is not None
        assert engines[-1].cache.l3.wait_ready(timeout_s=20)
        return engines[-1]

    yield engine
    for made in engines:
        made.close()


def fill_with_sentinel(engine: SmallEngine) -> None:
    """Another tenant's bytes lie in every slot of L1 and L2."""
    for pages in engine.cache.l1.paged.values():
        assert isinstance(pages, torch.Tensor)
        pages.fill_(SENTINEL)
    assert engine.cache.l2 is not None
    engine.cache.l2.buffer[:] = bytes([SENTINEL]) * engine.cache.l2.size_bytes


def fails_in_the_daemon(daemon: ThreadedDaemon, engine: SmallEngine, key: bytes) -> None:
    name = tenant_digest("default") + object_name(key, group=0, shard=0)
    daemon.backend.arm("get_into", Fault(FaultKind.EIO, keys=frozenset([name])))


def fails_in_the_copy(daemon: ThreadedDaemon, engine: SmallEngine, key: bytes) -> None:
    """Loads of anything fail: a copy is of a whole group."""
    executor = engine.cache._replica.executor
    assert executor is not None

    def failing(*_: object) -> None:
        raise OSError("a copy failed on purpose")

    executor._copies.load = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", get_args(PrefetchMode))
@pytest.mark.parametrize(("fails", "pages_max"), [(fails_in_the_daemon, 3), (fails_in_the_copy, 0), (None, 8)])
def test_br_001_a_page_that_fails_on_either_leg_ends_the_prefix_before_it_in_every_mode(
    daemon: ThreadedDaemon,
    connect: Connect,
    fails: Callable[[ThreadedDaemon, SmallEngine, bytes], None] | None,
    pages_max: int,
    mode: PrefetchMode,
) -> None:
    writer = connect()
    writer.serve(prompt(8))
    writer.settle()
    policy = PrefetchPolicy(mode, threshold_tokens=0, grace_s=10.0, base_s=10.0)
    reader = connect(prefetch=policy)
    fill_with_sentinel(reader)
    request = reader.cache.match(prompt(8))
    if fails is not None:
        fails(daemon, reader, request._record.keys[3])
    reader.cache.prefetch(request)
    reader.cache.wait(request)
    if mode == "best_effort":
        reader.settle()  # all that comes has come
    restored = reader.cache.load(request)
    assert restored is not None
    assert restored.tokens <= pages_max * PAGE
    assert mode == "best_effort" or restored.tokens == pages_max * PAGE
    reader.check(request, prompt(8), restored.tokens)
    reader.compute(request, prompt(8), restored.tokens)
    reader.check(request, prompt(8), 8 * PAGE)
    reader.cache.release(request)
    failed = {name: count for name, count in reader.cache.stats.objects.items() if name.endswith("io_error")}
    assert bool(failed) == (fails is not None)
    assert restored.by_source["computed"] == len(prompt(8)) - restored.tokens


def test_br_011_threads_that_take_and_give_back_slots_never_share_one(connect: Connect) -> None:
    engine = connect(l1=60, l2=40)
    errors: list[BaseException] = []

    def serve(thread: int) -> None:
        rng = random.Random(thread)
        try:
            for number in range(25):
                tokens = prompt(4, seed=1 + (rng.randrange(5) if number % 2 else 100 * thread + number))
                request = engine.cache.match(tokens)
                engine.cache.prefetch(request)
                engine.cache.wait(request)
                if rng.random() < 0.7:
                    restored = engine.cache.load(request)
                    assert restored is not None
                    engine.check(request, tokens, restored.tokens)
                    engine.compute(request, tokens, restored.tokens)
                    engine.check(request, tokens, 4 * PAGE)
                engine.cache.release(request)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    engine.settle()
    index = engine.cache._directory.index
    for tier in Tier:
        pool = index.pools[tier][0]
        handles = index.acquire(tier, 0, pool.capacity)
        assert handles is not None, "slots are held by nobody"
        index.release(tier, 0, handles)
        assert pool.free_count == pool.capacity


@pytest.mark.parametrize("way", ["memory", "stream"])
@pytest.mark.parametrize("direct", ["on", "off"])
def test_br_013_pages_of_no_round_size_all_come_back_past_the_page_cache(
    start_thread: StartThread, direct: str, way: str
) -> None:
    daemon = start_thread(backend="file", file_direct=direct, file_fsync=True)
    size, count = 3 * 4096 + 132, 105
    keys = [object_key(number) for number in range(count)]
    payloads = [payload_of(number, size) for number in range(count)]
    with Client(daemon.target) as client, Memory(2 * count * size) as memory:
        region = client.attach(memory).region_id
        sources = [number * size for number in range(count)]  # none of them aligned
        targets = [(count + number) * size for number in range(count)]
        memory.bytes[: count * size] = b"".join(payloads)
        if way == "memory":
            assert client.put(region, keys, sources, [size] * count) == [Outcome.OK] * count
        else:
            assert client.put_stream(keys, payloads) == [Outcome.OK] * count
        drop_from_the_page_cache(Path(daemon.config.path))
        if way == "memory":
            assert client.get(region, keys, targets, [size] * count) == [Outcome.OK] * count
            assert memory.bytes[count * size :] == b"".join(payloads)
        else:
            assert client.get_stream(keys, [size] * count) == payloads


def drop_from_the_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def test_br_015_sessions_that_come_back_from_l3_have_their_own_bytes(connect: Connect) -> None:
    """40 sessions, of which L2 holds ten; each page of each is compared with what its session computed."""
    engine = connect(l1=24, l2=80)
    rng = random.Random(15)
    sessions = [prompt(8, seed=number + 1) for number in range(40)]
    for tokens in sessions:
        engine.serve(tokens)
        engine.settle()
    for number in range(120):
        restored = engine.serve(rng.choice(sessions))
        assert restored.tokens == 8 * PAGE
        if number % 3 == 0:
            engine.serve(prompt(2, seed=1000 + number))
        engine.settle()
    served = engine.cache.stats.tokens_by_source
    assert served["l3"] > 50 * 8 * PAGE, "the control: most of them came from L3"


@pytest.mark.parametrize("handle", [0, 1, 7, -1, 1 << 32, -(1 << 32), (1 << 33) + 1, 2**40])
def test_br_011_a_handle_that_was_never_given_out_is_refused(handle: int) -> None:
    pool = SlotPool(2)
    with pytest.raises(HandleError):
        pool.release(handle)
    assert pool.free_count == 2
    assert len(pool.acquire(2) or []) == 2
