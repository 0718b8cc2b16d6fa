"""Faults put into the code on purpose, to see that lives find them.

Those of LIVES are in the tests. The others need a life that seldom comes: ``python -m tests.simulation --mutant NAME``
seeks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lmdb

from hicache import cache, front, jobbook, prefetch, prefix, room, transfers
from hicache.backends import events, file_accounts, file_objects, lmdb_index, lmdb_space, lmdb_store
from hicache.client import daemon_l3, memory_link, transfer
from hicache.daemon import budget, call_tally, memory, sessions, watch
from hicache.loader import Load
from hicache.outcome import Outcome
from hicache.ranks import worker
from tests.simulation.world import World


@contextmanager
def put_in(owner: Any, name: str, value: Any, *, also: Mapping[str, Any] | None = None) -> Iterator[None]:
    with ExitStack() as stack:
        for each, replacement in {name: value, **(also or {})}.items():
            stack.callback(setattr, owner, each, getattr(owner, each))
            setattr(owner, each, replacement)
        yield


def regions_are_not_held() -> Any:
    """hicached says that it has let go of memory while a thread still writes there."""
    return put_in(memory.Region, "hold", lambda self: not self.detaching.is_set(), also={"release": lambda self: None})


def late_bytes_are_not_doubted() -> Any:
    """The client uses memory again although hicached has not moved all of it in time."""
    late = transfer.late_fault
    return put_in(transfer, "late_fault", lambda *args: replace(late(*args), leaves_bytes_alone=True))


def checksums_are_not_compared() -> Any:
    """The file backend believes what it reads."""
    read = file_objects.ObjectFiles.read

    def believe(self: Any, path: str, item: Any) -> tuple[Outcome, int]:
        outcome, inode = read(self, path, item)
        return (Outcome.OK if outcome is Outcome.CORRUPT else outcome), inode

    return put_in(file_objects.ObjectFiles, "read", believe)


def leases_outlive_their_session() -> Any:
    """What a client that is gone had leased stays so."""
    end = sessions.Session.end

    def forget(self: Any) -> list[int]:
        end(self)
        return []

    return put_in(sessions.Session, "end", forget)


def tenants_share_keys() -> Any:
    """The tenant is not in the physical key."""
    return put_in(sessions, "physical_key", lambda digest, key: b"\0" * len(digest) + key)


def salts_are_forgotten() -> Any:
    """Requests of different salts find each other's pages."""
    root = front.CacheFront._root
    return put_in(front.CacheFront, "_root", lambda self, salt, extras: root(self, b"", extras))


def doubt_settles_at_once() -> Any:
    """The client takes the end of its patience for the end of the transfer."""
    return put_in(memory_link.MemoryLink, "doubt", lambda self, item_count, settle: settle())


def tickets_are_kept() -> Any:
    """What a transfer took of the daemon's room is never given back."""
    return put_in(budget.Ticket, "drop", lambda self: None)


def outcomes_are_of_other_objects() -> Any:
    """The client tells its engine what became of the objects in another order."""
    finish = daemon_l3.DaemonL3._finish
    return put_in(
        daemon_l3.DaemonL3,
        "_finish",
        lambda self, direction, items, outcomes, done: finish(self, direction, items, outcomes[::-1], done),
    )


def what_failed_counts_as_fetched() -> Any:
    """The executor says that every object of a transfer is there."""
    joined = transfers._joined
    return put_in(transfers, "_joined", lambda outcomes, counts: [Outcome.OK] * len(joined(outcomes, counts)))


def attention_alone_is_a_prefix() -> Any:
    """Windows and states need not be there for a prefix to be used."""
    make = prefix.PrefixRule.__init__

    def without_partial(self: Any, spec: Any) -> None:
        make(self, spec)
        self.partial, self._partial_mask = (), 0

    return put_in(prefix.PrefixRule, "__init__", without_partial)


def slots_are_not_given_back() -> Any:
    """The directory forgets slots of requests that it is done with."""
    return put_in(room.Room, "release", lambda self, tier, group, handles: None)


def what_was_found_is_not_dropped() -> Any:
    """Tokens that were found ahead and not used are counted nowhere."""
    return put_in(prefetch.Prefetcher, "_drop", lambda self, pages, reason: None)


def removals_are_not_told() -> Any:
    """A watcher hears of what is stored alone."""
    tell = events.Events.tell
    return put_in(
        events.Events, "tell", lambda self, key, removal: None if removal is not None else tell(self, key, removal)
    )


def watches_are_not_ended() -> Any:
    """The daemon goes on telling those who have gone."""
    return put_in(watch.Watches, "_end", lambda self, subscription: None)


def removed_objects_stay_in_the_accounts() -> Any:
    """What was deleted still takes of the capacity."""
    add = file_accounts.Accounts.add
    return put_in(file_accounts.Accounts, "add", lambda self, change: add(self, change) if change.objects > 0 else None)


def without_its_lock(owner: Any) -> Any:
    """``owner`` takes no lock."""
    make = owner.__init__

    def unlocked(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._lock = nullcontext()

    return put_in(owner, "__init__", unlocked)


def the_tally_is_not_locked() -> Any:
    """Threads count calls over each other: only switches between statements show it."""
    return without_its_lock(call_tally.CallTally)


def threads_that_load_wake_each_other() -> Any:
    """Whoever waits for copies of other ranks wakes all others that do, who then wake it."""

    def busy(self: Any, record: Any, patient: bool) -> bool:
        until_s = self._clock() + self._replica.load_timeout_s
        while (progress := self._directory.load(record, patient=patient)) is Load.STARTED:
            self._pump.pump()
            if record.loading and not self._changed.wait(until_s - self._clock()):
                return False
            self._check_open()
        return progress is Load.DONE

    return put_in(cache.HiCache, "_is_loaded", busy)


def what_one_rank_has_is_on_all() -> Any:
    """An object counts as fetched or stored when any rank has done its part."""

    def join(self: Any, outcomes: Any) -> None:
        self.outcomes = list(map(min, self.outcomes, outcomes)) if self.outcomes else list(outcomes)

    return put_in(jobbook._Open, "join", join)


def copies_do_not_wait_for_steps() -> Any:
    """A worker copies when it is told to, whatever it was to compute before."""

    def at_once(self: Any, message: Any) -> None:
        self._executor.submit(message)
        self._order.add(message.job_id, None)

    return put_in(worker.RankWorker, "_on_message", at_once)


def lost_ranks_are_forgotten() -> Any:
    """The directory goes on with the ranks that are left."""
    lose = jobbook.JobBook.lose

    def forget(self: Any, rank: int) -> None:
        lose(self, rank)
        self._has_lost = False

    return put_in(jobbook.JobBook, "lose", forget)


def the_index_is_believed() -> Any:
    """The LMDB backend believes what lies where its index says."""
    is_filled = lmdb_store.LmdbBackend._is_filled

    def believe(self: Any, *args: Any) -> bool:
        is_filled(self, *args)
        return True

    return put_in(lmdb_store.LmdbBackend, "_is_filled", believe)


def chunks_of_failed_puts_are_kept() -> Any:
    """A put that fails gives its chunks back to nobody."""
    return put_in(lmdb_space.ChunkSpace, "give_up", lambda self, allocated: None)


def commits_that_fail_count() -> Any:
    """What LMDB could not commit counts as stored."""
    add = lmdb_index.Index.add

    def believe(self: Any, records: Any) -> list[bool]:
        try:
            return add(self, records)
        except lmdb.Error:
            return [True] * len(records)

    return put_in(lmdb_index.Index, "add", believe)


Mutant = Callable[[], Any]  # Any: a context manager; in it the fault is in the code
SEEDS_MAX = 100


@dataclass(frozen=True)
class Life:
    """One that is clean, and that each of its mutants ends early; or one of the next SEEDS_MAX."""

    seed: int
    mutants: tuple[Mutant, ...]
    weather: str = "mixed"
    statements: float = 0.0
    ranks: bool = False

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + SEEDS_MAX)

    def world(self, seed: int) -> World:
        return World(seed, weather=self.weather, statements=self.statements, ranks=self.ranks)


LIVES: tuple[Life, ...] = (
    Life(
        1,
        (
            what_failed_counts_as_fetched,
            attention_alone_is_a_prefix,
            slots_are_not_given_back,
            salts_are_forgotten,
            leases_outlive_their_session,
            tickets_are_kept,
            watches_are_not_ended,
            tenants_share_keys,
        ),
    ),
    Life(2, (removals_are_not_told,)),
    Life(5, (removed_objects_stay_in_the_accounts, what_was_found_is_not_dropped)),
    Life(2, (checksums_are_not_compared, outcomes_are_of_other_objects), "forgetful"),
    Life(14, (doubt_settles_at_once,), "late"),
    Life(15, (regions_are_not_held,), "late"),
    Life(53, (late_bytes_are_not_doubted,), "late"),
    Life(26, (the_tally_is_not_locked,), statements=5.0),
    Life(16, (the_index_is_believed,), "forgetful"),
    Life(22, (commits_that_fail_count,), "failing"),
    Life(20, (chunks_of_failed_puts_are_kept,), "failing"),
    Life(4, (threads_that_load_wake_each_other, what_one_rank_has_is_on_all, lost_ranks_are_forgotten), ranks=True),
)
