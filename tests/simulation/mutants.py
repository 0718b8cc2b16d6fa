"""Faults put into the code on purpose: each must end some life early, or the simulation would not find it either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from hicache import front, prefetch, prefix, room, transfers
from hicache.backends import events, file_accounts, file_objects
from hicache.client import daemon_l3, memory_link, transfer
from hicache.daemon import budget, call_tally, memory, sessions, watch
from hicache.outcome import Outcome


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


@dataclass(frozen=True)
class Found:
    """In which lives a mutant is found: one of ``lives`` from ``seed`` on."""

    mutant: Callable[[], Any]
    weather: str = "mixed"
    seed: int = 1
    lives: int = 8
    statements: float = 0.0


MUTANTS = (
    Found(regions_are_not_held, "late", seed=26, lives=4),
    Found(late_bytes_are_not_doubted, "freezing", seed=26, lives=4),
    Found(doubt_settles_at_once, "freezing", seed=27),
    Found(outcomes_are_of_other_objects, "forgetful", seed=8),
    Found(what_failed_counts_as_fetched),
    Found(attention_alone_is_a_prefix, seed=8),
    Found(slots_are_not_given_back, seed=2),
    Found(what_was_found_is_not_dropped),
    Found(tenants_share_keys),
    Found(salts_are_forgotten),
    Found(leases_outlive_their_session, seed=2),
    Found(tickets_are_kept),
    Found(removals_are_not_told),
    Found(watches_are_not_ended),
    Found(checksums_are_not_compared, "forgetful", seed=6),
    Found(removed_objects_stay_in_the_accounts),
    Found(the_tally_is_not_locked, seed=5, statements=5),
)
