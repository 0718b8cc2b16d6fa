"""Faults put into the code on purpose: each must end some life early, or the simulation would not find it either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from hicache import front
from hicache.backends import file_objects
from hicache.client import memory_link, transfer
from hicache.daemon import budget, memory, sessions
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


MUTANTS: tuple[tuple[Callable[[], Any], str, int], ...] = (  # with the weather and the seed of a life that finds it
    (regions_are_not_held, "freezing", 24),
    (late_bytes_are_not_doubted, "freezing", 18),
    (checksums_are_not_compared, "forgetful", 1),
    (leases_outlive_their_session, "", 1),
    (tenants_share_keys, "", 1),
    (salts_are_forgotten, "", 1),
    (tickets_are_kept, "", 1),
)
