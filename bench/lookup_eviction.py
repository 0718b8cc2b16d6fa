"""What an eviction policy costs the directory for each page that it keeps, uses, and gives up."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from hicache.directory import Directory
from hicache.directory_config import DirectoryConfig
from hicache.jobs import Completion
from hicache.outcome import Outcome
from hicache.policies.eviction_choice import EVICTION_POLICIES
from hicache.spec import CacheSpec, PagedGroup

PROMPT_PAGES = 64
SHARED_PAGES = 16
_FULL = PagedGroup("full", (0,), heads=1, head_dim=8, dtype="float32")
_SPEC = CacheSpec("bench", "1", (_FULL,), page_tokens=1)


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """Microseconds a page, of the fastest of all rounds. ``of_lru``: their sum, beside that of ``lru``."""

    policy: str
    resident_pages: int
    new_us: float  # opened, extended, stored, released, and one evicted for it
    hit_us: float  # opened, loaded and released
    of_lru: float


def measure_evictions(resident_pages: int, *, rounds: int = 7, requests: int = 60) -> list[EvictionRow]:
    """Each policy in a full L1, in turns, so that what disturbs the machine disturbs all of them."""
    lives = {name: _Life(name, resident_pages) for name in EVICTION_POLICIES}
    best: dict[str, list[float]] = {name: [float("inf"), float("inf")] for name in lives}
    for _ in range(rounds):
        for name, life in lives.items():
            best[name] = list(map(min, best[name], (life.timed(life.new, requests), life.timed(life.hit, requests))))
    lru = sum(best["lru"])
    return [
        EvictionRow(name, resident_pages, round(new, 3), round(hit, 3), round((new + hit) / lru, 2))
        for name, (new, hit) in best.items()
    ]


class _Life:
    """A directory that is full, and prompts that share beginnings."""

    def __init__(self, policy: str, resident_pages: int) -> None:
        config = DirectoryConfig((resident_pages,), (0,))
        self._directory = Directory(_SPEC, config, eviction=EVICTION_POLICIES[policy])
        self._random = random.Random(7)
        self._number = 0
        self._now_s = 0.0
        self._last: list[list[bytes]] = []
        for _ in range(2 * resident_pages // (PROMPT_PAGES - SHARED_PAGES)):
            self.serve(self.new())

    def timed(self, prompt: Callable[[], list[bytes]], requests: int) -> float:
        """Microseconds a page."""
        prompts = [prompt() for _ in range(requests)]
        started_s = time.perf_counter()
        for keys in prompts:
            self.serve(keys)
        return (time.perf_counter() - started_s) / (requests * PROMPT_PAGES) * 1e6

    def new(self) -> list[bytes]:
        """A prompt of which the beginning may be known."""
        self._number += 1
        shared = self._random.randrange(4)
        keys = [hashlib.blake2b(b"%d %d" % (shared, page), digest_size=32).digest() for page in range(SHARED_PAGES)]
        tail = random.Random(self._number)
        keys += [tail.randbytes(32) for _ in range(PROMPT_PAGES - SHARED_PAGES)]
        self._last = [*self._last[-7:], keys]
        return keys

    def hit(self) -> list[bytes]:
        """One of the last prompts once more."""
        return self._random.choice(self._last)

    def serve(self, keys: list[bytes]) -> None:
        directory = self._directory
        self._now_s += 1.0
        record = directory.open(list(keys), token_count=len(keys) + 1, now_s=self._now_s)
        directory.load(record)
        for job in directory.take_jobs():
            directory.complete(Completion(job.job_id, (Outcome.OK,) * len(job.items)))
        assert directory.extend(record, tokens=len(keys)), "L1 has room for many prompts"
        directory.store(record, computed=len(keys), state_at=None, state_pending=0)
        directory.release(record)
