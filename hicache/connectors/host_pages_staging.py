"""Shared memory that pages pass through on their way between an engine's pool and L3: a ring of equal slots."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time


class Staging:
    """Implements SharedMemory: a sealed memfd of ``slot_count`` slots, all its pages there. Thread-safe.

    A slot has one user at a time. Who asks L3 about it gives it back in the ``done`` of that call: then hicached
    touches none of its bytes any more. A slot whose call has ended without that is *in doubt* until it comes.
    """

    def __init__(self, *, slot_bytes: int, slot_count: int) -> None:
        """Raises OSError where there is no memory for it."""
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.slot_count = slot_count
        self.size_bytes = self.slot_bytes * slot_count
        self._changed = threading.Condition()
        self._free = [number * self.slot_bytes for number in range(slot_count)]
        self._in_doubt = 0
        self.fd: int | None = os.memfd_create("hicache-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, self.size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.buffer = memoryview(mmap.mmap(self.fd, self.size_bytes))
        except BaseException:
            self.close()
            raise

    @property
    def slots_in_doubt(self) -> int:
        """Slots that nobody uses and that hicached may still touch."""
        with self._changed:
            return self._in_doubt

    def take(self, *, deadline_s: float) -> int | None:
        """Where a free slot begins, waiting for one until ``deadline_s`` (``time.monotonic``).

        None when none came, and at once when none can: every slot is in doubt.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._free or self._in_doubt == self.slot_count, max(0.0, deadline_s - time.monotonic())
            )
            return self._free.pop() if self._free else None

    def give_back(self, slot: int, *, was_in_doubt: bool = False) -> None:
        """The end of its use."""
        with self._changed:
            self._free.append(slot)
            self._in_doubt -= was_in_doubt
            self._changed.notify_all()

    def doubt(self) -> None:
        """The call about a taken slot has ended, and its ``done`` has not come."""
        with self._changed:
            self._in_doubt += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with the last view of it. Idempotent.

        hicached may still touch what it mapped: nobody reads that any more.
        """
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
            self.buffer = memoryview(b"")
