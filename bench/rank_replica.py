"""An engine of several ranks in real processes, led from this one: it computes patterns, and checks every byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.daemon_process import BenchError
from bench.rank_patterns import Slot, bytes_of_slots, compute, differing, seed_of
from bench.rank_process import RankProcess, WorkerSettings
from hicache.cache import HiCache
from hicache.outcome import Outcome
from hicache.policies.prefetch import PrefetchPolicy
from hicache.ranks.settings import Ranks
from hicache.ranks.worker import RankWorker
from hicache.sequence import Request, Restored
from hicache.spec import CacheSpec, PagedGroup

L3_TIMEOUT_S = 30.0
_OF_HICACHE_ALONE = ("prefetch", "write_policy", "salt", "snapshot_policy", "double_buffering", "layerwise")


class Replica:
    """Rank 0 and the leader here, every other rank in a process of its own; or, with ``leads_only``, all of them.
    ``settings`` are those of HiCache.open.

    ``of_rank`` gives a rank other settings than the rest, such as another ``l3``. Ranks connect to L3 in the
    background, so that it would be a miss at first: ``waits_for_l3`` waits until it answers every rank.
    """

    def __init__(
        self,
        spec: CacheSpec,
        ranks: Ranks,
        *,
        of_rank: dict[int, dict[str, Any]] | None = None,
        waits_for_l3: bool = True,
        leads_only: bool = False,
        **settings: Any,  # as different as the settings are
    ) -> None:
        self.spec = spec
        self._own_ranks = 0 if leads_only else 1
        own = {name: value for name, value in settings.items() if name not in _OF_HICACHE_ALONE}
        self.workers = [
            RankProcess(WorkerSettings(spec, rank, ranks, own | (of_rank or {}).get(rank, {}), is_led=True))
            for rank in range(self._own_ranks, spec.rank_count)
        ]
        try:
            patient = {"prefetch": PrefetchPolicy("wait_complete", threshold_tokens=0)}
            own_settings = (patient | settings) | (of_rank or {}).get(0, {})
            if leads_only:
                leading = {name: value for name, value in own_settings.items() if name in _OF_HICACHE_ALONE}
                self.cache = HiCache.lead(spec, ranks=ranks, **leading)
            else:
                self.cache = HiCache.open(spec, ranks=ranks, **own_settings)
            for worker in self.workers:
                worker.ready()
            if waits_for_l3 and own.get("l3") is not None:
                self.on_all(wait_for_l3)
        except BaseException:
            self.kill()
            raise

    def serve(self, tokens: Sequence[int], *, snapshot: bool = True) -> Restored:
        """A whole request: restored as far as possible, checked on every rank, computed, stored and released."""
        request, restored = self.restore(tokens)
        assert not self.differing(request, tokens, restored.tokens), "a rank holds bytes of something else"
        self.compute(request, tokens, restored.tokens, snapshot=snapshot)
        self.cache.release(request)
        return restored

    def restore(self, tokens: Sequence[int]) -> tuple[Request, Restored]:
        """Match, prefetch, wait and load."""
        request = self.cache.match(tokens)
        self.cache.prefetch(request)
        self.cache.wait(request)
        restored = self.cache.load(request, timeout_s=20)
        assert restored is not None, "L1 has no room"
        return request, restored

    def compute(self, request: Request, tokens: Sequence[int], start: int, *, snapshot: bool = True) -> None:
        """Page by page, each in a step of its own, from ``start`` to the last full page; each is stored."""
        page_tokens = self.spec.page_tokens
        for end in range(start + page_tokens, len(tokens) + 1, page_tokens):
            self.compute_pages(request, tokens, end - page_tokens, end)
            self.cache.store(request, computed=end, state_at=end if snapshot and self.spec.has_state else None)

    def compute_pages(self, request: Request, tokens: Sequence[int], start: int, end: int) -> None:
        """Tokens ``[start, end)``, whole pages, in one step; stored by the caller."""
        assert self.cache.extend(request, tokens=end, timeout_s=20), "L1 has no room"
        page_tokens = self.spec.page_tokens
        slots: list[Slot] = []
        for index, group in enumerate(self.spec.groups):
            if not isinstance(group, PagedGroup):
                slots.append(Slot(index, request.state_slot(index), seed_of(tokens[:end])))
                continue
            table = request.page_table(index)
            for page in range(start // page_tokens, end // page_tokens):
                slot = table[page]
                assert slot is not None, "what is computed has a page"
                slots.append(Slot(index, slot, seed_of(tokens[: (page + 1) * page_tokens])))
        self.step(slots)

    def step(self, slots: Sequence[Slot]) -> None:
        """Every rank computes these slots in one step."""
        step = self.cache.step()
        for worker in self.workers:
            worker.ask(compute_in_step, step, slots)
        if self._own_ranks:
            compute(self.cache.l1, slots)
        for worker in self.workers:
            worker.answer()

    def on_one(self, rank: int, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function on one rank, with its RankWorker or, for rank 0, the HiCache. Returns what it returns."""
        if rank < self._own_ranks:
            return function(self.cache, *arguments)
        worker = self.workers[rank - self._own_ranks]
        worker.ask(function, *arguments)
        return worker.answer()

    def on_all(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call a function on every rank at a time."""
        for worker in self.workers:
            worker.ask(function, *arguments)
        own = [function(self.cache, *arguments)] if self._own_ranks else []
        return [*own, *(worker.answer() for worker in self.workers)]

    def differing(self, request: Request, tokens: Sequence[int], restored: int) -> dict[int, list[Slot]]:
        """By rank, what does not hold what was computed for these tokens."""
        slots = self.restored_slots(request, tokens, restored)
        return {rank: wrong for rank, wrong in enumerate(self.on_all(differing_slots, slots)) if wrong}

    def restored_slots(self, request: Request, tokens: Sequence[int], restored: int) -> list[Slot]:
        """What a restored prefix is made of."""
        page_tokens = self.spec.page_tokens
        slots: list[Slot] = []
        for index, group in enumerate(self.spec.groups):
            if isinstance(group, PagedGroup):
                pages = enumerate(request.page_table(index)[: restored // page_tokens], start=1)
                slots += [
                    Slot(index, slot, seed_of(tokens[: page * page_tokens])) for page, slot in pages if slot is not None
                ]
            else:
                seed = seed_of(tokens[:restored]) if restored else 0
                slots.append(Slot(index, request.state_slot(index), seed))
        return slots

    def bytes_of(self, slots: Sequence[Slot]) -> int:
        """Bytes of slots on all ranks together."""
        return sum(self.on_all(bytes_of_own_slots, slots))

    def settle(self) -> None:
        """Wait until everything has been written down."""
        assert self.cache.flush(timeout_s=30), "something is still being written down"

    def close(self) -> None:
        """The leader first, then every process."""
        self.cache.close()
        for worker in self.workers:
            worker.end()

    def kill(self) -> None:
        """Every process but this one dies."""
        for worker in self.workers:
            worker.end()
        if hasattr(self, "cache"):
            self.cache.close()


def ranks_in(folder: Path, **settings: Any) -> Ranks:  # as different as the settings are
    """A meeting point in a folder."""
    return Ranks(f"unix://{folder}/ranks.sock", **settings)


def wait_for_l3(rank: HiCache | RankWorker) -> None:
    """Runs on every rank."""
    assert rank.l3 is not None
    until_s = time.monotonic() + L3_TIMEOUT_S
    while rank.l3.lookup([bytes(36)], timeout_s=1.0) != [Outcome.ABSENT]:
        if time.monotonic() > until_s:
            raise BenchError(f"L3 has not answered a rank within {L3_TIMEOUT_S:g} s")
        time.sleep(0.005)


def compute_in_step(worker: RankWorker, step: int, slots: Sequence[Slot]) -> None:
    """Runs in a worker."""
    with worker.step(step):
        compute(worker.l1, slots)


def differing_slots(rank: HiCache | RankWorker, slots: Sequence[Slot]) -> list[Slot]:
    """Runs on every rank."""
    return differing(rank.l1, slots)


def bytes_of_own_slots(rank: HiCache | RankWorker, slots: Sequence[Slot]) -> int:
    """Runs on every rank."""
    return bytes_of_slots(rank.l1, slots)
