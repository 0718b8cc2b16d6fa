"""What happens to the LMDB store, whose own I/O is in C: at its transactions, its mapped payloads, and its space."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lmdb

from hicache.backends import lmdb_env, lmdb_open, marker, space
from hicache.backends.lmdb_env import LmdbEnvironment
from hicache.backends.lmdb_layout import CHUNK_BYTES, PAGE_BYTES
from hicache.backends.lmdb_slab import SLAB_NAME, Slab
from tests.simulation.disk import DiskFaults
from tests.simulation.patching import set_in
from tests.simulation.scheduler import Scheduler

BUS_SHARE = 0.2  # of errors of the mapped file: then there is no error to return, and the process dies
TORN_SHARE = 0.2  # of payloads, of which a part lies there while others run, or die
TAIL_CHUNKS_MAX = 8
LOST_PAGES_SHARE = 0.3  # at a power loss, of the pages of a store that was not closed


class LmdbDisk:
    """In place of what LMDB and the kernel do under the store.

    Where a thread would wait in C for LMDB's one writer, a fiber waits for a lock; a transaction or a commit that fails
    is rolled back, as LMDB does; a page of the mapped payloads that cannot be read or written is a SIGBUS.
    """

    def __init__(self, scheduler: Scheduler, threading: Any, faults: DiskFaults, *, die: Callable[[], None]) -> None:
        """``die``: what SIGBUS does to the daemon, which is the calling process."""
        self._sim, self._threading, self._faults, self._die = scheduler, threading, faults, die
        self.boots = 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            set_in(stack, LmdbEnvironment, "write", self._writing(LmdbEnvironment.write))
            for name in ("read", "read_copies"):
                set_in(stack, LmdbEnvironment, name, self._reading(getattr(LmdbEnvironment, name)))
            for name in ("write", "write_sealed", "read", "read_sealed"):
                set_in(stack, Slab, name, self._moving(getattr(Slab, name), is_read=name.startswith("read")))
            calls = _Calls(self._faults)
            for module in (space, lmdb_env):
                set_in(stack, module, "os", calls)
            set_in(stack, lmdb_open, "write_marker", self._marking(marker.write_marker))
            for module in (marker, lmdb_open):
                set_in(stack, module, "current_boot_id", lambda: f"boot {self.boots}")
            yield

    def lose_power(self, directory: Path) -> None:
        """Another boot finds ``directory``: pages that had not reached the medium are what they were, or nothing."""
        self.boots += 1
        found = marker.read_any_marker(directory)
        if found is not None and not found.is_clean:
            for name in (lmdb_env.DATA_NAME, SLAB_NAME):
                _lose_pages(directory / name, self._sim.rng)

    def lose_tail(self, directory: Path) -> None:
        """The file of the payloads has lost its end."""
        path = directory / SLAB_NAME
        if path.exists():
            lost_bytes = self._sim.rng.randint(1, TAIL_CHUNKS_MAX) * CHUNK_BYTES
            os.truncate(path, max(0, path.stat().st_size - lost_bytes))

    def _meet(self, *, is_read: bool = False) -> None:
        try:
            self._faults.meet(is_read=is_read)
        except OSError as error:
            kind = lmdb.DiskError if is_read or error.errno != space.errno.ENOSPC else lmdb.MapFullError
            raise kind("simulated", error.errno) from error

    def _writing(self, real: Callable[[LmdbEnvironment], Any]) -> Callable[[LmdbEnvironment], Any]:
        @contextmanager
        def write(env: LmdbEnvironment) -> Iterator[Any]:
            if "writer" not in vars(env):
                vars(env)["writer"] = self._threading.Lock()
            with vars(env)["writer"]:
                self._meet()
                with real(env) as txn:
                    yield _Transaction(txn, self._meet)
                    self._meet()  # the commit

        return write

    def _reading(self, real: Callable[[LmdbEnvironment], Any]) -> Callable[[LmdbEnvironment], Any]:
        @contextmanager
        def read(env: LmdbEnvironment) -> Iterator[Any]:
            self._meet(is_read=True)
            with real(env) as txn:
                self._sim.maybe_switch()
                yield txn

        return read

    def _moving(self, real: Callable[..., Any], *, is_read: bool) -> Callable[..., Any]:
        """``real`` has a payload, and then its chunks, as its last but one arguments, or its last."""

        def move(slab: Slab, *arguments: Any) -> Any:
            payload, chunk_ids = _payload_and_ids(arguments)
            self._meet_memory(is_read=is_read)
            first = int(chunk_ids[0])
            if first < len(slab._pages.mapped):
                held = memoryview(slab._pages.mapped[first].data)[: payload.nbytes]
                if is_read:
                    self._faults.spoil(held)
                elif self._sim.current is not None and self._sim.rng.random() < TORN_SHARE:
                    part = self._sim.rng.randrange(len(held))
                    held[:part] = payload.cast("B")[:part]
                    self._sim.maybe_switch()
            return real(slab, *arguments)

        return move

    def _meet_memory(self, *, is_read: bool) -> None:
        try:
            self._faults.meet(is_read=is_read)
        except OSError:
            if self._sim.rng.random() < BUS_SHARE:
                self._die()
                self._sim.give_way()

    def _marking(self, real: Callable[..., None]) -> Callable[..., None]:
        def write_marker(directory: Path, marked: Any) -> None:
            self._faults.meet()
            real(directory, marked)

        return write_marker


class _Transaction:
    """A write transaction whose changes fail now and then."""

    def __init__(self, txn: Any, meet: Callable[[], None]) -> None:
        self._txn, self._meet = txn, meet

    def put(self, *arguments: Any, **options: Any) -> Any:
        self._meet()
        return self._txn.put(*arguments, **options)

    def delete(self, *arguments: Any, **options: Any) -> Any:
        self._meet()
        return self._txn.delete(*arguments, **options)

    def __getattr__(self, name: str) -> Any:  # Any: whatever a transaction has
        return getattr(self._txn, name)


class _Calls:
    """In place of the module ``os``, where space is taken."""

    def __init__(self, faults: DiskFaults) -> None:
        self._faults = faults

    def posix_fallocate(self, descriptor: int, offset: int, size_bytes: int) -> None:
        self._faults.meet()
        os.posix_fallocate(descriptor, offset, size_bytes)

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        return getattr(os, name)


def _payload_and_ids(arguments: tuple[Any, ...]) -> tuple[memoryview, Any]:
    """Of a call of the slab, with or without a key before them, or a cipher behind them."""
    at = next(number for number, argument in enumerate(arguments) if isinstance(argument, memoryview))
    return arguments[at], arguments[at + 1]


def _lose_pages(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        for offset in range(0, path.stat().st_size, PAGE_BYTES):
            if rng.random() < LOST_PAGES_SHARE:
                file.seek(offset)
                file.write(rng.choice((bytes(PAGE_BYTES), rng.randbytes(16) * (PAGE_BYTES // 16))))
