"""`python -m bench.engine --engine tiny`: is a prefix that L3 has ever slower to get than to compute?

The tiny model serves the same prompts through caches that differ in their read policy alone, over one store whose reads
are slowed down to a bandwidth. Each request is served by all of them before the next one; two of them have no L3, and
what these differ by is the noise of the machine.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.tiny_engine import Generated, TinyEngine
from bench.tiny_hybrid import TinyConfig, TinyHybrid
from hicache.cache import HiCache
from hicache.l3 import L3, Done, L3Item
from hicache.outcome import Outcome
from hicache.policies.prefetch import PrefetchPolicy
from hicache.policies.write import WriteThroughSelective
from hicache.rank_memory import MemorySettings, RankMemory
from hicache.spec import CacheSpec

MB = 1_000_000
POLICIES = ("latency", "always", "never", "never again")
BANDWIDTHS = (1 * MB, 2 * MB, 4 * MB, 8 * MB, 16 * MB, 64 * MB, 256 * MB, None)
QUICK_BANDWIDTHS = (1 * MB, 8 * MB, None)
LEARNING_REQUESTS = 3  # the first ones, which find out how fast the store is: told apart
WARM_UP_REQUESTS = 3  # nothing of them is in the store, as when engines profile themselves
TAIL_TOKENS = 40
CHUNK_TOKENS = 256
L1_PAGES = 160
L2_BYTES = 64 * MB
NOISE_ERRORS = 3.0  # standard errors of the median of what the two that never read differ by
NOISE_LEAST = 0.03
MAD_TO_SIGMA, MEDIAN_TO_MEAN = 1.4826, 1.2533  # of a normal distribution


class ThrottledL3:
    """Another L3 whose gets come one after another at ``bytes_per_s``; None: as fast as they come."""

    def __init__(self, inner: L3, bytes_per_s: float | None) -> None:
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._is_closed = threading.Event()

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        """See ``L3.lookup``."""
        return self._inner.lookup(keys, timeout_s=timeout_s)

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """See ``L3.get``. The bytes have come when the bandwidth has let them through."""
        if self._bytes_per_s is None:
            self._inner.get(items, timeout_s=timeout_s, done=done)
            return
        with self._lock:
            start_s = max(time.monotonic(), self._free_at_s)
            self._free_at_s = start_s + sum(item.size_bytes for item in items) / self._bytes_per_s
        if self._is_closed.wait(self._free_at_s - time.monotonic()):
            done([Outcome.CANCELLED] * len(items))
        else:
            self._inner.get(items, timeout_s=timeout_s, done=done)

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """See ``L3.put``."""
        self._inner.put(items, timeout_s=timeout_s, done=done)

    def close(self) -> None:
        """See ``L3.close``."""
        self._is_closed.set()
        self._inner.close()


@dataclass(frozen=True, slots=True)
class ThrottledRow:
    """One read policy at one bandwidth. ``of_recompute`` < 1: faster than to compute everything."""

    mb_per_s: float | None  # None: unthrottled
    policy: str
    ttft_ms: float  # median, once it has learnt
    of_recompute: float  # median over requests, each beside the same request in the same round
    mean_of_recompute: float  # of all times together
    worst_of_recompute: float  # of all requests, the first ones as well
    learning_of_recompute: float  # of the first requests
    noise: float  # what of_recompute may be above 1 by chance
    loaded_share: float  # of the tokens that L3 had
    is_slower: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts whose beginnings are in the store: of each, tokens ``[0, stored)``."""

    prompts: list[list[int]]
    stored_tokens: int
    stored_bytes: int


def run_throttled(
    folder: Path, *, quick: bool, show: Callable[[str], None], console: Console
) -> tuple[list[ThrottledRow], dict[str, object]]:
    """The rows of all bandwidths, printed, and what was served."""
    torch.set_num_threads(1)
    model = TinyHybrid(TinyConfig(kv_heads=4, head_dim=32), seed=5)  # 2.5 KiB a token: as costly to move as to compute
    workload = fill_store(model, folder, requests=9 if quick else 15, stored_tokens=512)
    rows: list[ThrottledRow] = []
    for bytes_per_s in QUICK_BANDWIDTHS if quick else BANDWIDTHS:
        show("unthrottled" if bytes_per_s is None else f"{bytes_per_s / MB:g} MB/s")
        rows += measure(model, workload, folder, bytes_per_s)
    print_throttled(rows, console)
    sizes = {"stored_tokens": workload.stored_tokens, "stored_bytes": workload.stored_bytes}
    return rows, {"requests": len(workload.prompts), **sizes}


def fill_store(model: TinyHybrid, folder: Path, *, requests: int, stored_tokens: int) -> Workload:
    """Another engine has served the beginnings, and has stored them."""
    rng = random.Random(0)
    prompts = [[rng.randrange(model.config.vocab) for _ in range(stored_tokens + TAIL_TOKENS)] for _ in range(requests)]
    with _cache(model.spec(), folder, None, "always", writes=True) as cache:
        engine = TinyEngine(model, cache, chunk_tokens=CHUNK_TOKENS)
        for prompt in prompts:
            engine.generate(prompt[:stored_tokens], 1)
        assert cache.flush(timeout_s=60.0), "the prompts are not all in the store"
        return Workload(prompts, stored_tokens, cache.stats.bytes_moved["store"] // requests)


def measure(model: TinyHybrid, workload: Workload, folder: Path, bytes_per_s: float | None) -> list[ThrottledRow]:
    """Each policy with a cache of its own that has seen nothing of the store."""
    served: dict[str, list[Generated]] = {policy: [] for policy in POLICIES}
    with contextlib.ExitStack() as stack:
        engines = {}
        for policy in POLICIES:
            cache = stack.enter_context(_cache(model.spec(), folder, bytes_per_s, policy.split()[0], writes=False))
            engines[policy] = TinyEngine(model, cache, chunk_tokens=CHUNK_TOKENS, tells_prefill=True)
            for token in range(WARM_UP_REQUESTS):
                engines[policy].generate([token] * (workload.stored_tokens // (token + 1)), 1)
        for number, prompt in enumerate(workload.prompts):
            for place in range(len(POLICIES)):  # in turns: who comes after a pause, or after whom, costs some per cent
                policy = POLICIES[(place + number) % len(POLICIES)]
                result = engines[policy].generate(prompt, 1)
                assert isinstance(result, Generated), "L1 has room for one request"
                served[policy].append(result)
    assert len({tuple(r.tokens for r in results) for results in served.values()}) == 1, "a wrong token"
    return [_row(policy, served, workload, bytes_per_s) for policy in POLICIES[:3]]


def _row(
    policy: str, served: dict[str, list[Generated]], workload: Workload, bytes_per_s: float | None
) -> ThrottledRow:
    times = {name: [result.ttft_s for result in results] for name, results in served.items()}
    first, own = times[policy][:LEARNING_REQUESTS], times[policy][LEARNING_REQUESTS:]
    base = times["never"][LEARNING_REQUESTS:]
    again = times["never again"][LEARNING_REQUESTS:]
    of_recompute = statistics.median(_ratios(own, base))
    control = [math.log(ratio) for ratio in _ratios(again, base)]
    deviation = MAD_TO_SIGMA * statistics.median(abs(value - statistics.median(control)) for value in control)
    noise = max(NOISE_LEAST, NOISE_ERRORS * MEDIAN_TO_MEAN * deviation / len(control) ** 0.5)
    loaded = sum(result.by_source.get("l3", 0) for result in served[policy][LEARNING_REQUESTS:])
    return ThrottledRow(
        mb_per_s=None if bytes_per_s is None else bytes_per_s / MB,
        policy=policy,
        ttft_ms=round(statistics.median(own) * 1e3, 1),
        mean_of_recompute=round(sum(own) / sum(base), 3),
        worst_of_recompute=round(max(_ratios(times[policy], times["never"])), 3),
        of_recompute=round(of_recompute, 3),
        learning_of_recompute=round(sum(first) / sum(times["never"][:LEARNING_REQUESTS]), 3),
        noise=round(noise, 3),
        loaded_share=round(loaded / (len(own) * workload.stored_tokens), 3),
        is_slower=of_recompute > 1 + noise,
    )


def _ratios(own: Sequence[float], base: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(own, base, strict=True)]


@contextlib.contextmanager
def _cache(
    spec: CacheSpec, folder: Path, bytes_per_s: float | None, read_policy: str, *, writes: bool
) -> Iterator[HiCache]:
    """L1 and L2 have room for a few requests; ``writes``: else nothing is ever written down. ``never`` has no L3."""
    settings = MemorySettings(
        l1_pages=L1_PAGES,
        l1_state_slots=8,
        l2_bytes=L2_BYTES,
        l2_state_share=0.25,
        l3=None if read_policy == "never" else f"file://{folder / 'store'}?shared=1",
        l3_capacity_bytes=1 << 30,
        token="",
        device="cpu",
    )
    memory = RankMemory.open(spec, settings, rank=0)
    with HiCache(
        spec,
        l1=memory.l1,
        l2=memory.l2,
        l3=None if memory.l3 is None else ThrottledL3(memory.l3, bytes_per_s),
        prefetch=PrefetchPolicy(mode="wait_complete"),
        write_policy="write_through" if writes else WriteThroughSelective(100),
        read_policy=read_policy,
    ) as cache:
        yield cache


def print_throttled(rows: Sequence[ThrottledRow], console: Console) -> None:
    """A line for each bandwidth and policy."""
    table = Table(
        "bandwidth",
        "read policy",
        "TTFT ms",
        "of recompute",
        "mean",
        "worst",
        "while learning",
        "noise",
        "loaded",
        "slower",
    )
    for row in rows:
        table.add_row(
            "unthrottled" if row.mb_per_s is None else f"{row.mb_per_s:g} MB/s",
            row.policy,
            f"{row.ttft_ms:.1f}",
            f"{row.of_recompute:.2f}",
            f"{row.mean_of_recompute:.2f}",
            f"{row.worst_of_recompute:.2f}",
            f"{row.learning_of_recompute:.2f}",
            f"{row.noise:.2f}",
            f"{row.loaded_share:.0%}",
            "yes" if row.is_slower else "no",
        )
    console.print(table)


def throttled_document(rows: Sequence[ThrottledRow], served: dict[str, object]) -> dict[str, object]:
    """As JSON."""
    return {"rows": [asdict(row) for row in rows], **served}
