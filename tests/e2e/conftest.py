"""A real hicached and caches of the tiny model on it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bench.demo.processes import Daemon
from bench.demo.worker import Tenant
from bench.tiny_engine import TinyEngine
from bench.tiny_hybrid import TinyConfig, TinyHybrid
from hicache import HiCache, PrefetchPolicy, SnapshotPolicy

MIB = 1024 * 1024
TENANTS = (
    Tenant("amber", "amber-token-0123456789", b"amber salt"),
    Tenant("birch", "birch-token-0123456789", b"birch salt"),
)

WAIT_S = 30.0

MakeEngine = Callable[..., TinyEngine]


def until(condition: Callable[[], bool]) -> None:
    """Returns when it holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition was not reached"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def model() -> TinyHybrid:
    torch.set_num_threads(1)
    return TinyHybrid(TinyConfig(), seed=5)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, TENANTS, 64 * MIB)
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture
def make_engine(model: TinyHybrid) -> Iterator[MakeEngine]:
    """Engines over caches that are closed when the test ends."""
    caches: list[HiCache] = []

    def make(
        l3: str | None, *, token: str = TENANTS[0].token, salt: bytes = TENANTS[0].salt, **settings: object
    ) -> TinyEngine:
        cache = HiCache.open(
            model.spec(),
            l1_pages=96,
            l1_state_slots=24,
            l2_bytes=16 * MIB,
            l3=l3,
            token=token,
            salt=salt,
            snapshot_policy=SnapshotPolicy(state_interval_tokens=64),
            **({"prefetch": PrefetchPolicy(mode="wait_complete", hard_cap_s=20.0, threshold_tokens=16)} | settings),
        )
        caches.append(cache)
        return TinyEngine(model, cache)

    yield make
    for cache in caches:
        cache.close()


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(512) for _ in range(130 + 10 * number)] for number in range(4)]
