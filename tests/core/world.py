"""A directory, its executors, and engines that use it in any order."""

from __future__ import annotations

import math
from collections.abc import Callable

from hicache.arena import ArenaLayout
from hicache.errors import StateNotCommitted
from hicache.jobs import CopyKind
from hicache.policies.own import Continuation
from hicache.policies.write import (
    ByteBudget,
    DepthCut,
    TinyLfu,
    WriteBack,
    WritePolicy,
    WriteThrough,
    WriteThroughSelective,
)
from hicache.slots import slot_of
from hicache.spec import Group, PagedGroup, StateField, StateGroup
from tests.core.checked_read import declined_requests, declines_what_cannot_pay
from tests.core.eviction_invariants import (
    each_use_is_counted_once,
    uses_by_entry,
    what_is_idle_for_too_long_has_gone,
)
from tests.core.live import PAGE, Live
from tests.core.prefix_invariants import the_path_has_no_more_snapshots_than_the_cap, usable_pages
from tests.core.simulated_executor import Fault, no_fault
from tests.core.system import System

__all__ = ["CONV", "FULL", "LATENT", "MODELS", "PAGE", "POLICIES", "STATE", "WINDOW", "Live", "World", "shared"]

FULL = PagedGroup("attn", (0,), 1, 1, "float32")
LATENT = PagedGroup.mla("mla", layers=(4,), latent_dim=1, rope_dim=1, dtype="float32")
WINDOW = PagedGroup("swa", (1,), 1, 1, "float32", window_tokens=4)
STATE = StateGroup("gdn", (2,), (StateField("s", (1,), "float32"), StateField("ring", (2,), "float32", transient=True)))
CONV = StateGroup("conv", (3,), (StateField("c", (1,), "float32"),))

MODELS: list[tuple[Group, ...]] = [
    (FULL,),
    (FULL, LATENT),
    (FULL, WINDOW),
    (FULL, STATE),
    (WINDOW, STATE),
    (STATE,),
    (FULL, WINDOW, STATE, CONV),
]

POLICIES: dict[str, Callable[[], WritePolicy]] = {
    "write_through": WriteThrough,
    "write_through_selective": lambda: WriteThroughSelective(2, remembered_pages=64),
    "write_back": lambda: WriteBack(ahead_share=0.3),
}
WRITES: dict[str, Callable[[], WritePolicy]] = {
    **POLICIES,
    "tiny_lfu": lambda: TinyLfu(remembered_pages=64),
    "byte_budget": lambda: ByteBudget(bytes_per_s=1.0, burst_bytes=400.0),
    "depth_cut": lambda: DepthCut(depth_tokens=6 * PAGE),
    "continuation": lambda: Continuation(remembered_pages=100),
}


def shared(groups: tuple[Group, ...], *, units: int, slots_per_unit: tuple[int, ...]) -> ArenaLayout:
    """An arena of ``units`` units, each with so many slots of each group."""
    states = tuple(isinstance(group, StateGroup) for group in groups)
    return ArenaLayout(math.lcm(*range(1, 9)), units, slots_per_unit[: len(groups)], states)


class World(System):
    """A system with the engines that use it. Made as ``System`` is."""

    def open(self, tokens: list[int]) -> Live:
        self.now_s += self.seconds_per_request
        keys, uses = self.page_keys(tokens), uses_by_entry(self)
        record = self.directory.open(keys, token_count=len(tokens), now_s=self.now_s)
        self.executor.collect()
        each_use_is_counted_once(self, record, uses)
        what_is_idle_for_too_long_has_gone(self, uses)
        live = Live(record, tokens, found=record.keep)
        found = sum(record.local_tokens.values())
        assert found == PAGE * usable_pages(self, record.keys[: record.prompt_pages]), "not the longest usable prefix"
        assert not tokens or found < len(tokens)
        self.live.append(live)
        return live

    def prefetch(self, live: Live) -> None:
        stats = self.directory.stats
        found = stats.prefetch_dropped["faster_computed"] + stats.prefetch_declined["faster_computed"]
        assert not found or self.read_policy != "always", "it always pays to load"
        record = live.record
        is_first = record.prefetch is None and not record.is_loaded
        with declines_what_cannot_pay(self.prefetcher, record.keys[: record.prompt_pages] if is_first else ()):
            self.directory.prefetch(record)
        self.executor.collect()

    def load(self, live: Live, *, patient: bool = False) -> None:
        """Ask for the load; what it chooses is compared with what was usable when it did."""
        record = live.record
        was_loaded = record.is_loaded
        if not record.is_loaded and not record.loading:
            live.usable_at_load = usable_pages(self, record.keys[: record.prompt_pages], lost=frozenset(record.lost))
            live.is_cut_by_eviction = False
        evicted = sum(map(sum, self.directory.index.evicted))
        progress = self.directory.load(record, patient=patient)
        live.is_cut_by_eviction |= not was_loaded and sum(map(sum, self.directory.index.evicted)) > evicted
        self.executor.collect()
        self.reached[f"load.{progress.value}{'.patient' if patient else ''}"] += 1
        if self.directory.stats.ranks_lost and not was_loaded:
            assert not record.loaded_pages, "a page was restored that is not on every rank"

    def append(self, live: Live, tokens: list[int]) -> None:
        before = len(live.record.keys)
        live.tokens = live.tokens + tokens
        self.directory.append(live.record, self.page_keys(live.tokens)[before:], token_count=len(live.tokens))

    def next_stop(self, live: Live, *, pages: int, fault: Fault = no_fault) -> int | None:
        """Ask where to stop within ``pages`` further pages; with double buffering, the spare slots are emptied."""
        record = live.record
        live.computed = max(live.computed, record.loaded_pages * PAGE)
        until = live.computed + pages * PAGE
        stop = self.directory.next_state_stop(record, computed=live.computed, until=until)
        self.has_failed |= fault is not no_fault
        self.executor.run_kind(CopyKind.CLEAR, fault)
        if stop is not None:
            assert self.spec.has_state
            assert live.computed < stop <= until
            assert stop % PAGE == 0
        return stop

    def compute(
        self,
        live: Live,
        *,
        pages: int,
        snapshot: bool,
        donate: bool = False,
        moves: bool = True,
        fault: Fault = no_fault,
        patient: bool = False,
        is_told_late: bool = False,
    ) -> bool:
        """Compute up to ``pages`` further full pages and store them. False when not loaded, or L1 has no room.

        Without ``moves`` the step leaves the state in its source, and its updates in a ring; there is no snapshot then.
        Snapshots are copied in the order of compute itself, which goes on at once; the directory may hear of it late.
        """
        record = live.record
        if not record.is_loaded or record.donated:
            return False
        live.computed = max(live.computed, record.loaded_pages * PAGE)
        target = min(live.computed + pages * PAGE, len(live.tokens) // PAGE * PAGE)
        if not self.directory.extend(record, tokens=target, patient=patient):
            self.reached["extend.busy.patient" if patient else "extend.busy"] += 1
            self.executor.collect()
            return False
        if target == live.computed:
            moves = not record.sources
        for page in range(live.computed // PAGE, target // PAGE):
            for group, table in enumerate(record.tables):
                if table:
                    self.executor.compute(group, slot_of(table[page]), (self.truth[record.keys[page]], group))
        if self.token_s and target > live.computed:
            self.directory.costs.computed(live.computed, target, self.token_s * (target - live.computed))
        live.computed = target
        if moves and target > live.state_at(PAGE):
            for group, handle in record.live.items():
                self.executor.compute(group, slot_of(handle), (tuple(live.tokens[:target]), group))
            self.directory.state_moved(record)
            live.moved_to = target
        is_at = snapshot and self.spec.has_state and live.state_at(PAGE) == target
        donates = donate and is_at
        taken, are_all_told = self.snapshots_taken(), not self.executor.waiting_for(CopyKind.SNAPSHOT)
        self.directory.store(
            record, computed=target, state_at=target if is_at else None, state_pending=0, donate=donates
        )
        self.has_failed |= fault is not no_fault
        self.executor.move_bytes(CopyKind.SNAPSHOT, fault)
        if not is_told_late:
            self.executor.run_kind(CopyKind.SNAPSHOT)
        if are_all_told and self.snapshots_taken() > taken:
            the_path_has_no_more_snapshots_than_the_cap(self, record, target // PAGE)
        return True

    def store_uncommitted(self, live: Live) -> None:
        """Ask for snapshots of states that are none, in every way: each is refused, and nothing is published."""
        record = live.record
        if not record.is_loaded or record.donated:
            return
        at = live.computed = max(live.computed, record.loaded_pages * PAGE)
        before = {key: list(node.masks) for key, node in self.directory.index.nodes.items()}
        wrong = [(at, at, 1), (at, at + PAGE, 0)]
        if at:
            wrong += [(at - PAGE, at - PAGE, 0), (at, at - PAGE, 0)]
        if record.sources and record.sources_at != at:
            wrong.append((at, at, 0))
        for computed, state_at, pending in wrong:
            try:
                self.directory.store(record, computed=computed, state_at=state_at, state_pending=pending)
            except StateNotCommitted:
                continue
            raise AssertionError("a state was taken that is not committed at the boundary")
        assert {key: list(node.masks) for key, node in self.directory.index.nodes.items()} == before
        self.reached["refused"] += len(wrong)

    def hand_over(self, live: Live) -> None:
        """Begin to, or go on."""
        if live.record.is_loaded:
            if live.handover is None or not live.handover.is_under_way:
                live.losses_before, live.lookups_failed_before = len(self.lost_in_l3), self.executor.lookups_failed
                live.handover = self.directory.hand_over(live.record)
            live.handover.write()
            self.executor.collect()
            result = live.handover.result
            self.reached["handover.complete"] += bool(result.pages_in_l3) and result.is_complete

    def compute_to_stop(self, live: Live, *, pages: int, fault: Fault = no_fault) -> bool:
        """Compute up to ``pages`` further pages, or to where the policy wants a snapshot before that."""
        if not live.record.is_loaded or live.record.donated:
            return False
        stop = self.next_stop(live, pages=pages, fault=fault)
        if stop is not None:
            pages = (stop - live.computed) // PAGE
        return self.compute(live, pages=pages, snapshot=stop is not None, fault=fault)

    def serve(
        self, tokens: list[int], *, snapshot: bool = True, fault: Fault = no_fault, patient: bool = False
    ) -> Live:
        """A whole request, page by page; a patient one waits for copies. Returns what it was when it was over."""
        live = self.open(tokens)
        self.prefetch(live)
        self.run_all(fault)
        self.load_whole(live, fault, patient=patient)
        while live.computed < len(tokens) // PAGE * PAGE:
            if self.compute(live, pages=1, snapshot=snapshot, patient=patient):
                continue
            if not patient:
                break
            self.run_all(fault)
            if not self.compute(live, pages=1, snapshot=snapshot):
                break
        self.release(live)
        self.run_all(fault)
        return live

    def restore_stored(self, tokens: list[int]) -> None:
        """Another engine has stored a prompt, and a request for it takes its time: without faults it gets all.

        But for what came here for others in the meantime, which nobody keeps for it unless its plan goes further.
        """
        self.fill_l3(tokens)
        stats = self.directory.stats
        dropped = stats.prefetch_dropped.total() + declined_requests(stats)
        live = self.open(tokens)
        self.prefetch(live)
        self.run_all()
        self.load(live)
        self.run_all()
        is_cut = live.record.cut_reason != "not_usable"
        is_cut |= stats.prefetch_dropped.total() + declined_requests(stats) > dropped
        has_plan = live.record.prefetch is not None and live.record.prefetch.target_pages > 0
        is_cut |= live.is_cut_by_eviction and not has_plan
        if self.config.has_l3 and live.record.is_loaded and not is_cut and not self.directory.stats.ranks_lost:
            assert live.record.loaded_pages == live.record.prompt_pages, "L3 has all of it, and it was not brought"
            self.reached["restored.whole"] += 1

    def load_whole(self, live: Live, fault: Fault = no_fault, *, patient: bool = False) -> None:
        """Ask for the load until it is there, five times at most; the last time without patience."""
        for attempt in range(5):
            self.load(live, patient=patient and attempt < 4)
            self.run_all(fault)
            if live.record.is_loaded:
                return
