"""What is known of one request's prefetch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.node import Keep
from hicache.outcome import Outcome
from hicache.read_admission import Fetching

Part = tuple[int, int]  # (page, group)
REPLANS_MAX = 2  # a prompt whose objects fail one by one must not be tried for ever


@dataclass(slots=True)
class Lookup:
    """What L3 is asked, and since when."""

    parts: Sequence[Part]
    asked_s: float
    is_counted: bool = False  # as late: one answer does not tell twice that everything has changed


@dataclass(slots=True, eq=False)
class Prefetch:
    """One request's prefetch.

    pages    [0, own) the engine has itself, in its L1 which is not ours
             [0, base) usable before | [base, planned) promised | [planned, found) dropped for want of room
             being fetched, and published in page order: [next, target); target <= planned
    """

    keys: Sequence[bytes]
    remote: list[int]  # what L3 is believed to have of each page, as a mask of groups
    own_pages: int = 0
    base_pages: int = 0
    planned_pages: int = 0
    target_pages: int = 0
    next_page: int = 0
    replans_left: int = REPLANS_MAX
    settled: bool = False
    concluded: bool = False  # the request has taken what it could, or is gone
    is_probe: bool = False  # for nobody: to find out how fast L3 is
    handles: dict[Part, int] = field(default_factory=dict)
    arrived: dict[Part, Outcome] = field(default_factory=dict)
    keeps: list[Keep] = field(default_factory=list)  # of each plan: what it uses that is here, and what has arrived
    fetched: set[Part] = field(default_factory=set)
    awaited: set[Part] = field(default_factory=set)  # of the plan: what another request's prefetch is fetching
    shared: set[Part] = field(default_factory=set)  # what has come in this way
    has_missed: bool = False  # something awaited has not come
    fault: Outcome | None = None  # the first one
    patient_until_s: float = math.inf  # as its mode says
    give_up_at_s: float = math.inf  # when waiting longer costs more than it can bring; by the clock of the index
    looking: Lookup | None = None  # what L3 is being asked
    fetching: Fetching | None = None  # what is measured of it
