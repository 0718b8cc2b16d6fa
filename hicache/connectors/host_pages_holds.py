"""Pages in doubt, kept from being given to somebody else: what an engine frees of them is freed when L3 has let go."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

HOLDS_ATTRIBUTE = "hicache_holds"  # of a host pool: its PageHolds

Free = Callable[..., int]  # of a pool: (pool, indices) -> how many


class Holder(Protocol):
    """Whoever keeps pages that L3 may still touch from being used for something else."""

    def hold(self, addresses: Iterable[int]) -> None:
        """From now on. An address may be held more than once."""
        ...

    def release(self, addresses: Iterable[int]) -> None:
        """The end of one hold of each; from any thread."""
        ...


class PageHolds:
    """The held pages of one host pool, by the addresses of their extents. Implements Holder. Thread-safe.

    A pool is what SGLang calls a host pool: ``page_size`` indices name a page, ``get_page_buffer_meta(indices)`` tells
    its addresses, and its ``alloc``, ``free`` and ``clear`` are thread-safe. Indices are a tensor or an array.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()
        self._set_aside: list[tuple[frozenset[int], Callable[[], object]]] = []

    @property
    def held_count(self) -> int:
        """Extents that are held."""
        with self._lock:
            return len(self._held)

    @property
    def set_aside_count(self) -> int:
        """Pages that the engine has freed and that are not free yet."""
        with self._lock:
            return len(self._set_aside)

    def hold(self, addresses: Iterable[int]) -> None:
        """See ``Holder.hold``. To be called before the engine can free any of them."""
        with self._lock:
            self._held.update(addresses)

    def release(self, addresses: Iterable[int]) -> None:
        """See ``Holder.release``. Frees what the engine has freed meanwhile and nobody holds any more."""
        with self._lock:
            self._held.subtract(addresses)
            self._held = +self._held
            due = [free for held, free in self._set_aside if not held & self._held.keys()]
            self._set_aside = [each for each in self._set_aside if each[0] & self._held.keys()]
        for free in due:
            free()

    def free(self, original: Free, pool: Any, indices: Any) -> int:  # Any: SGLang's, in whose process alone this runs
        """In place of ``pool.free(indices)``: frees those that are not held, and sets the others aside."""
        with self._lock:
            free_now = self._set_held_aside(original, pool, indices) if self._held else indices
        if len(free_now):
            original(pool, free_now)
        return len(indices)

    def clear(self, original: Callable[..., object], pool: Any) -> None:  # Any: as above
        """In place of ``pool.clear()``: frees everything that is not held."""
        with self._lock:
            self._set_aside.clear()  # freed by the clear, and held anew below
        original(pool)
        if self.held_count:
            pool.free(pool.alloc(pool.available_size()))

    def _set_held_aside(self, original: Free, pool: Any, indices: Any) -> Any:
        """Returns the indices of the pages that are not held."""
        page_size = pool.page_size
        kept: list[int] = []
        for start in range(0, len(indices), page_size):
            page = indices[start : start + page_size]
            held = frozenset(self._held.keys() & set(pool.get_page_buffer_meta(page)[0]))
            if held:
                self._set_aside.append((held, _Freeing(original, pool, page)))
            else:
                kept += range(start, start + page_size)
        return indices[kept]


class _Freeing:
    """A page that is to be freed later."""

    def __init__(self, original: Free, pool: Any, page: Any) -> None:  # Any: SGLang's
        self._original, self._pool, self._page = original, pool, page

    def __call__(self) -> None:
        self._original(self._pool, self._page)


class _IsFreeHooked:
    """Handed to ``free`` of a pool instead of indices: only the hook knows it."""

    def cpu(self) -> None:
        raise _NotHooked

    def __len__(self) -> int:
        raise _NotHooked


class _NotHooked(Exception):
    """What ``free`` itself answers to ``_IsFreeHooked``."""


def free_hook(original: Free, pool: Any, indices: Any) -> int:  # Any: SGLang's
    """Around ``free`` of host pools."""
    if isinstance(indices, _IsFreeHooked):
        return 1
    holds = getattr(pool, HOLDS_ATTRIBUTE, None)
    return original(pool, indices) if holds is None else int(holds.free(original, pool, indices))


def clear_hook(original: Callable[..., object], pool: Any) -> None:  # Any: SGLang's
    """Around ``clear`` of host pools, which they call themselves when they are made."""
    holds = getattr(pool, HOLDS_ATTRIBUTE, None)
    if holds is None:
        original(pool)
    else:
        holds.clear(original, pool)


def holds_of(pool: Any) -> PageHolds | None:  # Any: SGLang's
    """The holds of a host pool, the same for each caller; None where its ``free`` is not hooked."""
    try:
        if pool.free(_IsFreeHooked()) != 1:
            return None
    except Exception:
        return None
    holds: PageHolds | None = getattr(pool, HOLDS_ATTRIBUTE, None)
    if holds is None:
        holds = PageHolds()
        setattr(pool, HOLDS_ATTRIBUTE, holds)
    return holds
