"""What a forked child must not keep, and must not free, of the stores that its parent has open."""

from __future__ import annotations

import contextlib
import ctypes
import os
from weakref import WeakSet

_proofs: set[int] = set()  # of the process, as descriptors are
_never_freed_in_children: WeakSet[object] = WeakSet()


def keep_from_children(fd: int) -> None:
    """Let every child that is forked from now on close its copy of ``fd`` at once.

    An flock belongs to the opened file: with a copy, a child that outlives this process would hold the lock for it.
    """
    _proofs.add(fd)


def forget(fd: int) -> None:
    """``fd`` is about to be closed here."""
    _proofs.discard(fd)


def never_free_in_children(shared: object) -> None:
    """Keep a child from freeing its copy, even at its end: that would change memory which this process shares with it.

    An ``lmdb.Environment`` that is freed gives back reader slots in its map: those that its parent reads with.
    """
    _never_freed_in_children.add(shared)


def _after_in_child() -> None:
    for fd in _proofs:
        with contextlib.suppress(OSError):
            os.close(fd)
    _proofs.clear()
    for shared in _never_freed_in_children:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(shared))  # the interpreter drops every other reference at its end


os.register_at_fork(after_in_child=_after_in_child)
