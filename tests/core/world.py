"""A directory, its executors, and engines that use it in any order, with everything that must hold at every moment."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hicache.arena import ArenaLayout
from hicache.arena_room import ArenaRoom
from hicache.directory import Directory, DirectoryConfig
from hicache.handover import Handover
from hicache.jobs import CopyKind, StoreJob
from hicache.keys import BlockKeys
from hicache.node import Entry, Keep, Tier
from hicache.policies.snapshot import SnapshotPolicy
from hicache.policies.write import WriteBack, WritePolicy, WriteThrough, WriteThroughSelective
from hicache.request import RequestRecord
from hicache.room import Room
from hicache.slots import slot_of
from hicache.spec import CacheSpec, Group, PagedGroup, StateField, StateGroup
from hicache.stats import DirectoryStats
from tests.core.simulated_executor import CLEAR, EMPTY, GARBAGE, Fault, SimulatedExecutor, no_fault

PAGE = 2
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


def shared(groups: tuple[Group, ...], *, units: int, slots_per_unit: tuple[int, ...]) -> ArenaLayout:
    """An arena of ``units`` units, each with so many slots of each group."""
    states = tuple(isinstance(group, StateGroup) for group in groups)
    return ArenaLayout(math.lcm(*range(1, 9)), units, slots_per_unit[: len(groups)], states)


def is_idle(room: Room, entry: Entry) -> bool:
    """Whether the entry waits to be evicted; in one place if so."""
    places = [queue[entry.tier][entry.group] for queue in (room._eviction, room._unwritten, room._parked)]
    assert sum(entry in place for place in places) <= 1
    return any(entry in place for place in places)


@dataclass(eq=False)
class Live:
    """A request and what the engine knows of it."""

    record: RequestRecord
    tokens: list[int]
    computed: int = 0
    moved_to: int = 0  # tokens that the state in the live slots has seen; the loaded ones before any were computed
    found: Keep | None = None  # what keeps what match has found, until the first load chooses
    handover: Handover | None = None  # the last one

    def state_at(self, page_tokens: int) -> int:
        """Tokens that the state has seen."""
        return max(self.moved_to, (self.record.loaded_pages or 0) * page_tokens)


class World:
    """``config`` is that of Directory; slot counts are given for each group, or as one number for all of them.

    With ``arena`` the groups share L1, and ``l1`` is of no account. ``job_items_max`` bounds the jobs to and from L3,
    so that few pages already arrive in many pieces.
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
        snapshot_policy: SnapshotPolicy | None = None,
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
        self.snapshot_policy = snapshot_policy or SnapshotPolicy(cap_per_path=None)
        self.job_items_max = job_items_max
        self.begin()
        self.seconds_per_request = seconds_per_request
        self.now_s = 0.0
        self.steps = 0
        self.live: list[Live] = []
        self.truth: dict[bytes, tuple[int, ...]] = {}
        self.is_l3_whole = True  # no object was lost on its way to L3 or in it
        self.lost_in_l3: set[tuple[bytes, int]] = set()  # (key, group) that were there once

    def begin(self) -> None:
        """An engine has started: nothing is in L1 and L2."""
        self.directory = Directory(
            self.spec, self.config, write_policy=self.policy(), snapshot_policy=self.snapshot_policy
        )
        self.lives.append(self.directory.stats)
        self.lost: Counter[str] = Counter()
        self._evict = self.directory.index._room._evict
        self.directory.index._room._evict = self.count_lost  # type: ignore[method-assign]
        self.prefetcher, self.writer = self.directory._prefetcher, self.directory._writer  # their budgets are checked
        self.prefetcher._limits = replace(self.prefetcher._limits, job_items_max=self.job_items_max)
        self.writer._limits = replace(self.writer._limits, job_items_max=self.job_items_max)
        self.executor = SimulatedExecutor(self.spec, self.directory, ranks=self.config.ranks)

    def count_lost(self, entry: Entry) -> None:
        """An entry is evicted: tokens are lost with the last copy of an object that is not below."""
        is_last = entry.node.entries[1 - entry.tier][entry.group] is None
        if is_last and self.is_unwritten(entry):
            self.lost[f"{entry.tier.name.lower()}.{self.spec.groups[entry.group].name}"] += PAGE
        self._evict(entry)

    def restart(self) -> None:
        """The engine dies and starts again: L3 keeps what has arrived, jobs under way have done nothing."""
        l3 = self.executor.l3
        self.is_l3_whole &= not self.executor.waiting_for(StoreJob)
        self.live.clear()
        self.begin()
        self.executor.l3 = l3

    # -- what engines do ---------------------------------------------------------------------------------------------

    def page_keys(self, tokens: list[int]) -> list[bytes]:
        """Block keys of a sequence, noted with what they stand for."""
        keys = self.keys.chain(tokens, parent=self.root)
        for page, key in enumerate(keys):
            self.truth[key] = tuple(tokens[: (page + 1) * PAGE])
        return keys

    def open(self, tokens: list[int]) -> Live:
        self.now_s += self.seconds_per_request
        record = self.directory.open(self.page_keys(tokens), token_count=len(tokens), now_s=self.now_s)
        self.executor.collect()
        live = Live(record, tokens, found=record.keep)
        found = sum(record.local_tokens.values())
        assert found == PAGE * self.brute_force_usable(record.keys[: record.prompt_pages])
        assert not tokens or found < len(tokens)
        self.live.append(live)
        return live

    def prefetch(self, live: Live) -> None:
        self.directory.prefetch(live.record)
        self.executor.collect()

    def load(self, live: Live, *, patient: bool = False) -> None:
        was_loaded = live.record.is_loaded
        self.directory.load(live.record, patient=patient)
        self.executor.collect()
        if self.directory.stats.ranks_lost and not was_loaded:
            assert not live.record.loaded_pages, "a page was restored that is not on every rank"

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
    ) -> bool:
        """Compute up to ``pages`` further full pages and store them. False when not loaded, or L1 has no room.

        Without ``moves`` the step leaves the state in its source, and its updates in a ring; there is no snapshot then.
        """
        record = live.record
        if not record.is_loaded or record.donated:
            return False
        live.computed = max(live.computed, record.loaded_pages * PAGE)
        target = min(live.computed + pages * PAGE, len(live.tokens) // PAGE * PAGE)
        if not self.directory.extend(record, tokens=target, patient=patient):
            self.executor.collect()
            return False
        if target == live.computed:
            moves = not record.sources
        for page in range(live.computed // PAGE, target // PAGE):
            for group, table in enumerate(record.tables):
                if table:
                    self.executor.compute(group, slot_of(table[page]), (self.truth[record.keys[page]], group))
        live.computed = target
        if moves and target > live.state_at(PAGE):
            for group, handle in record.live.items():
                self.executor.compute(group, slot_of(handle), (tuple(live.tokens[:target]), group))
            self.directory.state_moved(record)
            live.moved_to = target
        is_at = snapshot and self.spec.has_state and live.state_at(PAGE) == target
        donates = donate and is_at
        taken = self.snapshots_taken()
        self.directory.store(
            record, computed=target, state_at=target if is_at else None, state_pending=0, donate=donates
        )
        self.executor.run_kind(CopyKind.SNAPSHOT, fault)  # in the order of compute itself, which goes on at once
        if self.snapshots_taken() > taken:
            self.check_cap(record, target // PAGE)
        return True

    def hand_over(self, live: Live) -> None:
        """Begin to, or go on."""
        if live.record.is_loaded:
            if live.handover is None or not live.handover.is_under_way:
                live.handover = self.directory.hand_over(live.record)
            live.handover.write()
            self.executor.collect()

    def snapshots_taken(self) -> int:
        objects = self.directory.stats.objects
        return sum(objects[f"{way}.ok"] for way in ("snapshot", "hand_over", "donate"))

    def compute_to_stop(self, live: Live, *, pages: int, fault: Fault = no_fault) -> bool:
        """Compute up to ``pages`` further pages, or to where the policy wants a snapshot before that."""
        if not live.record.is_loaded or live.record.donated:
            return False
        stop = self.next_stop(live, pages=pages, fault=fault)
        if stop is not None:
            pages = (stop - live.computed) // PAGE
        return self.compute(live, pages=pages, snapshot=stop is not None, fault=fault)

    def release(self, live: Live) -> None:
        self.directory.release(live.record)
        self.live.remove(live)
        self.executor.collect()

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

    def load_whole(self, live: Live, fault: Fault = no_fault, *, patient: bool = False) -> None:
        """Ask for the load until it is there, five times at most; the last time without patience."""
        for attempt in range(5):
            self.load(live, patient=patient and attempt < 4)
            self.run_all(fault)
            if live.record.is_loaded:
                return

    def fill_l3(self, tokens: list[int], *, without: frozenset[tuple[int, int]] = frozenset()) -> None:
        """Another engine has stored these pages, ``without`` some (page, group)."""
        for page, key in enumerate(self.page_keys(tokens)):
            for group in range(len(self.spec.groups)):
                if (page, group) not in without:
                    self.executor.put_l3(key, group, (self.truth[key], group))
        self.is_l3_whole &= not without

    # -- what the world does -----------------------------------------------------------------------------------------

    def run(self, choice: int, fault: Fault = no_fault) -> None:
        """Do one of the waiting tasks, if there are any."""
        if self.executor.waiting:
            self.is_l3_whole &= fault is no_fault
            self.executor.run(choice % len(self.executor.waiting), fault)

    def run_all(self, fault: Fault = no_fault) -> None:
        self.is_l3_whole &= fault is no_fault
        self.executor.run_all(fault)

    def forget_in_l3(self, choice: int) -> None:
        """L3 has evicted something."""
        if self.executor.l3:
            key, group, _ = sorted(self.executor.l3)[choice % len(self.executor.l3)]
            self.lose_in_l3(key, group)

    def lose_in_l3(self, key: bytes, group: int) -> None:
        self.executor.drop_l3(key, group)
        self.lost_in_l3.add((key, group))
        self.is_l3_whole = False

    def lose_rank(self, choice: int) -> None:
        """One of several ranks dies: with it, all that was found and not yet loaded."""
        if len(self.executor.left) > 1:
            rank = self.executor.left[1:][choice % (len(self.executor.left) - 1)]
            self.executor.collect()
            self.executor.lose_rank(rank)
            self.directory.lose_rank(rank, "killed")
            self.executor.collect()
            self.is_l3_whole = False

    # -- what must hold ----------------------------------------------------------------------------------------------

    def brute_force_usable(self, keys: Sequence[bytes]) -> int:
        """The longest n for which every group has what a prefix of n pages needs."""
        best = 0
        for n in range(1, len(keys) + 1):
            if all(
                self.is_resident(keys[page], group)
                for group, reach in enumerate(self.spec.reach_pages)
                for page in range(0 if reach is None else max(0, n - reach), n)
            ):
                best = n
        return best

    def is_resident(self, key: bytes, group: int) -> bool:
        node = self.directory.index.nodes.get(key)
        return node is not None and bool(node.resident >> group & 1)

    def entries(self) -> Iterator[tuple[Tier, int, Entry]]:
        """Every published copy."""
        for node in self.directory.index.nodes.values():
            for tier in Tier:
                for group, entry in enumerate(node.entries[tier]):
                    if entry is not None:
                        yield tier, group, entry

    def check(self) -> None:
        """Everything that holds at every moment."""
        self.check_published_bytes()
        self.check_restored_prefixes()
        self.check_nodes()
        self.check_what_is_kept()
        self.check_accounts()
        for live in self.live:
            if live.handover is not None:
                self.check_handover(live.handover)
        if self.config.l1_arena is not None:
            self.check_arena(self.config.l1_arena)
        if not self.directory.open_jobs:
            self.check_nothing_leaked()
            self.check_l3_has_no_holes()

    def keeps(self) -> Iterator[Keep]:
        """Everything that requests keep from eviction."""
        for live in self.live:
            yield live.record.keep
            if live.record.prefetch is not None:
                yield from live.record.prefetch.keeps

    def check_what_is_kept(self) -> None:
        """Holds are counted exactly, at the latest when somebody asks for room; the queues have what nobody keeps."""
        index = self.directory.index
        full = index.rule.full_mask
        self.steps += 1
        if self.steps % 3 == 0:  # else holds stay uncounted for a while, or come and go without ever being
            index.settle()
        ends = Counter(keep.path for keep in self.keeps() if keep.path is not None)
        assert full or not ends
        assert all(index.nodes[node.key] is node and node.resident & full == full for node in ends)
        assert all(index.nodes[node.key] is node for node in index._pending)
        for node in index.nodes.values():
            held_children = sum(1 for child in node.children if child.held)
            assert node.held + index._pending.get(node, 0) == held_children + ends[node]
        for tier, group, entry in self.entries():
            is_nearest = tier is Tier.L1 or not entry.node.masks[Tier.L1] >> group & 1
            is_held = bool(full >> group & 1 and is_nearest and entry.node.held)
            assert is_idle(index._room, entry) == (not entry.pins and not is_held)
            is_spared = entry in index._room._unwritten[tier][group]
            if is_spared or entry in index._room._eviction[tier][group]:
                assert is_spared == (index._room.spares_unwritten and self.is_unwritten(entry))
        for live in self.live:
            self.check_what_was_found(live)

    def is_unwritten(self, entry: Entry) -> bool:
        """Whether this is the lowest copy of its object, as far as has been acknowledged, in a tier that is not."""
        below = entry.node.in_l3 >> entry.group & 1
        if entry.tier is Tier.L1:
            return any(self.config.l2_slots) and not below and entry.node.entries[Tier.L2][entry.group] is None
        return self.config.has_l3 and not below

    def check_what_was_found(self, live: Live) -> None:
        """What a request was told to have stays where it was, or comes nearer; what it has loaded stays in L1."""
        index, record = self.directory.index, live.record
        if not record.is_loaded and record.keep is not live.found:
            return  # a load has chosen, perhaps less
        pages = record.published_pages if record.is_loaded else sum(record.local_tokens.values()) // PAGE
        off_device = 0
        for page in range(pages):
            needed = {group for group in range(len(self.spec.groups)) if page >= index.rule.first_needed(group, pages)}
            if record.is_loaded:
                paged = {g for g in needed if record.tables[g] and record.tables[g][page] is not None}
                assert all(index.nodes[record.keys[page]].entries[Tier.L1][group] is not None for group in paged)
            elif needed:
                node = index.nodes[record.keys[page]]
                assert all(node.nearest(group) is not None for group in needed)
                off_device += any(node.entries[Tier.L1][group] is None for group in needed)
        assert record.is_loaded or off_device * PAGE <= record.local_tokens["l2"]

    def check_published_bytes(self) -> None:
        for tier, group, entry in self.entries():
            for rank in self.executor.left:
                memory = self.executor.ranks[rank].l1 if tier is Tier.L1 else self.executor.ranks[rank].l2
                assert memory[group][slot_of(entry.handle)] == (self.truth[entry.node.key], group)
        for (key, group, _), value in self.executor.l3.items():
            assert value == (self.truth[key], group)

    def check_restored_prefixes(self) -> None:
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
                        self.check_slot(group, table[page], (self.truth[record.keys[page]], group))
            for group, handle in record.live.items():
                self.check_state(live, group, handle)
            for group, handle in record.spares.items():
                self.check_clear(group, handle)

    def check_state(self, live: Live, group: int, handle: int) -> None:
        """A live state lies in its slot, or still in its source; then its slot has an empty ring to begin with."""
        tokens = live.state_at(PAGE)
        state = (tuple(live.tokens[:tokens]), group) if tokens else EMPTY
        source = live.record.sources.get(group)
        if source is None:
            self.check_slot(group, handle, state)
        else:
            assert live.record.sources_at == tokens
            assert source.node.entries[Tier.L1][group] is source
            self.check_slot(group, source.handle, state)
            self.check_clear(group, handle)

    def check_clear(self, group: int, handle: int) -> None:
        described = self.spec.groups[group]
        assert isinstance(described, StateGroup)
        if any(field.transient for field in described.fields):
            self.check_slot(group, handle, CLEAR)

    def check_cap(self, record: RequestRecord, pages: int) -> None:
        """A path that a snapshot was just taken on has no more of them than the policy says, but for those in use."""
        states = [group for group, described in enumerate(self.spec.groups) if isinstance(described, StateGroup)]
        nodes = [self.directory.index.nodes.get(key) for key in record.keys[:pages]]
        is_there = nodes[-1] is not None and all(nodes[-1].masks[Tier.L1] >> group & 1 for group in states)
        if self.snapshot_policy.cap_per_path is None or not is_there:  # one of its groups failed, perhaps
            return
        there = [node for node in nodes if node is not None and any(node.resident >> group & 1 for group in states)]
        idle = [
            node
            for node in there[:-1]
            if not any((node.copying | node.storing) >> group & 1 for group in states)
            and not any(entries[group] and entries[group].pins for entries in node.entries for group in states)
        ]
        assert len(there) <= self.snapshot_policy.cap_per_path or not idle

    def check_slot(self, group: int, handle: int, expected: object) -> None:
        for rank in self.executor.left:
            assert self.executor.ranks[rank].l1[group][slot_of(handle)] == expected

    def check_handover(self, handover: Handover) -> None:
        """What is said to be in L3 is there, but for what L3 lost later, and all that another engine needs of it."""
        keys, result = handover._keys, handover.result
        assert result.pages_here == self.brute_force_usable(keys)
        for page, group in self.directory.index.rule.needed(result.pages_in_l3):
            part = keys[page], group
            assert part in self.lost_in_l3 or all(
                (*part, rank) in self.executor.l3 for rank in range(len(self.executor.ranks))
            )
        if not self.directory.open_jobs:
            assert not handover.is_under_way

    def check_arena(self, layout: ArenaLayout) -> None:
        """Every byte is of one slot, or free, or stranded; what another group has taken is lost to the old one."""
        room = self.directory.index._room
        assert isinstance(room, ArenaRoom)
        arena = room.arena
        taken: dict[int, int] = {}  # by unit: the group that has slots in it
        used_bytes = 0
        for group, pool in enumerate(arena.pools):
            held = [slot for slot in range(pool.capacity) if pool._holders[slot]]
            used_bytes += len(held) * layout.stride_bytes(group)
            for unit in {arena.unit_of(group, slot) for slot in held}:
                assert taken.setdefault(unit, group) == group, "slots of two groups share bytes"
            idle = {
                slot_of(e.handle)
                for tier, g, e in self.entries()
                if tier is Tier.L1 and g == group and is_idle(room, e)
            }
            assert idle == set(room._idle[group])
            assert idle <= set(held)
            idle_units = [unit for unit in pool.units() if idle >= set(pool.slots_of(unit)) & set(held)]
            assert pool.idle_units == len(idle_units) == sum(map(pool.is_idle, pool.units()))
        assert {unit: owner for unit, owner in enumerate(arena.owners) if owner is not None} == taken
        free_bytes = arena.free_units * layout.unit_bytes
        assert used_bytes + arena.stranded_bytes + free_bytes == layout.size_bytes
        for rank, group in itertools.product(self.executor.ranks, range(len(self.spec.groups))):
            for slot in list(rank.l1[group]):
                if arena.owners[arena.unit_of(group, slot)] not in (None, group):
                    rank.l1[group][slot] = GARBAGE

    def check_nodes(self) -> None:
        index = self.directory.index
        full = index.rule.full_mask
        for key, node in index.nodes.items():
            assert node.key == key
            assert node.resident or node.children or node.copying or node.storing
            assert node.parent is None or (index.nodes[node.parent.key] is node.parent and node in node.parent.children)
            if full and node.resident:  # no page is here without all of its ancestors
                assert node.resident & full == full
                assert node.parent is None or node.parent.resident & full == full
            for tier in Tier:
                there = sum(1 << group for group, entry in enumerate(node.entries[tier]) if entry is not None)
                assert node.masks[tier] == there
            assert node.resident == node.masks[Tier.L1] | node.masks[Tier.L2]

    def check_accounts(self) -> None:
        stats = self.directory.stats
        assert stats.prefetch_found == (
            stats.prefetch_used + sum(stats.prefetch_dropped.values()) + stats.prefetch_in_flight
        )
        assert stats.tokens_requested == sum(stats.tokens_by_source.values())
        assert stats.prefetch_in_flight >= 0
        assert stats.tokens_lost == self.lost

    def check_nothing_leaked(self) -> None:
        """With no job under way, slots and pins are exactly those of entries and of requests that are alive."""
        holders: list[list[Counter[int]]] = [[Counter() for _ in self.spec.groups] for _ in Tier]
        for tier, group, entry in self.entries():
            holders[tier][group][entry.handle] += 1
        pins: Counter[Entry] = Counter()
        for live in self.live:
            for group, table in enumerate(live.record.tables):
                holders[Tier.L1][group].update(handle for handle in table if handle is not None)
            for slots in (live.record.live, live.record.spares):
                for group, handle in slots.items():
                    holders[Tier.L1][group][handle] += 1
            pins.update(live.record.sources.values())
            assert not live.record.preparing
        for keep in self.keeps():
            pins.update(keep.entries)
        for tier in Tier:
            for group, pool in enumerate(self.directory.index.pools[tier]):
                assert pool.used_count == len(holders[tier][group])
                assert all(pool.holders(handle) == count for handle, count in holders[tier][group].items())
        for _, _, entry in self.entries():
            assert entry.pins == pins[entry]
        for node in self.directory.index.nodes.values():
            assert not node.copying
            assert not node.storing
        self.check_budgets()

    def check_budgets(self) -> None:
        """With no job under way, the shares of L2 are taken by what waits there for its request, and nothing else."""
        held = [0] * len(self.spec.groups)
        for live in self.live:
            if live.record.prefetch is not None and not live.record.prefetch.concluded:
                for _, group in live.record.prefetch.fetched:
                    held[group] += 1
        assert self.prefetcher._held == held
        assert not any(self.writer._storing)
        assert not any(self.writer._copying)
        assert not self.writer._queue

    def check_l3_has_no_holes(self) -> None:
        """Unless something was lost on its way or in L3, what L3 holds can be reached from its first page on."""
        full = self.directory.index.rule.full_mask
        if not self.is_l3_whole or not full:
            return
        by_tokens = {tokens: key for key, tokens in self.truth.items()}
        for key, _, rank in self.executor.l3:
            tokens = self.truth[key]
            for end in range(PAGE, len(tokens) + 1, PAGE):
                for group in range(len(self.spec.groups)):
                    if full >> group & 1:
                        assert (by_tokens[tokens[:end]], group, rank) in self.executor.l3

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
                assert handles is not None
                index.release(tier, group, handles)
        assert not index.nodes
