"""A directory with its executors and L3, and what befalls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hicache.arena import ArenaLayout
from hicache.directory import Directory
from hicache.directory_config import DirectoryConfig
from hicache.jobs import FetchJob, Job, StoreJob
from hicache.keys import BlockKeys
from hicache.node import Entry, Keep, Tier
from hicache.policies.choice import policies_of
from hicache.policies.eviction import EvictionFactory
from hicache.policies.eviction_choice import lru
from hicache.policies.snapshot import SnapshotPolicy
from hicache.policies.write import WritePolicy, WriteThrough
from hicache.spec import CacheSpec, Group
from hicache.stats import DirectoryStats
from tests.core.checked_eviction import checked
from tests.core.checked_read import CheckedRead
from tests.core.eviction_invariants import pages_are_used_until_their_request_ends
from tests.core.invariants import ALWAYS, AT_REST, everything_is_in_l3_if_said_so, is_unwritten
from tests.core.live import PAGE, Live, stage_of
from tests.core.simulated_executor import Fault, SimulatedExecutor, no_fault


class System:
    """``config`` is that of Directory; slot counts are given for each group, or as one number for all of them.

    With ``arena`` the groups share L1, and ``l1`` is of no account. ``job_items_max`` bounds the jobs to and from L3,
    so that few pages already arrive in many pieces. ``lacks``: by rank, the groups that its stage has no layer of.

    ``reached`` counts what happens on the way, by name. ``check`` holds it against ``tests/core/invariants.py``.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        *,
        l1: int | tuple[int, ...],
        l2: int | tuple[int, ...] = 0,
        arena: ArenaLayout | None = None,
        job_items_max: int = 16,
        seconds_per_request: float = 0.0,
        policy: Callable[[], WritePolicy] = WriteThrough,
        eviction: EvictionFactory = lru,
        read_policy: str = "latency",
        snapshot_policy: SnapshotPolicy | None = None,
        lacks: tuple[frozenset[int], ...] = (),
        **config: object,
    ) -> None:
        self.spec = CacheSpec("m", "r", groups, page_tokens=PAGE)
        self.keys = BlockKeys(self.spec.namespace, page_tokens=PAGE)
        self.root = self.keys.root()
        l1_slots, l2_slots = (
            (slots,) * len(groups) if isinstance(slots, int) else slots[: len(groups)] for slots in (l1, l2)
        )
        settings = {"has_l3": any(l2_slots), "prefetch_threshold_tokens": 0} | config
        l1_slots = l1_slots if arena is None else arena.slot_counts
        self.config = DirectoryConfig(l1_slots, l2_slots, l1_arena=arena, **settings)  # type: ignore[arg-type]
        self.lives: list[DirectoryStats] = []  # one for each start
        self.policy = policy
        self.eviction = eviction
        self.read_policy = read_policy
        self.fetch_s = self.token_s = 0.0  # of one object, and of computing one token
        self.now_s = 0.0
        self.snapshot_policy = snapshot_policy or SnapshotPolicy(cap_per_path=None)
        self.job_items_max = job_items_max
        self.lacks = lacks
        self.reached: Counter[str] = Counter()
        self.begin()
        self.seconds_per_request = seconds_per_request
        self.checks = 0
        self.live: list[Live] = []
        self.truth: dict[bytes, tuple[int, ...]] = {}  # the tokens that a block key stands for
        self.is_l3_whole = True  # no object was lost on its way to L3 or in it
        self.has_failed = False  # anything, since the last start
        self.lost_in_l3: list[tuple[bytes, int]] = []  # (key, group) that were there once, as they went

    def begin(self) -> None:
        """An engine has started: nothing is in L1 and L2."""
        eviction, policy = policies_of(self.eviction, self.policy())
        self.directory = Directory(
            self.spec,
            self.config,
            write_policy=policy,
            eviction=checked(eviction),
            read_policy=lambda costs: CheckedRead(self.read_policy, costs),
            snapshot_policy=self.snapshot_policy,
        )
        self.lives.append(self.directory.stats)
        self.lost: Counter[str] = Counter()
        self._evict = self.directory.index._room._evict
        self.directory.index._room._evict = self.count_lost  # type: ignore[method-assign]
        self.prefetcher, self.writer = self.directory._prefetcher, self.directory._writer  # their budgets are checked
        self.prefetcher.fetches.job_items_max = self.job_items_max
        self.writer._limits = replace(self.writer._limits, job_items_max=self.job_items_max)
        self._send = self.writer._send
        self.writer._send = self.check_sent  # type: ignore[method-assign]
        self.executor = SimulatedExecutor(self.spec, self.directory, ranks=self.config.ranks, lacks=self.lacks)
        self.executor.take_time = self.take_time

    def take_time(self, job: Job) -> None:
        """L3 takes its time for each object."""
        if isinstance(job, FetchJob):
            self.now_s += self.fetch_s * len(job.items)
        self.directory.tell_time(self.now_s)

    def count_lost(self, entry: Entry) -> None:
        """An entry is evicted: tokens are lost with the last copy of an object that is not below."""
        is_last = entry.node.entries[1 - entry.tier][entry.group] is None
        if is_last and is_unwritten(self, entry):
            self.lost[f"{entry.tier.name.lower()}.{self.spec.groups[entry.group].name}"] += PAGE
        self._evict(entry)

    def check_sent(self, entries: Sequence[Entry]) -> None:
        """Copies go to L3: as far as is known, their pages can be reached there."""
        full = self.directory.index.rule.full_mask
        for node in {entry.node for entry in entries}:
            for page in filter(None, (node, node.parent)):
                assert (page.in_l3 | page.storing) & full == full, "a page goes to L3 that nobody can reach there"
        self._send(entries)

    def restart(self) -> None:
        """The engine dies and starts again: L3 keeps what has arrived, jobs under way have done nothing."""
        dead = self.executor
        self.reached["restart"] += 1
        self.is_l3_whole &= not dead.waiting_for(StoreJob)
        self.live.clear()
        self.has_failed = False
        self.begin()
        self.executor.l3, self.executor.once_in_l3 = dead.l3, dead.once_in_l3

    def page_keys(self, tokens: list[int]) -> list[bytes]:
        """Block keys of a sequence, noted with what they stand for."""
        keys = self.keys.chain(tokens, parent=self.root)
        for page, key in enumerate(keys):
            self.truth[key] = tuple(tokens[: (page + 1) * PAGE])
        return keys

    def snapshots_taken(self) -> int:
        objects = self.directory.stats.objects
        return sum(objects[f"{way}.ok"] for way in ("snapshot", "hand_over", "donate"))

    def fill_l3(self, tokens: list[int], *, without: frozenset[tuple[int, int]] = frozenset()) -> None:
        """Another engine has stored these pages, ``without`` some (page, group)."""
        for page, key in enumerate(self.page_keys(tokens)):
            for group in range(len(self.spec.groups)):
                if (page, group) not in without:
                    self.executor.put_l3(key, group, (self.truth[key], group))
        self.is_l3_whole &= not without

    def run(self, choice: int, fault: Fault = no_fault) -> None:
        """Do one of the waiting tasks, if there are any."""
        if self.executor.waiting:
            self.note_fault(fault)
            self.executor.run(choice % len(self.executor.waiting), fault)

    def run_all(self, fault: Fault = no_fault) -> None:
        self.note_fault(fault)
        self.executor.run_all(fault)

    def note_fault(self, fault: Fault) -> None:
        self.is_l3_whole &= fault is no_fault
        self.has_failed |= fault is not no_fault

    def forget_in_l3(self, choice: int) -> None:
        """L3 has evicted something."""
        if self.executor.l3:
            key, group, _ = sorted(self.executor.l3)[choice % len(self.executor.l3)]
            self.lose_in_l3(key, group)

    def lose_in_l3(self, key: bytes, group: int) -> None:
        self.executor.drop_l3(key, group)
        self.lost_in_l3.append((key, group))
        self.reached["l3.forgets"] += 1
        self.is_l3_whole = False

    def lose_rank(self, choice: int) -> None:
        """One of several ranks dies: with it, all that was found and not yet loaded."""
        if len(self.executor.left) > 1:
            rank = self.executor.left[1:][choice % (len(self.executor.left) - 1)]
            self.executor.collect()
            self.executor.lose_rank(rank)
            self.directory.lose_rank(rank, "killed")
            self.has_failed = True
            self.reached["rank.lost"] += 1
            self.executor.collect()
            self.is_l3_whole = False

    def release(self, live: Live) -> None:
        """At any moment of its life."""
        self.reached[f"release.{stage_of(live)}"] += 1
        if (prefetch := live.record.prefetch) is not None:
            self.reached["fetch.shared"] += len(prefetch.shared)
            self.reached["fetch.shared.missed"] += prefetch.has_missed
            others = self.keys_awaited()
            self.reached["release.awaited"] += any(prefetch.keys[page] in others for page, _ in prefetch.handles)
        self.directory.release(live.record)
        pages_are_used_until_their_request_ends(self, live.record)
        self.live.remove(live)
        self.executor.collect()

    def keys_awaited(self) -> set[bytes]:
        """Pages that one request's prefetch is fetching for another one too."""
        prefetches = (live.record.prefetch for live in self.live if live.record.prefetch is not None)
        return {prefetch.keys[page] for prefetch in prefetches for page, _ in prefetch.awaited}

    def flush(self) -> None:
        """Send down what the write policy has left, and wait for it. Without faults everything is then in L3."""
        self.directory.flush()
        self.run_all()
        everything_is_in_l3_if_said_so(self)
        self.reached["flush"] += 1

    # -- what must hold ----------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[Tier, int, Entry]]:
        """Every published copy."""
        for node in self.directory.index.nodes.values():
            for tier in Tier:
                for group, entry in enumerate(node.entries[tier]):
                    if entry is not None:
                        yield tier, group, entry

    def keeps(self) -> Iterator[Keep]:
        """Everything that requests keep from eviction."""
        for live in self.live:
            yield live.record.keep
            if live.record.prefetch is not None:
                yield from live.record.prefetch.keeps

    def check(self) -> None:
        """Everything that holds at every moment, and without jobs under way what holds only then."""
        self.checks += 1
        for holds in ALWAYS:
            holds(self)
        if not self.directory.open_jobs:
            for holds in AT_REST:
                holds(self)

    def wind_up(self) -> None:
        """End every request and job; afterwards nothing is held, and everything can be evicted."""
        for live in list(self.live):
            self.release(live)
        self.run_all()
        self.check()
        index, stats = self.directory.index, self.directory.stats
        assert self.directory.open_jobs == 0
        assert stats.prefetch_in_flight == 0
        for tier in Tier:
            for group, pool in enumerate(index.pools[tier]):
                handles = index.acquire(tier, group, pool.capacity)
                assert handles is not None, f"{pool.name}: slots are held that nobody uses"
                index.release(tier, group, handles)
        assert not index.nodes
