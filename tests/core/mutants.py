"""Faults put into the directory on purpose, one at a time, to see whether the walks find them.

``python -m tests.core.mutants`` prints after how many steps each is found, and by which check.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol

from hicache.arena import Arena
from hicache.directory import Directory
from hicache.entry_facts import EntryFacts
from hicache.fetches import Fetches
from hicache.handover import Handover
from hicache.index import Index
from hicache.jobbook import JobBook, _Open
from hicache.loader import Loader
from hicache.policies.eviction import Heap, Reranked
from hicache.policies.eviction_kinds import Ttl
from hicache.policies.eviction_queues import RandomLeaf, TwoQueues
from hicache.policies.own import ContinuationEviction
from hicache.prefetch import Prefetcher
from hicache.prefix import PrefixRule
from hicache.read_admission import ReadAdmission
from hicache.room import Room
from hicache.snapshots import Snapshots
from hicache.write_ahead import WriteAhead
from hicache.writer import Writer
from tests.core.walk import walk_of

STEPS_PER_WALK = 300
STEPS_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Edit:
    """In the source of ``function``, ``old``, which is there once, becomes ``new``."""

    function: Callable[..., object]
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is wrong in it, and where."""

    name: str
    edits: tuple[Edit, ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the context lasts, the functions do the wrong thing, whoever has got hold of them."""
        functions = [_function_of(edit.function) for edit in self.edits]
        codes = [function.__code__ for function in functions]
        for edit, function in zip(self.edits, functions, strict=True):
            function.__code__ = _edited(edit, function).__code__
        try:
            yield
        finally:
            for function, code in zip(functions, codes, strict=True):
                function.__code__ = code


def _function_of(described: Callable[..., object]) -> FunctionType:
    function = inspect.unwrap(described)
    assert isinstance(function, FunctionType)
    return function


def _edited(edit: Edit, function: FunctionType) -> FunctionType:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(edit.old) == 1, f"{edit.old!r} is {source.count(edit.old)} times in {function.__qualname__}"
    source = "from __future__ import annotations\n" + source.replace("@staticmethod\n", "").replace(
        "@property\n", ""
    ).replace(edit.old, edit.new)
    made: dict[str, FunctionType] = {}
    exec(compile(source, f"<mutant of {function.__qualname__}>", "exec"), function.__globals__, made)
    return made[function.__name__]


def mutant(name: str, function: Callable[..., object], old: str, new: str, *more: Edit) -> Mutant:
    return Mutant(name, (Edit(function, old, new), *more))


MUTANTS = (
    mutant(
        "a page is published before all of its groups have arrived",
        Fetches.publish_in_order,
        "if part in prefetch.handles]",
        "if part in prefetch.arrived]",
    ),
    mutant(
        "a page is published though an object of it has failed",
        Fetches._publish_page,
        "if prefetch.arrived[part].is_ok]",
        "]",
    ),
    mutant(
        "a plan that finds no room forgets slots",
        Fetches.acquire,
        "self._index.release(Tier.L2, taken_group, [handle])",
        "pass",
    ),
    mutant("a share of L2 is not given back", Fetches.let_go, "self.held[group] -= 1", "pass"),
    mutant(
        "a request is not told that what it waits for has come",
        Fetches._share,
        "other.awaited.discard(part)",
        "pass",
    ),
    mutant(
        "what was fetched for another may be evicted before it is used",
        Fetches._share,
        "other.keeps[-1].entries.append(self._index.pin(entry))",
        "pass",
    ),
    mutant(
        "what another request failed to fetch is taken for arrived",
        Fetches._share,
        "other.has_missed = True",
        "pass",
    ),
    mutant(
        "L3 is not asked for the state of what is here",
        ReadAdmission._wants_some,
        "for stop in hoped.stops",
        "for stop in hoped.stops[-1:]",
    ),
    mutant("L3 is asked for what cannot pay", ReadAdmission._wants_some, "return any(", "return True or any("),
    mutant("a probe is never over", Fetches._fetched, "self._admission.end_probe()", "pass"),
    mutant("what is late is not accounted for", Prefetcher.conclude, "self._drop(promised - used, reason)", "pass"),
    mutant(
        "what a copy reads is not pinned",
        Loader._emit,
        "self._index.pin(copy.source)",
        "pass",
        Edit(Loader._end, "self._index.unpin(copy.source)", "pass"),
    ),
    mutant(
        "where a copy goes is not held",
        Loader._emit,
        "pools[copy.part[1]].hold(copy.target)",
        "pass",
        Edit(Loader._end, "self._index.release(Tier.L1, copy.part[1], [copy.target])", "pass"),
    ),
    mutant(
        "a load by layer lets go of its slots before it has arrived", Loader._copied, "if load.in_flight:", "if False:"
    ),
    mutant("a load whose copies failed is taken for whole", Loader._copied, "elif load.failed:", "elif False:"),
    mutant(
        "a load takes less than is usable",
        Loader.load,
        "else self._index.match(keys)",
        "else self._index.match(keys[:-1])",
    ),
    mutant("a match ignores the boundary of states", PrefixRule.longest, "page >= stop - reach", "page > stop - reach"),
    mutant(
        "a window is one page short",
        PrefixRule.legal_stops,
        "page + reach > illegal_up_to",
        "page + reach > illegal_up_to + 1",
    ),
    mutant("a window is needed one page less far back", PrefixRule.first_needed, "pages - reach", "pages - reach + 1"),
    mutant(
        "a parent is evicted before its children",
        Room._evict_or_park,
        "is_last and (node.children or self._is_kept(node))",
        "is_last and self._is_kept(node)",
    ),
    mutant(
        "what is idle for too long stays", Room._expire, "has_evicted |= self._evict_or_park(queue, entry)", "break"
    ),
    mutant("a time to live ends too soon", Ttl.expired, "<= self.ttl_s", "<= self.ttl_s / 2"),
    mutant(
        "a page that is in use for long grows old",
        EntryFacts.facts,
        "max(entry.used_s, entry.node.used_s)",
        "entry.used_s",
    ),
    mutant("a use is not counted", Room.note_use, "entry.uses += 1", "pass"),
    mutant("a policy is not told of a use", Room.note_use, "queues[entry.tier][entry.group].used(entry)", "pass"),
    mutant(
        "a use of the copy below is not counted",
        Index.note_use,
        "for copies in node.entries:",
        "for copies in node.entries[:1]:",
    ),
    mutant("a rank that has risen is not put right", Heap.first, "and rank(item) == stamp", ""),
    mutant("a rank that has fallen is not put right", Reranked._put_right, "self._push(item)", "pass"),
    mutant(
        "a heap forgets what comes back",
        Heap.add,
        "if item not in self._recorded:",
        "if item not in self._recorded and not self._heap:",
    ),
    mutant(
        "what is taken away may still go",
        TwoQueues.remove,
        "for queue in self._queues:",
        "for queue in self._queues[:1]:",
    ),
    mutant("a page is moved out of all queues", TwoQueues._move, "self._queues[is_main].add(item)", "pass"),
    mutant("chance chooses what has been taken away", RandomLeaf.remove, "if item is self._chosen:", "if False:"),
    mutant("a forecast that rises loses its page", ContinuationEviction.first, "self._push(item)", "pass"),
    mutant(
        "a page is evicted that something is below of in use",
        Room._is_idle,
        "not self._is_kept(node) and all(known[child] for child in node.children)",
        "not self._is_kept(node)",
    ),
    mutant("what is parked is never woken", Room.wake, "self.offer(entry)", "pass"),
    mutant("what is held is offered for eviction", Room.offer, " or (entry.node.held and self._is_nearest(entry))", ""),
    mutant(
        "an evicted copy keeps its slot",
        Index.retract,
        "self.pools[entry.tier][entry.group].release(entry.handle)",
        "pass",
    ),
    mutant(
        "a failed copy keeps its slot in L2",
        Writer._land,
        "self._index.release(Tier.L2, source.group, [target])",
        "pass",
    ),
    mutant("a failed copy is published in L2", Writer._land, "if complete and", "if"),
    mutant("a failed store counts as stored", Writer._stored, "if outcome.is_ok:", "if True:"),
    mutant(
        "a page goes to L3 without its parent", Writer._is_reachable_in_l3, "return itself and (", "return True or ("
    ),
    mutant(
        "what L3 has lost is believed to be there",
        Writer._confirmed,
        "self._index.gone_from_l3(node, 1 << group)",
        "pass",
    ),
    mutant(
        "write-back forgets a page that waits in L2",
        Writer._copied,
        "elif not self._is_write_back or copy.node in self._bound:",
        "elif not self._is_write_back:",
    ),
    mutant(
        "a flush forgets its last pages",
        WriteAhead.flush,
        "key=lambda node: -node.page)",
        "key=lambda node: -node.page)[1:]",
    ),
    mutant("what is unwritten is not spared", Room._wait, "if self.is_unwritten(entry):", "if False:"),
    mutant("lost tokens are not counted", Room._count_lost, "+= self._page_tokens", "+= 0"),
    mutant(
        "a snapshot is taken of another length",
        Directory.store,
        "keep_state(record, state_at // self.spec.page_tokens)",
        "keep_state(record, max(1, state_at // self.spec.page_tokens - 1))",
    ),
    mutant(
        "a state that went on is taken for the boundary's",
        Directory._check_committed,
        "if state_at < record.computed:",
        "if False:",
    ),
    mutant(
        "a snapshot with updates in its ring is taken", Directory._check_committed, "if state_pending:", "if False:"
    ),
    mutant(
        "a snapshot that is read from is thinned out", Snapshots._is_in_use, "entry is not None and entry.pins", "False"
    ),
    mutant("a path keeps one snapshot more than its cap", Snapshots._thin, "cap=cap,", "cap=cap + 1,"),
    mutant(
        "a snapshot whose copy failed is published",
        Snapshots._copied,
        "if not all(outcome.is_ok for outcome in outcomes):",
        "if False:",
    ),
    mutant("a failed snapshot keeps its slot", Snapshots._copied, "self._release(targets)\n", "pass\n"),
    mutant(
        "a spare slot with a full ring is used",
        Snapshots._prepared,
        " or not all(outcome.is_ok for outcome in outcomes)",
        "",
    ),
    mutant("a donated state stays live", Snapshots.donate, "record.live.pop(group)", "record.live[group]"),
    mutant("a lost rank's copy counts as done", JobBook.lose, "[entry.outcome_if_lost]", "[Outcome.OK]"),
    mutant("an object is there when one rank has it", _Open.join, "max(pair)", "min(pair)"),
    mutant(
        "a unit is given to two groups",
        Arena.take,
        "while self.owners[unit := free.pop()] is not None:",
        "unit = free.pop()\n    while False:",
    ),
    mutant(
        "a hand-over counts what is on its way", Handover.result.fget, "node.in_l3 for", "node.in_l3 | node.storing for"
    ),  # type: ignore[attr-defined]
    mutant(
        "pages that found no room keep slots of other groups",
        Directory.extend,
        "self.index.release(Tier.L1, other, others)",
        "pass",
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """After how many steps, and by which check."""

    steps: int
    by: str


class AnyWalk(Protocol):
    """A Walk, or a SlotWalk."""

    steps: int

    def step(self) -> None: ...

    def wind_up(self) -> None: ...


def hunt(
    mutant: Mutant,
    *,
    walk_of: Callable[[int], AnyWalk] = walk_of,
    first_seed: int = 0,
    steps_max: int = STEPS_MAX,
) -> Found | None:
    """Walk until something does not hold; None when everything holds for ``steps_max`` steps."""
    steps = 0
    with mutant.applied():
        for seed in range(first_seed, first_seed + steps_max // STEPS_PER_WALK):
            walk = walk_of(seed)
            try:
                for _ in range(STEPS_PER_WALK):
                    walk.step()
                walk.wind_up()
            except Exception as error:  # whatever it is: it has been noticed
                return Found(steps + walk.steps, _noticed_by(error))
            steps += walk.steps
    return None


def _noticed_by(error: Exception) -> str:
    """The check of the model that did not hold, or the function of the product that noticed itself."""
    frames = traceback.extract_tb(error.__traceback__)
    checks = [frame.name for frame in frames if "invariants" in frame.filename]
    return checks[0] if checks else f"{frames[-1].name} ({type(error).__name__})"


def tell(mutants: Sequence[Mutant], walk_of: Callable[[int], AnyWalk]) -> None:
    """Hunt those of ``mutants`` that the command line names, or all."""
    names = sys.argv[1:]
    for mutant in mutants:
        if not names or any(name in mutant.name for name in names):
            found = hunt(mutant, walk_of=walk_of)
            told = "SURVIVES" if found is None else f"{found.steps:6} steps  {found.by}"
            print(f"{mutant.name:62} {told}", flush=True)


if __name__ == "__main__":
    tell(MUTANTS, walk_of)
