"""`hicache calibrate`: what loads take on this machine, through the path of engines, written as a preset."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hicache.costs.fit import robust_fit
from hicache.costs.machine import Machine, Tier
from hicache.errors import ConfigError
from hicache.executor import Executor
from hicache.jobs import Completion, CopyItem, CopyJob, CopyKind, FetchJob, Job, StoreJob, TransferItem
from hicache.keys import BlockKeys
from hicache.outcome import Outcome
from hicache.rank_memory import MemorySettings, RankMemory
from hicache.spec import CacheSpec, PagedGroup

PAGE_TOKENS = 16
PAGE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 5  # of each size; the middle one counts
JOB_TIMEOUT_S = 60.0
SPEC = CacheSpec("calibration", "1", (PagedGroup("attn", tuple(range(16)), 8, 128, "bfloat16"),), PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Measured:
    """One tier: the middle times, by bytes, and what they come to."""

    tier: Tier
    seconds: dict[int, float]
    error_share: float  # how far the worst of them is off the straight line

    def to_dict(self) -> dict[str, object]:
        """As JSON."""
        return {"tier": asdict(self.tier), "seconds": self.seconds, "error_share": self.error_share}


def calibrate(
    base: Machine, *, l3: str, token: str = "", device: str = "cpu", show: Callable[[str], None] = lambda line: None
) -> tuple[Machine, dict[str, Measured]]:
    """``base`` with the tiers of this machine, and what was measured: ``dram`` is L2 to L1, ``l3`` is L3 to L2 to L1.

    Stores 127 MiB of pages at ``l3``, which it drops when it needs room. Raises ConfigError when L3 is not there.
    """
    page_bytes = SPEC.object_bytes[0]
    settings = MemorySettings(
        l1_pages=PAGE_COUNTS[-1],
        l1_state_slots=0,
        l2_bytes=(PAGE_COUNTS[-1] + 1) * page_bytes,
        l2_state_share=0.0,
        l3=l3,
        l3_capacity_bytes=1 << 30,
        token=token,
        device=device,
    )
    memory = RankMemory.open(SPEC, settings, rank=0)
    bench = _Bench(memory)
    try:
        show("host memory")
        loads = _measured(bench.loads())
        show(l3)
        fetches = _measured(bench.fetches(l3))
    finally:
        bench.close()
    both = Tier(
        latency_s=fetches.tier.latency_s + loads.tier.latency_s,
        bytes_per_s=1 / (1 / fetches.tier.bytes_per_s + 1 / loads.tier.bytes_per_s),
        shared=True,
    )
    machine = replace(
        base,
        name=f"{base.name}-calibrated",
        tiers={"dram": loads.tier, "l3": both},
        source=f"tiers: hicache calibrate on {os.uname().nodename}, L3 {l3}; everything else: {base.name}",
    )
    return machine, {"dram": loads, "l3": fetches}


def write_machine(machine: Machine, path: str) -> None:
    """What ``hicache plan --machine`` and the replayer read."""
    Path(path).write_text(json.dumps(asdict(machine), indent=1) + "\n")


class _Bench:
    """Jobs, one at a time, as the directory would emit them."""

    def __init__(self, memory: RankMemory) -> None:
        assert memory.l2 is not None
        self._l2 = memory.l2
        self._next_id = 1
        self._done = threading.Event()
        self._outcomes: tuple[Outcome, ...] = ()
        self._executor = Executor(SPEC, memory.l1, memory.l2, memory.l3, on_complete=self._complete)
        self._keys = BlockKeys(SPEC.namespace, page_tokens=PAGE_TOKENS)

    def loads(self) -> Iterator[tuple[int, list[float]]]:
        """Bytes, and the times of copies of so many from L2 to L1."""
        for count in PAGE_COUNTS:
            items = tuple(CopyItem(0, slot, slot) for slot in range(count))
            yield (
                count * SPEC.object_bytes[0],
                [
                    self._seconds(lambda job_id, items=items: CopyJob(job_id, CopyKind.LOAD, items))  # type: ignore[misc]
                    for _ in range(ROUNDS + 1)
                ][1:],
            )

    def fetches(self, address: str) -> Iterator[tuple[int, list[float]]]:
        """The same from L3 to L2, of pages that were stored before. Raises ConfigError where they were not."""
        for count in PAGE_COUNTS:
            keys = self._keys.chain(list(os.urandom(count * PAGE_TOKENS)), parent=self._keys.root(salt=os.urandom(8)))
            items = tuple(TransferItem(0, key, slot) for slot, key in enumerate(keys))
            until_s = time.monotonic() + JOB_TIMEOUT_S / 10
            while not self._is_stored(items):
                if time.monotonic() > until_s:
                    raise ConfigError("l3", address, f"a store that takes pages; it says {self._outcomes[0].name}")
            yield (
                count * SPEC.object_bytes[0],
                [
                    self._seconds(lambda job_id, items=items: FetchJob(job_id, items))  # type: ignore[misc]
                    for _ in range(ROUNDS)
                ],
            )

    def close(self) -> None:
        """Give everything back."""
        if self._executor.close():
            self._l2.close()

    def _is_stored(self, items: tuple[TransferItem, ...]) -> bool:
        """A client that is still connecting answers at once that it cannot."""
        self._run(lambda job_id: StoreJob(job_id, items))
        if set(self._outcomes) <= {Outcome.OK, Outcome.EXISTS}:
            return True
        self._done.clear()
        self._done.wait(0.05)
        return False

    def _seconds(self, make: Callable[[int], Job]) -> float:
        start_s = time.perf_counter()
        self._run(make)
        seconds = time.perf_counter() - start_s
        if set(self._outcomes) != {Outcome.OK}:
            raise ConfigError("l3", self._outcomes[0].name, "a store that gives back what it has just taken")
        return seconds

    def _run(self, make: Callable[[int], Job]) -> None:
        self._done.clear()
        job_id, self._next_id = self._next_id, self._next_id + 1
        self._executor.submit(make(job_id))
        if not self._done.wait(JOB_TIMEOUT_S):
            raise ConfigError("l3", "no answer", f"a store that answers within {JOB_TIMEOUT_S:g} s")

    def _complete(self, completion: Completion) -> None:
        self._outcomes = completion.outcomes
        self._done.set()


def _measured(times: Iterator[tuple[int, Sequence[float]]]) -> Measured:
    """A latency and a bandwidth, by the fit that the read policy of an engine learns with, over all sizes at once."""
    seconds = {size_bytes: statistics.median(of_size) for size_bytes, of_size in times}
    fitted = robust_fit([((float(size_bytes), 1.0), taken_s) for size_bytes, taken_s in seconds.items()])
    byte_s, latency_s = fitted.tolist()
    if byte_s <= 0:  # nothing but latency within the noise: the largest load bounds it
        byte_s = min(taken_s / size_bytes for size_bytes, taken_s in seconds.items())
    tier = Tier(bytes_per_s=1 / byte_s, latency_s=latency_s)
    error = max(abs(tier.load_s(size_bytes) / taken_s - 1) for size_bytes, taken_s in seconds.items())
    return Measured(tier, seconds, error)
