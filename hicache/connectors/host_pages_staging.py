"""Pages that hicached cannot touch itself: they pass through shared memory of our own."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

from hicache.client import DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.sealed_memory import sealed_memory
from hicache.workers import Job, QueueFull, Workers

SLOT_BYTES_MIN = 8 << 20  # smaller ones cost too many requests (measured)
SLOT_COUNT = 6  # three calls of MOVES_MAX pieces each
MOVES_MAX = 2  # pieces of one call at a time: one is copied while hicached has the other


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
        self.fd: int | None
        self.fd, mapping = sealed_memory("hicache-staging", self.size_bytes)
        self.buffer = memoryview(mapping)

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


@dataclass(frozen=True, slots=True)
class StagedObject:
    """One object, and where its bytes are or shall be in memory of the engine."""

    key: bytes
    extents: tuple[tuple[int, int], ...]
    size_bytes: int


class StagedMove:
    """One get or put of objects. In the thread of its caller, the only one that touches memory of the engine.

    [slot: object | object | ... ]     a piece: gathered here and read by hicached, or written by it and scattered here
    """

    def __init__(
        self, l3: DaemonL3, staging: Staging, workers: Workers, objects: Sequence[StagedObject], *, ends_at_s: float
    ) -> None:
        """``ends_at_s`` is on ``time.monotonic``."""
        self._l3 = l3
        self._staging = staging
        self._workers = workers
        self._objects = objects
        self._ends_at_s = ends_at_s
        self._is_get = False
        self._outcomes: list[Outcome | None] = [None] * len(objects)
        self._running: deque[tuple[Job[None], _Piece]] = deque()

    def get(self) -> list[Outcome]:
        """Every object in its place that is OK; the others' places may have been written to."""
        self._is_get = True
        return self._run()

    def put(self) -> list[Outcome]:
        """Store what is not there yet; what is costs a lookup, and no copy."""
        present = self._l3.lookup([each.key for each in self._objects], timeout_s=self._left_s())
        for position, outcome in enumerate(present):
            if outcome is not Outcome.ABSENT:
                self._outcomes[position] = Outcome.EXISTS if outcome is Outcome.OK else outcome
        return self._run()

    def _run(self) -> list[Outcome]:
        end = Outcome.DEADLINE  # of what is not even asked for
        for positions in self._batches():
            if len(self._running) == MOVES_MAX:
                self._finish()
            slot = self._staging.take(deadline_s=self._ends_at_s)
            if slot is None:
                end = Outcome.DEADLINE if self._left_s() <= 0 else Outcome.UNAVAILABLE
                break
            piece = _Piece(self._staging, slot, positions)
            try:
                if not self._is_get:
                    self._copy(piece)
                job = self._workers.submit(partial(self._ask, piece))
            except QueueFull:
                self._staging.give_back(slot)
                end = Outcome.UNAVAILABLE
                break
            self._running.append((job, piece))
        while self._running:
            self._finish()
        return [end if outcome is None else outcome for outcome in self._outcomes]

    def _left_s(self) -> float:
        return self._ends_at_s - time.monotonic()

    def _batches(self) -> Iterator[list[int]]:
        """The positions of objects without an outcome, as many as fit into a slot."""
        batch: list[int] = []
        batch_bytes = 0
        for position, outcome in enumerate(self._outcomes):
            if outcome is not None:
                continue
            size_bytes = self._objects[position].size_bytes
            if batch and batch_bytes + size_bytes > self._staging.slot_bytes:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(position)
            batch_bytes += size_bytes
        if batch:
            yield batch

    def _ask(self, piece: _Piece) -> None:
        """In a thread of the workers."""
        items: list[L3Item] = []
        offset = piece.slot
        for position in piece.positions:
            each = self._objects[position]
            items.append(L3Item(each.key, offset, each.size_bytes))
            offset += each.size_bytes
        transfer = self._l3.get if self._is_get else self._l3.put
        transfer(items, timeout_s=self._left_s(), done=piece.settle)

    def _finish(self) -> None:
        """Wait for the piece that was asked for first. L3 keeps the deadline, once a thread has asked it."""
        job, piece = self._running.popleft()
        wait([job.future], timeout=max(0.0, self._left_s()))
        if self._workers.withdraw(job):
            self._staging.give_back(piece.slot)
            return
        job.future.result()
        outcomes = piece.outcomes_or_doubt()
        if outcomes is None:
            return
        for position, outcome in zip(piece.positions, outcomes, strict=True):
            self._outcomes[position] = outcome
        if self._is_get:
            self._copy(piece)
        self._staging.give_back(piece.slot)

    def _copy(self, piece: _Piece) -> None:
        """Gather the objects of a piece, or scatter those of them that are right."""
        staged = ctypes.addressof(ctypes.c_char.from_buffer(self._staging.buffer)) + piece.slot
        for position in piece.positions:
            each = self._objects[position]
            if not self._is_get:
                for address, size_bytes in each.extents:
                    ctypes.memmove(staged, address, size_bytes)
                    staged += size_bytes
            elif self._outcomes[position] is Outcome.OK:
                for address, size_bytes in each.extents:
                    ctypes.memmove(address, staged, size_bytes)
                    staged += size_bytes
            else:
                staged += each.size_bytes


class _Piece:
    """Objects that lie in one slot, from when it was taken until nobody else touches it."""

    def __init__(self, staging: Staging, slot: int, positions: list[int]) -> None:
        self.slot = slot
        self.positions = positions
        self._staging = staging
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] | None = None
        self._is_in_doubt = False

    def settle(self, outcomes: list[Outcome]) -> None:
        """The ``done`` of L3, from any thread: the slot is ours again."""
        with self._lock:
            self._outcomes = outcomes
            if self._is_in_doubt:
                self._staging.give_back(self.slot, was_in_doubt=True)

    def outcomes_or_doubt(self) -> list[Outcome] | None:
        """The call has ended: its outcomes, and the slot to be given back; or None, and it is left to ``settle``."""
        with self._lock:
            if self._outcomes is None:
                self._is_in_doubt = True
                self._staging.doubt()
            return self._outcomes
