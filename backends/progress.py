"""How far the opening of a store has come: those who read its index say it, and whoever opens it hears it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Of the thread that opens a store: openers of five backends need not hand it down through all their calls.
_listener: ContextVar[Callable[[int], None] | None] = ContextVar("hicache_open_progress", default=None)


@contextmanager
def told_of_progress(listener: Callable[[int], None]) -> Iterator[None]:
    """Within it, in this thread, ``listener(count)`` is called whenever ``count`` more objects have been read, or
    with 0 when something else that takes long has got on."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def tell_progress(count: int) -> None:
    """``count`` more objects of the store that this thread opens have been read."""
    if (listener := _listener.get()) is not None:
        listener(count)
