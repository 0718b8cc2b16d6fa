"""Write policy: which pages are copied down from L1, and when.

A policy knows block keys only, so that it can be replayed on a trace of requests without a cache around it::

    policy.touch(keys)            once for each page of each request, when it has been restored or computed
    policy.admits(keys)           how many of these pages go down now

It decides about prefixes: a page that goes down takes all pages before it along.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hicache.errors import ConfigError

_ROWS = 4
_CELLS_PER_PAGE = 4  # of a row: one row takes a page for another in at most 1 - exp(-1/4) of all cases
_KEY_BYTES = _ROWS * 4


class WritePolicy(Protocol):
    """Pages are those of one sequence, in order; one that follows others is named after they have been."""

    @property
    def ahead_share(self) -> float:
        """The share of each pool that is kept free, or written down, by writing what was used least recently.

        0: nothing is written because it would be evicted, and eviction spares nothing that has not been written.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> bool:
        """A request uses these pages. Returns whether that can change what ``admits`` says of pages that are here."""
        ...

    def admits(self, keys: Sequence[bytes]) -> int:
        """How many of these pages, from the first on, are copied down when they are complete; the rest waits."""
        ...


class WriteThrough:
    """Every page, as soon as it is complete."""

    ahead_share = 0.0

    def touch(self, keys: Sequence[bytes]) -> bool:
        return False

    def admits(self, keys: Sequence[bytes]) -> int:
        return len(keys)


class WriteThroughSelective:
    """A page goes down at its ``touches``-th touch: what is used once costs no bandwidth and no room below.

    Touches are counted by block key, wherever the page is: one that was evicted and computed again has been touched
    twice, and so has one that was found in L2 or L3. A touch is remembered for the next ``remembered_pages`` touches,
    and forgotten before twice as many have followed.
    """

    ahead_share = 0.0

    def __init__(self, touches: int = 2, *, remembered_pages: int = 1 << 18) -> None:
        if type(touches) is not int or not 1 <= touches <= 100:
            raise ConfigError("touches", touches, "1 to 100 touches of a page before it is written down")
        if type(remembered_pages) is not int or not 1 <= remembered_pages <= 1 << 28:
            raise ConfigError("remembered_pages", remembered_pages, f"1 to {1 << 28} pages, of 32 bytes of memory each")
        self.touches = touches
        self._counts = TouchCounts(remembered_pages)

    def touch(self, keys: Sequence[bytes]) -> bool:
        self._counts.touch(keys)
        return True

    def admits(self, keys: Sequence[bytes]) -> int:
        """No page was touched more often than those before it, so the last one can be searched for by halves."""
        return bisect_left(keys, x=True, key=lambda key: self._counts.count(key) < self.touches)


class WriteBack:
    """Nothing is written when it is computed: what would be evicted from L1 is copied to L2 first, and what would be
    evicted from L2, or is left when the cache is flushed or closed, to L3."""

    def __init__(self, *, ahead_share: float = 0.125) -> None:
        if type(ahead_share) not in (int, float) or not 0 < ahead_share <= 0.5:
            raise ConfigError("ahead_share", ahead_share, "a share of each pool above 0 and at most 0.5")
        self.ahead_share = ahead_share

    def touch(self, keys: Sequence[bytes]) -> bool:
        return False

    def admits(self, keys: Sequence[bytes]) -> int:
        return 0


class TouchCounts:
    """How often keys were touched lately, in 32 bytes for each of ``remembered`` touches, whatever the keys are.

    Two count-min sketches: touches go into the newer one, and after ``remembered`` of them the older one is emptied
    and becomes the newer. What is remembered is never counted too low. It is counted too high when its cells of all
    rows are taken by others: for at most 0.24 % of keys and sketch, when that is full.
    """

    def __init__(self, remembered: int) -> None:
        width = 1 << (_CELLS_PER_PAGE * remembered - 1).bit_length()
        self._remembered = remembered
        self._mask = width - 1
        self._newer = np.zeros((_ROWS, width), np.uint8)
        self._older = np.zeros((_ROWS, width), np.uint8)
        self._touched = 0  # in the newer one

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count each of ``keys``, all different, once more."""
        start = 0
        while start < len(keys):
            if self._touched == self._remembered:
                self._newer, self._older = self._older, self._newer
                self._newer.fill(0)
                self._touched = 0
            some = keys[start : start + self._remembered - self._touched]
            self._add(some)
            self._touched += len(some)
            start += len(some)

    def count(self, key: bytes) -> int:
        """At least the touches of ``key`` that are remembered; at most 255 of each sketch."""
        cells = self._cells([key])
        return sum(int(self._least(sketch, cells)[0]) for sketch in (self._newer, self._older))

    def _add(self, keys: Sequence[bytes]) -> None:
        cells = self._cells(keys)
        counts = np.minimum(self._least(self._newer, cells), 254) + np.uint8(1)
        for row in range(_ROWS):  # a cell that several keys share keeps the highest of their counts
            np.maximum.at(self._newer[row], cells[row], counts)

    @staticmethod
    def _least(sketch: NDArray[np.uint8], cells: NDArray[np.uint32]) -> NDArray[np.uint8]:
        counts: NDArray[np.uint8] = np.minimum.reduce([sketch[row][cells[row]] for row in range(_ROWS)])
        return counts

    def _cells(self, keys: Sequence[bytes]) -> NDArray[np.uint32]:
        """The cell of each key in each row. Keys are hashes: their bytes are as good as random."""
        packed = b"".join(key[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0") for key in keys)
        return np.frombuffer(packed, np.uint32).reshape(len(keys), _ROWS).T & np.uint32(self._mask)


WRITE_POLICIES: dict[str, Callable[[], WritePolicy]] = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
}


def write_policy_of(choice: str | WritePolicy) -> WritePolicy:
    """The policy of that name, with its defaults, or ``choice`` itself. Raises ConfigError for anything else."""
    if isinstance(choice, str) and choice in WRITE_POLICIES:
        return WRITE_POLICIES[choice]()
    is_policy = all(hasattr(choice, name) for name in ("ahead_share", "touch", "admits"))
    if isinstance(choice, str | type) or not is_policy:
        raise ConfigError(
            "write_policy", choice, f"{', '.join(WRITE_POLICIES)}, or an object of hicache.policies.write"
        )
    return choice
