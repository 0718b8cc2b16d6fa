"""The memory that L3 moves objects into and out of, as its clients see it."""

from __future__ import annotations

from typing import Protocol


class SharedMemory(Protocol):
    """L2: one mapping that lives longer than any client it is given to.

    A client takes slices of ``buffer`` only while a call of its own runs and drops them before it reports the call
    done. hicached maps ``fd`` itself, so the bytes behind it stay touchable until ``done`` was called for every item,
    whatever happens to the mapping here.
    """

    @property
    def fd(self) -> int | None:
        """A memfd of exactly ``size_bytes``, sealed against shrinking; None where the bytes cannot be shared."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole mapping."""
        ...

    @property
    def buffer(self) -> memoryview:
        """The mapping, writable, as flat unsigned bytes."""
        ...
