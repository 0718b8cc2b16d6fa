"""Pages of a host pool that an engine owns, as objects in L3: looked up, stored, and brought back."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b

from hicache.client import ClientSettings, DaemonL3
from hicache.connectors.host_pages_staging import Staging
from hicache.keys import FieldValue
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.spec import namespace_digest
from hicache.workers import Job, QueueFull, Workers

SLOT_BYTES_MIN = 4 << 20
SLOTS = 6
MOVES_MAX = 3  # of one call at a time


@dataclass(frozen=True, slots=True)
class PageItem:
    """A page: what it is called, and where its bytes are or shall be, as (address, nbytes) in their order.

    One extent (MLA), two (K and V in different halves of the pool), or two for each layer. An object is its extents one
    behind the other; keys are of any length of at least 1.
    """

    key: bytes
    extents: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        """Of the object."""
        return sum(size_bytes for _, size_bytes in self.extents)


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory of the engine: mapped and of this size for as long as the HostPages lives. ``fd``: its memfd, or None."""

    address: int
    size_bytes: int
    fd: int | None = None


@dataclass(frozen=True)
class PagesSpec:
    """What engines must have equal to share pages: every field that their bytes depend on. Names are the user's.

    ``model`` should be among them: hicached names what differs from another namespace of one model.
    ``object_bytes_max``: of the largest page.
    """

    fields: tuple[tuple[str, FieldValue], ...]
    object_bytes_max: int

    @cached_property
    def descriptor(self) -> dict[str, FieldValue]:
        """Every identity field by its name."""
        return {"kind": "host_pages.1", "key_hash": "blake2b", **dict(self.fields)}

    @cached_property
    def namespace(self) -> bytes:
        """The 32-byte namespace digest."""
        return namespace_digest(self.descriptor)


class HostPages:
    """Moves pages. Thread-safe; no call blocks longer than its deadline, or raises for a fault of L3.

    Every byte goes through memory of our own. hicached never touches a page of the engine, so that when a call has
    returned nobody does, whatever became of it. Pages that are not OK after ``get`` may have been written to by it.
    """

    def __init__(
        self,
        address: str,
        *,
        spec: PagesSpec,
        pools: Sequence[Pool],
        deadline_s: float = 2.0,
        token: str = "",
        client_name: str = "",
        deployment: str = "",
        settings: ClientSettings | None = None,
    ) -> None:
        """Start connecting to hicached at ``address`` and return at once. ``deadline_s`` is for each call.

        Raises ConfigError for an address that cannot be one, and OSError where there is no memory for staging.
        """
        self._spec = spec
        self._pools = list(pools)
        self._deadline_s = deadline_s
        self._staging = Staging(slot_bytes=max(SLOT_BYTES_MIN, spec.object_bytes_max), slot_count=SLOTS)
        try:
            self.l3 = DaemonL3(
                address,
                spec=spec,
                memory=self._staging,
                token=token,
                client_name=client_name,
                deployment=deployment,
                settings=settings,
            )
        except BaseException:
            self._staging.close()
            raise
        self._workers = Workers("hicache-pages", threads=SLOTS, queue_max=4 * SLOTS)

    def add_pool(self, pool: Pool) -> None:
        """Pages may lie in ``pool`` from now on."""
        self._pools.append(pool)

    def wait_ready(self, *, timeout_s: float) -> bool:
        """Whether hicached is connected within ``timeout_s``. An engine need not wait for this."""
        return self.l3.wait_ready(timeout_s=timeout_s)

    def contains(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[bool]:
        """Whether each page is there now. False, too, where L3 cannot say."""
        outcomes = self.l3.lookup([self._object_key(key) for key in keys], timeout_s=self._timeout_s(deadline_s))
        return [outcome is Outcome.OK for outcome in outcomes]

    def put(self, items: Sequence[PageItem], *, deadline_s: float | None = None) -> list[Outcome]:
        """Store pages. OK or EXISTS (nothing was copied) means that hicached keeps them across restarts."""
        return self._move(items, deadline_s, is_get=False)

    def get(self, items: Sequence[PageItem], *, deadline_s: float | None = None) -> list[Outcome]:
        """Bring pages in. OK means complete and verified where it lies."""
        return self._move(items, deadline_s, is_get=True)

    def delete(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[Outcome]:
        """Remove pages: OK, or ABSENT where there was none."""
        return self.l3.delete([self._object_key(key) for key in keys], timeout_s=self._timeout_s(deadline_s))

    def clear(self, *, deadline_s: float | None = None) -> bool:
        """Remove all pages of this spec (and tenant). Whether that was done, as far as L3 can tell."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up what is in flight and disconnect. Idempotent. Nothing touches the pools afterwards."""
        self.l3.close()
        self._workers.close(timeout_s=1.0)
        self._staging.close()

    def _timeout_s(self, deadline_s: float | None) -> float:
        return self._deadline_s if deadline_s is None else deadline_s

    def _object_key(self, key: bytes) -> bytes:
        """``prefix of the namespace | hash of the key``: 48 bytes, whatever the engine calls its pages."""
        return self._spec.namespace[:16] + blake2b(key, digest_size=32).digest()

    def _unfit(self, item: PageItem) -> Outcome | None:
        for address, size_bytes in item.extents:
            if size_bytes < 1 or not any(
                pool.address <= address and address + size_bytes <= pool.address + pool.size_bytes
                for pool in self._pools
            ):
                return Outcome.BAD_RANGE
        if not item.extents:
            return Outcome.BAD_RANGE
        return Outcome.TOO_LARGE if item.size_bytes > self._spec.object_bytes_max else None

    def _move(self, items: Sequence[PageItem], deadline_s: float | None, *, is_get: bool) -> list[Outcome]:
        call = _Call(self, items, ends_at_s=time.monotonic() + self._timeout_s(deadline_s), is_get=is_get)
        return call.run()


class _Piece:
    """Consecutive items that lie in one slot, from when it was taken until nobody else touches it."""

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


class _Call:
    """One get or put of pages. In the thread of its caller, the only one that touches the pages."""

    def __init__(self, pages: HostPages, items: Sequence[PageItem], *, ends_at_s: float, is_get: bool) -> None:
        self._pages = pages
        self._staging = pages._staging
        self._items = items
        self._ends_at_s = ends_at_s
        self._is_get = is_get
        self._outcomes: list[Outcome | None] = [pages._unfit(item) for item in items]
        self._running: deque[tuple[Job[None], _Piece]] = deque()

    def run(self) -> list[Outcome]:
        if not self._is_get:
            self._leave_out_present()
        end = Outcome.DEADLINE
        for positions in self._batches():
            if len(self._running) == MOVES_MAX:
                self._finish()
            slot = self._staging.take(deadline_s=self._ends_at_s)
            if slot is None:
                end = Outcome.DEADLINE if self._left_s() <= 0 else Outcome.UNAVAILABLE
                break
            piece = _Piece(self._staging, slot, positions)
            if not self._is_get:
                self._gather(piece)
            try:
                job = self._pages._workers.submit(partial(self._ask, piece))
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

    def _leave_out_present(self) -> None:
        wanted = [position for position, outcome in enumerate(self._outcomes) if outcome is None]
        keys = [self._pages._object_key(self._items[position].key) for position in wanted]
        for position, outcome in zip(wanted, self._pages.l3.lookup(keys, timeout_s=self._left_s()), strict=True):
            if outcome is Outcome.OK:
                self._outcomes[position] = Outcome.EXISTS
            elif outcome is not Outcome.ABSENT:
                self._outcomes[position] = outcome

    def _batches(self) -> Iterator[list[int]]:
        batch: list[int] = []
        batch_bytes = 0
        for position, outcome in enumerate(self._outcomes):
            if outcome is not None:
                continue
            size_bytes = self._items[position].size_bytes
            if batch and batch_bytes + size_bytes > self._staging.slot_bytes:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(position)
            batch_bytes += size_bytes
        if batch:
            yield batch

    def _ask(self, piece: _Piece) -> None:
        items: list[L3Item] = []
        offset = piece.slot
        for position in piece.positions:
            item = self._items[position]
            items.append(L3Item(self._pages._object_key(item.key), offset, item.size_bytes))
            offset += item.size_bytes
        transfer = self._pages.l3.get if self._is_get else self._pages.l3.put
        transfer(items, timeout_s=self._left_s(), done=piece.settle)

    def _finish(self) -> None:
        job, piece = self._running.popleft()
        job.future.result()
        outcomes = piece.outcomes_or_doubt()
        if outcomes is None:
            return
        for position, outcome in zip(piece.positions, outcomes, strict=True):
            self._outcomes[position] = outcome
        if self._is_get:
            self._scatter(piece)
        self._staging.give_back(piece.slot)

    def _gather(self, piece: _Piece) -> None:
        target = _address_of(self._staging.buffer) + piece.slot
        for position in piece.positions:
            for address, size_bytes in self._items[position].extents:
                ctypes.memmove(target, address, size_bytes)
                target += size_bytes

    def _scatter(self, piece: _Piece) -> None:
        source = _address_of(self._staging.buffer) + piece.slot
        for position in piece.positions:
            for address, size_bytes in self._items[position].extents:
                if self._outcomes[position] is Outcome.OK:
                    ctypes.memmove(address, source, size_bytes)
                source += size_bytes


def _address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
