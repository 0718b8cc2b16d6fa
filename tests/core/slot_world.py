"""A directory for an engine that owns its slots, its executors, and that engine, which reuses slots soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from hicache.jobs import CopyJob, CopyKind
from hicache.node import Keep
from hicache.page_changes import Place
from hicache.policies.choice import policies_of
from hicache.slot_directory import SlotDirectory, Step
from hicache.slot_request import EngineSlot, SlotLoad, SlotRecord
from hicache.spec import StateGroup
from tests.core.checked_eviction import checked
from tests.core.checked_read import CheckedRead, declines_what_cannot_pay
from tests.core.live import PAGE
from tests.core.simulated_executor import GARBAGE, Fault, SimulatedExecutor, no_fault
from tests.core.slot_invariants import ALWAYS, AT_REST, usable_beyond
from tests.core.system import System

Parts = dict[tuple[int, int], int]  # (page, group) -> slot of the engine


@dataclass(eq=False)
class Life:
    """A sequence in the engine."""

    record: SlotRecord
    tokens: list[int]
    own: int = 0  # pages that the engine has itself: in ``parts``
    parts: Parts = field(default_factory=dict)  # what is computed or restored, and where
    computed: int = 0  # pages
    load: SlotLoad | None = None
    targets: Parts = field(default_factory=dict)
    promised: tuple[int, float] | None = None  # pages, and until when, as ``usable`` has last told

    @property
    def keys(self) -> list[bytes]:
        return self.record.keys


class SlotWorld(System):
    """With ``one_numbering`` slots of all groups lie on the same bytes: what one writes is garbage to the others."""

    def __init__(self, *arguments: object, one_numbering: bool = False, **settings: object) -> None:
        self.one_numbering = one_numbering
        self.ended: list[Life] = []  # released while a load was under way: its targets are not the engine's yet
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]

    def begin(self) -> None:
        eviction, policy = policies_of(self.eviction, self.policy())
        self.slots: SlotDirectory = SlotDirectory(
            self.spec,
            self.config,
            write_policy=policy,
            eviction=checked(eviction),
            read_policy=lambda costs: CheckedRead(self.read_policy, costs),
            one_numbering=self.one_numbering,
            tells_changes=True,
        )
        self.directory = self.slots  # type: ignore[assignment]
        self.lives.append(self.slots.stats)
        self.lost = Counter()
        self._evict = self.slots.index._room._evict
        self.slots.index._room._evict = self.count_lost  # type: ignore[method-assign]
        self.prefetcher, self.writer = self.slots._prefetcher, self.slots._writer
        self.prefetcher.fetches.job_items_max = self.job_items_max
        self.writer._limits = replace(self.writer._limits, job_items_max=self.job_items_max)
        self._send = self.writer._send
        self.writer._send = self.check_sent  # type: ignore[method-assign]
        self.executor = SimulatedExecutor(self.spec, self.directory, ranks=self.config.ranks, lacks=self.lacks)
        self.executor.take_time = self.take_time
        self.alive: list[Life] = []
        self.ended.clear()
        count = min(self.config.l1_slots) if self.one_numbering else 0
        self.free: list[list[int]] = (
            [list(range(count))] if self.one_numbering else [list(range(slots)) for slots in self.config.l1_slots]
        )
        self.told: dict[tuple[bytes, Place], int] = {}  # groups as a mask, by the changes so far
        self.seen: dict[EngineSlot, int] = {}  # what was written to a slot, by the number of the write

    # -- the engine's slots ------------------------------------------------------------------------------------------

    def take(self, parts: list[tuple[int, int]]) -> Parts | None:
        """Free slots, the ones that were given back last first: their copies may be under way."""
        taken: Parts = {}
        for page, group in parts:
            pool = self.free[0 if self.one_numbering else group]
            if not pool:
                self.give_back(taken)
                return None
            taken[page, group] = pool.pop()
        return taken

    def give_back(self, parts: Parts) -> None:
        for (_, group), slot in parts.items():
            self.free[0 if self.one_numbering else group].append(slot)
        parts.clear()

    def write(self, life: Life, parts: Parts) -> None:
        """The model computes."""
        for (page, group), slot in parts.items():
            if self.one_numbering:
                for other in range(len(self.spec.groups)):
                    self.executor.compute(other, slot, GARBAGE)
            self.executor.compute(group, slot, (self.truth[life.keys[page]], group))

    def step(self, parts: Parts | None) -> Step:
        """The engine's next step writes to these slots; None: it does not say to which. Done when it may begin."""
        reuses: dict[int, list[int]] = {}
        for (_, group), slot in (parts or {}).items():
            reuses.setdefault(0 if self.one_numbering else group, []).append(slot)
        step = self.slots.step(None if parts is None else reuses)
        self.executor.collect()
        for job_id in step.after:
            while positions := [n for n, task in enumerate(self.executor.waiting) if task.job.job_id == job_id]:
                self.executor.run(positions[0])
        self.reached["step.waits"] += bool(step.after)
        return step

    # -- a life ------------------------------------------------------------------------------------------------------

    def start(self, tokens: list[int], *, own: int) -> Life:
        """A sequence of whose first pages the engine has ``own`` itself, if it has room."""
        self.slots.tell_time(self.now_s)
        life = Life(self.slots.open(self.page_keys(tokens), token_count=len(tokens)), tokens)
        self.alive.append(life)
        self.find_own(life, own)
        self.executor.collect()
        return life

    def find_own(self, life: Life, own: int) -> None:
        own = min(own, life.record.restorable_pages)
        parts = self.take(self.slots.index.rule.needed(own))
        life.own = life.computed = 0 if parts is None else own
        if parts:
            self.step(parts)
            self.write(life, parts)
            life.parts |= parts

    def prefetch_life(self, life: Life) -> None:
        if life.load is None:
            self.slots.tell_time(self.now_s)
            record, own = life.record, life.computed
            is_new = record.prefetch is None or record.prefetch.concluded
            keys = record.keys[: record.restorable_pages] if is_new and not self.slots.stats.ranks_lost else []
            with declines_what_cannot_pay(self.prefetcher, keys, own=min(own, len(keys))):
                self.slots.prefetch(record, own_tokens=own * PAGE)
            self.executor.collect()

    def usable(self, life: Life) -> int:
        """What can be loaded beyond what the engine has: exactly what is there."""
        self.slots.tell_time(self.now_s)
        expected = usable_beyond(self, life.record, life.computed)
        pages = self.slots.usable(life.record, own_tokens=life.computed * PAGE) // PAGE
        assert pages == (life.computed if self.slots.stats.ranks_lost else expected), "not the longest usable prefix"
        life.promised = (pages, self.now_s + 30.0) if pages > life.computed else None
        self.executor.collect()
        return pages

    def begin_load(self, life: Life, pages: int) -> None:
        """Load a prefix, promised or not, into free slots, if there are enough."""
        if life.load is not None or pages <= life.computed:
            return
        reaches = self.spec.reach_pages
        needed = [
            (page, group)
            for group, reach in enumerate(reaches)
            for page in range(max(life.computed, 0 if reach is None else pages - reach), pages)
        ]
        parts = self.take(needed)
        if parts is None:
            return
        self.slots.tell_time(self.now_s)
        table: dict[int, dict[int, int]] = {}
        for (page, group), slot in parts.items():
            table.setdefault(group, {})[page] = slot
        is_promised = life.promised is not None and life.promised[0] == pages and life.promised[1] > self.now_s
        life.promised = None
        life.load = self.slots.load(life.record, own_tokens=life.computed * PAGE, tokens=pages * PAGE, slots=table)
        life.targets = parts
        self.executor.collect()
        if is_promised and not self.slots.stats.ranks_lost:
            assert not life.load.failed, "what was promised is gone"
        self.reached["load.gone"] += life.load.failed
        self.reached["load.waits"] += bool(self.slots._loader._waiting)
        self.look_at_load(life)

    def look_at_load(self, life: Life) -> None:
        """Take over what has been loaded; compared with the truth by the checks."""
        if life.load is None or not life.load.done:
            return
        life.promised = None
        if life.load.failed:
            self.give_back(life.targets)
        else:
            pages = life.load.tokens // PAGE
            states = [g for g, group in enumerate(self.spec.groups) if isinstance(group, StateGroup)]
            stale = {part: slot for part, slot in life.parts.items() if part[1] in states}
            life.parts = {part: slot for part, slot in life.parts.items() if part not in stale} | life.targets
            self.give_back(stale)
            life.targets = {}
            life.computed = pages
            self.reached["loaded"] += 1
        life.load = None

    def compute_pages(self, life: Life, pages: int, *, states: bool, tells: bool) -> bool:
        """A step computes so many pages more, and may leave the states of its last boundary in slots of their own."""
        end = min(life.computed + pages, len(life.keys))
        if life.load is not None or end == life.computed:
            return False
        kinds = [isinstance(group, StateGroup) for group in self.spec.groups]
        wanted = [
            (page, group)
            for page in range(life.computed, end)
            for group, is_state in enumerate(kinds)
            if not is_state or (states and page == end - 1)
        ]
        parts = self.take(wanted)
        if parts is None:
            return False
        self.step(parts if tells else None)
        self.write(life, parts)
        life.parts |= parts
        if self.token_s:
            tokens = (life.computed * PAGE, end * PAGE)
            self.slots.costs.computed(*tokens, self.token_s * (tokens[1] - tokens[0]))
        life.computed = end
        return True

    def save(self, life: Life, parts: list[tuple[int, int]]) -> None:
        table: dict[int, dict[int, int]] = {}
        for page, group in parts:
            table.setdefault(group, {})[page] = life.parts[page, group]
        self.slots.tell_time(self.now_s)
        life.promised = None
        save = self.slots.save(life.record, table)
        self.reached["save.free"] += bool(parts) and save.done
        self.executor.collect()

    def append_tokens(self, life: Life, tokens: list[int]) -> None:
        before = len(life.keys)
        life.tokens = life.tokens + tokens
        life.promised = None
        self.slots.append(life.record, self.page_keys(life.tokens)[before:], token_count=len(life.tokens))
        self.executor.collect()

    def preempt(self, life: Life, own: int) -> None:
        """It loses all its slots, whatever is being copied out of them, and starts again."""
        if life.load is None:
            self.give_back(life.parts)
            life.promised = None
            self.find_own(life, own)
            self.reached["preempted"] += 1

    def drop_window(self, life: Life) -> None:
        """Pages that have left every window, and states of earlier boundaries, are given back while it runs."""
        needed = set(self.slots.index.rule.needed(life.computed))
        self.give_back({part: life.parts.pop(part) for part in list(life.parts) if part not in needed})

    def end(self, life: Life) -> None:
        """At any moment. Slots are given back at once, but for those that a load writes to."""
        self.reached[f"end.{'loading' if life.load else 'computed' if life.parts else 'waiting'}"] += 1
        self.slots.release(life.record)
        self.alive.remove(life)
        self.give_back(life.parts)
        if life.load is not None:
            self.ended.append(life)
        self.executor.collect()

    def look_at_loads(self) -> None:
        for life in self.alive:
            self.look_at_load(life)
        for life in [life for life in self.ended if life.load is not None and life.load.done]:
            self.give_back(life.targets)
            self.ended.remove(life)

    # -- what befalls it ---------------------------------------------------------------------------------------------

    def run(self, choice: int, fault: Fault = no_fault) -> None:
        super().run(choice, fault)
        self.look_at_loads()

    def run_all(self, fault: Fault = no_fault) -> None:
        super().run_all(fault)
        self.look_at_loads()

    def lose_rank(self, choice: int) -> None:
        super().lose_rank(choice)
        self.look_at_loads()

    def restart(self) -> None:
        super().restart()

    # -- what must hold ----------------------------------------------------------------------------------------------

    def keeps(self) -> Iterator[Keep]:
        for life in self.alive:
            if life.record.promise is not None:
                yield life.record.promise.keep
        for life in self.alive:
            if life.record.prefetch is not None:
                yield from life.record.prefetch.keeps
        yield from (under_way.keep for under_way in set(self.slots._loader._targets.values()))

    def copies(self, kind: CopyKind) -> Iterator[EngineSlot]:
        """Slots of L1 that a copy of one kind touches that is under way on some rank."""
        for task in self.executor.waiting:
            if isinstance(task.job, CopyJob) and task.job.kind is kind:
                for item in task.job.items:
                    slot = item.source if kind is CopyKind.BACKUP else item.target
                    yield self.slots._use.slot(item.group, slot)

    def check(self) -> None:
        self.checks += 1
        for holds in ALWAYS:
            holds(self)
        if not self.slots.open_jobs:
            for holds in AT_REST:
                holds(self)

    def wind_up(self) -> None:
        for life in list(self.alive):
            self.end(life)
        self.run_all()
        self.check()
        assert not self.ended, "a load never ends"
        assert not self.slots.busy_slots()
        assert sum(map(len, self.free)) == (
            min(self.config.l1_slots) if self.one_numbering else sum(self.config.l1_slots)
        ), "the engine's slots"
        index = self.slots.index
        for group, pool in enumerate(index.pools[1]):
            handles = index.acquire(1, group, pool.capacity)  # type: ignore[arg-type]
            assert handles is not None, f"{pool.name}: slots are held that nobody uses"
            index.release(1, group, handles)  # type: ignore[arg-type]
        assert not index.nodes


Move = Callable[[SlotWorld], None]
