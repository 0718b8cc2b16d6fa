"""A small engine that owns its L1 slots: it hands them out, computes made-up bytes there, and checks what is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from hicache.policies.prefetch import PrefetchPolicy
from hicache.pools import L1Pool, L2Pool
from hicache.slot_cache import SlotCache, SlotRequest
from hicache.slot_request import SlotLoad
from hicache.spec import CacheSpec, Group, PagedGroup, StateGroup
from tests.client.support import wait_until
from tests.core.memory_l3 import MemoryL3, Objects
from tests.core.small_engine import HYBRID, PAGE, pattern

Table = dict[int, dict[int, int]]  # group -> page -> slot


def hashes(tokens: Sequence[int]) -> list[bytes]:
    """The engine's own chained hashes of the full pages."""
    chain, parent = [], b""
    for end in range(PAGE, len(tokens) + 1, PAGE):
        parent = blake2b(parent + repr(list(tokens[end - PAGE : end])).encode(), digest_size=16).digest()
        chain.append(parent)
    return chain


class SlotEngine:
    """One engine process. ``objects`` is what its L3 shares with other engines."""

    def __init__(
        self,
        groups: tuple[Group, ...] = HYBRID,
        *,
        l1: int = 64,
        l2: int = 32,
        objects: Objects | None = None,
        prefetch: PrefetchPolicy | None = None,
        **settings: object,
    ) -> None:
        self.spec = CacheSpec("m", "r", groups, page_tokens=PAGE)
        self.l1 = L1Pool(self.spec, pages=l1, state_slots=l1)
        self.l2 = L2Pool(self.spec, [l2] * len(groups))
        self.l3 = None if objects is None else MemoryL3(self.l2, objects)
        self.cache = SlotCache(
            self.spec,
            l1=self.l1,
            l2=self.l2,
            l3=self.l3,
            prefetch=prefetch or PrefetchPolicy("wait_complete", threshold_tokens=0),
            **settings,  # type: ignore[arg-type]
        )
        self.free = {group: list(range(l1)) for group in range(len(groups))}

    def table(self, first: int, stop: int, *, states: Sequence[int] = ()) -> Table:
        """Free slots for pages ``[first, stop)`` of paged groups, and for states at the end of these pages."""
        return {
            index: {
                page: self.free[index].pop(0)
                for page in (states if isinstance(group, StateGroup) else range(first, stop))
            }
            for index, group in enumerate(self.spec.groups)
        }

    def give_back(self, table: Table) -> None:
        for group, by_page in table.items():
            self.free[group] += by_page.values()

    def compute(self, tokens: Sequence[int], table: Table) -> None:
        """What the model writes to these slots."""
        for index, by_page in table.items():
            group = self.spec.groups[index]
            for page, slot in by_page.items():
                prefix = tokens[: (page + 1) * PAGE]
                if isinstance(group, PagedGroup):
                    target = self.l1.paged[index][:, slot]
                    target.copy_(pattern(prefix, group.name, target.shape))
                else:
                    for name, field in self.l1.state[index].items():
                        field[:, slot].copy_(pattern(prefix, f"{group.name}.{name}", field[:, slot].shape))

    def check(self, tokens: Sequence[int], table: Table) -> None:
        """These slots hold, byte for byte, what was computed for the tokens, and nothing transient."""
        for index, by_page in table.items():
            group = self.spec.groups[index]
            for page, slot in by_page.items():
                prefix = tokens[: (page + 1) * PAGE]
                if isinstance(group, PagedGroup):
                    held = self.l1.paged[index][:, slot]
                    assert torch.equal(held, pattern(prefix, group.name, held.shape))
                    continue
                for field in group.fields:
                    held = self.l1.state[index][field.name][:, slot]
                    expected = pattern(prefix, f"{group.name}.{field.name}", held.shape)
                    assert not held.any() if field.transient else torch.equal(held, expected)

    def needed(self, table: Table, own: int, pages: int) -> Table:
        """The part of a table that a load of ``pages`` pages beyond ``own`` writes to."""
        reaches = self.spec.reach_pages
        return {
            group: {page: slot for page, slot in by_page.items() if page >= max(own, pages - (reaches[group] or pages))}
            for group, by_page in table.items()
        }

    def open(self, tokens: Sequence[int], **identity: object) -> SlotRequest:
        return self.cache.open(hashes(tokens), token_count=len(tokens), **identity)  # type: ignore[arg-type]

    def wait(self, request: SlotRequest) -> None:
        wait_until(lambda: self.cache.is_ready(request), timeout_s=20, what="the prefetch")

    def load(self, request: SlotRequest, *, own: int, tokens: int, table: Table) -> SlotLoad:
        load = self.cache.load(request, beyond=own * PAGE, tokens=tokens, slots=table)
        wait_until(lambda: load.done, timeout_s=20, what="the load")
        return load

    def save(self, request: SlotRequest, table: Table) -> None:
        save = self.cache.save(request, table)
        wait_until(lambda: save.done, timeout_s=20, what="the save")

    def store(self, tokens: Sequence[int], *, states: Sequence[int] | None = None, **identity: object) -> None:
        """A request that finds nothing: computes and saves everything, with a state at the end of each page."""
        pages = len(tokens) // PAGE
        request = self.open(tokens, **identity)
        table = self.table(0, pages, states=range(pages) if states is None else states)
        self.compute(tokens, table)
        self.cache.save(request, table)
        self.settle()
        self.give_back(table)
        self.cache.release(request)

    def restore(self, tokens: Sequence[int], *, own: int = 0, **identity: object) -> int:
        """Tokens that a request restores, beyond ``own`` pages; every byte of them is checked."""
        request = self.open(tokens, **identity)
        self.cache.prefetch(request, beyond=own * PAGE)
        self.wait(request)
        usable = self.cache.usable(request, beyond=own * PAGE)
        if usable > own * PAGE:
            pages = usable // PAGE
            table = self.table(own, pages, states=[pages - 1])
            load = self.load(request, own=own, tokens=usable, table=table)
            assert not load.failed
            self.check(tokens, self.needed(table, own, pages))
            self.give_back(table)
        self.cache.release(request)
        return usable

    def settle(self) -> None:
        assert self.cache.flush(timeout_s=20)

    def close(self) -> None:
        self.cache.close()


def assert_nothing_leaked(engine: SlotEngine) -> None:
    """With no request alive: nobody holds a slot of L2, no budget is taken, and no slot of the engine is busy."""
    engine.settle()
    directory = engine.cache._directory
    assert not engine.cache.busy_slots()
    assert directory.stats.prefetch_in_flight == 0
    assert not any(directory._prefetcher.fetches.held)
    for group, pool in enumerate(directory.index.pools[1]):
        handles = directory.index.acquire(1, group, pool.capacity)  # type: ignore[arg-type]
        assert handles is not None, "slots of L2 are held by nobody"
        directory.index.release(1, group, handles)  # type: ignore[arg-type]
    assert not directory.index.nodes
