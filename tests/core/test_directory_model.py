"""The directory against a brute-force model, over many steps of everything that can happen to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hicache.directory import Directory, DirectoryConfig
from hicache.index import Tier
from hicache.jobs import CopyJob, CopyKind, Job
from hicache.keys import BlockKeys
from hicache.outcome import Outcome
from hicache.request import RequestRecord
from hicache.slots import slot_of
from hicache.spec import CacheSpec, Group, PagedGroup, StateField, StateGroup
from tests.core.simulated_executor import EMPTY, Fault, SimulatedExecutor

PAGE = 2
FULL = PagedGroup("attn", (0,), 1, 1, "float32")
LATENT = PagedGroup.mla("mla", layers=(4,), latent_dim=1, rope_dim=1, dtype="float32")
WINDOW = PagedGroup("swa", (1,), 1, 1, "float32", window_tokens=4)
STATE = StateGroup("gdn", (2,), (StateField("s", (1,), "float32"),))
CONV = StateGroup("conv", (3,), (StateField("c", (1,), "float32"),))

SPECS: list[tuple[Group, ...]] = [
    (FULL,),
    (FULL, LATENT),
    (FULL, WINDOW),
    (FULL, STATE),
    (WINDOW, STATE),
    (STATE,),
    (FULL, WINDOW, STATE, CONV),
]


def faults_of(bits: int) -> Fault:
    """The items whose bit is set fail."""

    def fault(job: Job, item: int) -> Outcome | None:
        return Outcome.IO_ERROR if bits >> item % 8 & 1 else None

    return fault


@dataclass(eq=False)
class Live:
    """A request and what the engine knows of it."""

    record: RequestRecord
    tokens: list[int]
    computed: int = 0
    writable: set[tuple[int, int]] = field(default_factory=set)


class DirectoryMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        groups=st.sampled_from(SPECS),
        l1=st.integers(2, 12),
        l2=st.integers(0, 8),
        has_l3=st.booleans(),
    )
    def start(self, groups: tuple[Group, ...], l1: int, l2: int, has_l3: bool) -> None:
        self.spec = CacheSpec("m", "r", groups, page_tokens=PAGE)
        self.keys = BlockKeys(self.spec.namespace, page_tokens=PAGE)
        self.root = self.keys.root()
        self.directory = Directory(
            self.spec,
            DirectoryConfig(
                tuple(l1 for _ in groups),
                tuple(l2 for _ in groups),
                has_l3=has_l3 and l2 > 0,
                prefetch_threshold_tokens=0,
            ),
        )
        self.executor = SimulatedExecutor(self.spec, self.directory)
        self.live: list[Live] = []
        self.truth: dict[bytes, tuple[int, ...]] = {}

    # -- what the engine does ----------------------------------------------------------------------------------------

    @rule(target=requests, tokens=st.lists(st.integers(0, 1), min_size=0, max_size=13))
    def open(self, tokens: list[int]) -> object:
        keys = self.keys.chain(tokens, parent=self.root)
        for page, key in enumerate(keys):
            self.truth[key] = tuple(tokens[: (page + 1) * PAGE])
        live = Live(self.directory.open(keys, token_count=len(tokens)), tokens)
        found = sum(live.record.local_tokens.values())
        assert found == PAGE * self.brute_force_usable(live.record)
        assert not tokens or found < len(tokens)
        self.live.append(live)
        return live

    @rule(live=requests)
    def prefetch(self, live: Live) -> None:
        if not live.record.is_loaded and not live.record.loading:
            self.directory.prefetch(live.record)
            self.executor.collect()

    @rule(live=requests)
    def load(self, live: Live) -> None:
        self.directory.load(live.record)
        self.executor.collect()

    @rule(live=requests, tokens=st.lists(st.integers(0, 1), max_size=3))
    def append(self, live: Live, tokens: list[int]) -> None:
        if not live.record.is_loaded:
            return
        before = len(live.record.keys)
        live.tokens = live.tokens + tokens
        keys = self.keys.chain(live.tokens, parent=self.root)
        for page, key in enumerate(keys):
            self.truth[key] = tuple(live.tokens[: (page + 1) * PAGE])
        self.directory.append(live.record, keys[before:], token_count=len(live.tokens))

    @rule(live=requests, pages=st.integers(0, 3), snapshot=st.booleans())
    def compute_and_store(self, live: Live, pages: int, snapshot: bool) -> None:
        record = live.record
        if not record.is_loaded:
            return
        live.computed = max(live.computed, record.loaded_pages * PAGE)
        target = min(live.computed + pages * PAGE, len(live.tokens) // PAGE * PAGE)
        if not self.directory.extend(record, tokens=target):
            return
        for page in range(live.computed // PAGE, target // PAGE):
            for group, table in enumerate(record.tables):
                if table:
                    self.executor.l1[group][slot_of(table[page])] = (self.truth[record.keys[page]], group)
        if target > live.computed:
            for group, handle in record.live.items():
                self.executor.l1[group][slot_of(handle)] = (tuple(live.tokens[:target]), group)
        live.computed = target
        state_at = target if snapshot and self.spec.has_state else None
        self.directory.store(record, computed=target, state_at=state_at, state_pending=0)
        self.executor.collect()
        # the engine goes on at once: a snapshot that is taken late must not see this
        if not any(isinstance(job, CopyJob) and job.kind is CopyKind.SNAPSHOT for job in self.executor.waiting):
            return
        while any(isinstance(job, CopyJob) and job.kind is CopyKind.SNAPSHOT for job in self.executor.waiting):
            position = next(
                i
                for i, job in enumerate(self.executor.waiting)
                if isinstance(job, CopyJob) and job.kind is CopyKind.SNAPSHOT
            )
            self.executor.run(position)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=4, max_size=13), snapshots=st.booleans(), faults=st.integers(0, 255)
    )
    def serve(self, tokens: list[int], snapshots: bool, faults: int) -> None:
        """A whole request, so that there is something to find for the others."""
        live = self.open(tokens)
        self.prefetch(live)
        self.executor.run_all(faults_of(faults & faults >> 3))
        for _ in range(4):
            self.load(live)
            self.executor.run_all(faults_of(faults & faults >> 1))
        for _ in range(len(tokens) // PAGE):
            self.compute_and_store(live, 1, snapshots)
        self.release(live)

    @rule(live=consumes(requests))
    def release(self, live: Live) -> None:
        self.directory.release(live.record)
        self.live.remove(live)

    # -- what the world does -----------------------------------------------------------------------------------------

    @rule(choice=st.integers(0, 100), faults=st.integers(0, 255))
    def run_a_job_with_faults(self, choice: int, faults: int) -> None:
        if self.executor.waiting:
            self.executor.run(choice % len(self.executor.waiting), faults_of(faults))

    @rule(choice=st.integers(0, 100))
    def run_a_job(self, choice: int) -> None:
        if self.executor.waiting:
            self.executor.run(choice % len(self.executor.waiting))

    @rule()
    def run_all_jobs(self) -> None:
        self.executor.run_all()

    @rule(choice=st.integers(0, 1000))
    def l3_forgets(self, choice: int) -> None:
        if self.executor.l3:
            del self.executor.l3[sorted(self.executor.l3)[choice % len(self.executor.l3)]]

    # -- what must hold ----------------------------------------------------------------------------------------------

    def brute_force_usable(self, record: RequestRecord) -> int:
        """Design section 6, word by word."""
        best = 0
        for n in range(1, record.prompt_pages + 1):
            if all(
                self.is_resident(record.keys[page], group)
                for group, reach in enumerate(self.spec.reach_pages)
                for page in range(0 if reach is None else max(0, n - reach), n)
            ):
                best = n
        return best

    def is_resident(self, key: bytes, group: int) -> bool:
        node = self.directory.index.nodes.get(key)
        return node is not None and bool(node.resident >> group & 1)

    @invariant()
    def published_bytes_are_right(self) -> None:
        memories = (self.executor.l1, self.executor.l2)
        for key, node in self.directory.index.nodes.items():
            for tier in Tier:
                for group, entry in enumerate(node.entries[tier]):
                    assert (entry is not None) == bool(node.masks[tier] >> group & 1)
                    if entry is not None:
                        assert memories[tier][group][slot_of(entry.handle)] == (self.truth[key], group)

    @invariant()
    def nothing_garbled_reached_l3(self) -> None:
        for (key, group), value in self.executor.l3.items():
            assert value == (self.truth[key], group)

    @invariant()
    def restored_prefixes_are_whole(self) -> None:
        for live in self.live:
            record = live.record
            if not record.is_loaded:
                continue
            computed = max(live.computed, record.loaded_pages * PAGE)
            assert record.loaded_pages <= record.prompt_pages
            for group, table in enumerate(record.tables):
                for page in range(min(len(table), computed // PAGE)):
                    if table[page] is None:
                        assert page < record.loaded_pages - self.spec.reach_pages[group]
                    else:
                        expected = (self.truth[record.keys[page]], group)
                        assert self.executor.l1[group][slot_of(table[page])] == expected
            for group, handle in record.live.items():
                expected = (tuple(live.tokens[:computed]), group) if computed else EMPTY
                assert self.executor.l1[group][slot_of(handle)] == expected

    @invariant()
    def no_child_is_stranded(self) -> None:
        full = self.directory.index.rule.full_mask
        for node in self.directory.index.nodes.values():
            if full and node.resident:
                assert node.resident & full == full
                assert node.parent is None or node.parent.resident & full == full

    @invariant()
    def prefetched_tokens_are_conserved(self) -> None:
        stats = self.directory.stats
        assert stats.prefetch_found == (
            stats.prefetch_used + sum(stats.prefetch_dropped.values()) + stats.prefetch_in_flight
        )

    def teardown(self) -> None:
        if not hasattr(self, "directory"):
            return
        for live in self.live:
            self.directory.release(live.record)
        self.executor.run_all()
        index, stats = self.directory.index, self.directory.stats
        assert self.directory.open_jobs == 0
        assert stats.prefetch_in_flight == 0
        for tier in Tier:
            for group, pool in enumerate(index.pools[tier]):
                entries = [n.entries[tier][group] for n in index.nodes.values() if n.entries[tier][group] is not None]
                assert pool.used_count == len(entries)
                assert all(entry.pins == 0 and pool.holders(entry.handle) == 1 for entry in entries)
        for node in index.nodes.values():
            assert not node.copying
            assert not node.storing
            assert node.children == {other for other in index.nodes.values() if other.parent is node}
            assert node.resident or node.children
        for tier in Tier:  # everything can be evicted again: nothing is lost for good
            for group, pool in enumerate(index.pools[tier]):
                handles = index.acquire(tier, group, pool.capacity)
                assert handles is not None
                index.release(tier, group, handles)
        assert not index.nodes


DirectoryMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestDirectoryMachine = DirectoryMachine.TestCase
