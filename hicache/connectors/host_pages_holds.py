"""Pages in doubt, kept from being given to somebody else: what an engine frees of them is freed when L3 has let go."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

HOLDS_ATTRIBUTE = "hicache_holds"  # of a host pool: its PageHolds

Free = Callable[..., int]  # of a pool: (pool, indices) -> how many


class Holder(Protocol):
    """Whoever keeps pages that L3 may still touch from being used for something else."""

    def hold(self, pages: Iterable[int]) -> None:
        """From now on. A page may be held more than once."""
        ...

    def release(self, pages: Iterable[int]) -> None:
        """The end of one hold of each; from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class OwnedPage:
    """A page by its number in the pool that gives it out.

    That may be another pool than the one its bytes are in: SGLang's indexer and draft pools go by the indices of the
    attention pages, and are never freed themselves.
    """

    holder: Holder
    page: int


class PageHolds:
    """The held pages of one host pool. Implements Holder. Thread-safe.

    A pool is what SGLang calls a host pool: ``page_size`` indices name a page, and its ``alloc``, ``free`` and
    ``clear`` are thread-safe. Indices are a tensor or an array. Lock order: that of the holds, then that of the pool.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: Counter[int] = Counter()
        self._set_aside: dict[int, list[Callable[[], object]]] = {}  # by page: how to free what of it was freed

    @property
    def held_count(self) -> int:
        """Pages that are held."""
        with self._lock:
            return len(self._held)

    @property
    def set_aside_count(self) -> int:
        """Pages that the engine has freed and that are not free yet."""
        with self._lock:
            return len(self._set_aside)

    def hold(self, pages: Iterable[int]) -> None:
        """See ``Holder.hold``. To be called before the engine can free any of them."""
        with self._lock:
            self._held.update(pages)

    def release(self, pages: Iterable[int]) -> None:
        """See ``Holder.release``. Frees what the engine has freed meanwhile and nobody holds any more."""
        with self._lock:
            self._held.subtract(pages)
            self._held = +self._held
            for page in self._set_aside.keys() - self._held.keys():
                for free in self._set_aside.pop(page):
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
            self._set_aside.clear()  # freed by the clear, and set aside anew below
            original(pool)
            if self._held:
                pool.free(pool.alloc(pool.available_size()))

    def _set_held_aside(self, original: Free, pool: Any, indices: Any) -> Any:
        """Returns the indices that are not of held pages."""
        kept: list[int] = []
        held: dict[int, list[int]] = {}
        for position, page in enumerate((indices // pool.page_size).tolist()):
            (held.setdefault(page, []) if page in self._held else kept).append(position)
        for page, positions in held.items():
            self._set_aside.setdefault(page, []).append(_Freeing(original, pool, indices[positions]))
        return indices[kept] if held else indices


class _Freeing:
    """Indices that are to be freed later."""

    def __init__(self, original: Free, pool: Any, indices: Any) -> None:  # Any: SGLang's
        self._original, self._pool, self._indices = original, pool, indices

    def __call__(self) -> None:
        self._original(self._pool, self._indices)


class _Asking:
    """Handed to the methods of a pool's class in place of a pool: only a hook knows it."""


def free_hook(original: Free, pool: Any, indices: Any) -> int:  # Any: SGLang's
    """Around ``free`` of host pools."""
    if isinstance(pool, _Asking):
        return True
    holds = getattr(pool, HOLDS_ATTRIBUTE, None)
    return original(pool, indices) if holds is None else int(holds.free(original, pool, indices))


def clear_hook(original: Callable[..., object], pool: Any) -> object:  # Any: SGLang's
    """Around ``clear`` of host pools, which they call themselves when they are made."""
    if isinstance(pool, _Asking):
        return True
    holds = getattr(pool, HOLDS_ATTRIBUTE, None)
    return original(pool) if holds is None else holds.clear(original, pool)


def holds_of(pool: Any) -> PageHolds | None:  # Any: SGLang's
    """The holds of a host pool, the same for each caller; None where its ``free`` or its ``clear`` is not hooked."""
    try:
        if type(pool).free(_Asking(), None) is not True or type(pool).clear(_Asking()) is not True:
            return None
    except Exception:  # whatever a method without a hook says to what is no pool
        return None
    holds: PageHolds | None = getattr(pool, HOLDS_ATTRIBUTE, None)
    if holds is None:
        holds = PageHolds()
        setattr(pool, HOLDS_ATTRIBUTE, holds)
    return holds
