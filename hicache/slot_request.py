"""What a directory for an engine that owns its slots knows of one request, and of its loads and saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache.node import Keep, Node
from hicache.policies.facts import RequestFacts
from hicache.prefetch_record import Part, Prefetch

EngineSlot = tuple[int, int]  # (group, index of a slot in the engine's pool of that group); see SlotUse.slot
SlotsByPage = Mapping[int, Mapping[int, int]]  # group -> page -> slot


@dataclass(slots=True, eq=False)
class SlotLoad:
    """Copies into slots that the engine has named: hicache's until it is ``done``, whatever becomes of the request.

    ``tokens`` are restored then, unless it has ``failed``: nothing in the slots may be used in that case.
    """

    tokens: int
    by_source: dict[str, int] = field(default_factory=dict)  # tokens beyond the engine's own, by ``l2`` and ``l3``
    done: bool = False
    failed: bool = False


@dataclass(slots=True, eq=False)
class SlotSave:
    """Copies out of slots that the engine has named. Until it is ``done`` they hold what is to be saved, but for a step
    that says so: see ``SlotCache.step``."""

    slots: set[EngineSlot] = field(default_factory=set)  # that are still read

    @property
    def done(self) -> bool:
        """Whether no slot is read any more."""
        return not self.slots


@dataclass(slots=True)
class Promise:
    """What ``usable`` has told, and keeps from eviction for the request."""

    own_pages: int
    pages: int
    keep: Keep
    until_s: float
    published: int  # entries that had been published by then: more may make the prefix longer


@dataclass(slots=True, eq=False)
class SlotRecord:
    """Made by ``SlotDirectory.open``, finished by ``SlotDirectory.release``.

    pages    [0, own) the engine's | [own, restored) loaded, or computed | [.., len(keys)) to come
    """

    keys: list[bytes]  # of all full pages
    token_count: int
    page_tokens: int
    own_pages: int = 0  # that the engine has itself, as it last said
    promise: Promise | None = None
    prefetch: Prefetch | None = None
    load: tuple[SlotLoad, set[EngineSlot]] | None = None  # under way, with its targets
    saves: list[SlotSave] = field(default_factory=list)  # under way
    lost: set[Part] = field(default_factory=set)  # whose load failed for this request
    anchor: Node | None = None  # its deepest page that anything is known of: the way to it stays known
    asked_pages: int = 0  # leading pages about which L3 has been asked
    touched_pages: int = 0  # that the write policy has been told of
    facts: RequestFacts | None = None  # what policies are told of it
    is_counted: bool = False  # its tokens are in the stats
    released: bool = False

    @property
    def restorable_pages(self) -> int:
        """Full pages that may be restored: at least the last token is left to compute."""
        return min(len(self.keys), max(0, self.token_count - 1) // self.page_tokens)

    def told(self, now_s: float, *, found_pages: int) -> RequestFacts:
        """What policies are told of it: what is known when it is told of first, one object for all of them."""
        if self.facts is None:
            new_tokens = max(0, self.token_count - found_pages * self.page_tokens)
            self.facts = RequestFacts(now_s, self.token_count, new_tokens)
        return self.facts
