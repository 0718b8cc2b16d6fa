"""Pages of a host pool that an engine owns, as objects in L3: looked up, stored, and brought back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b

from hicache.client import ClientSettings, DaemonL3, WatchKind
from hicache.connectors.host_pages_holds import OwnedPage
from hicache.connectors.host_pages_shared import Pool, SharedMove, SharedPool, share
from hicache.connectors.host_pages_staging import SLOT_BYTES_MIN, SLOT_COUNT, StagedMove, StagedObject, Staging
from hicache.keys import FieldValue
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.spec import namespace_digest
from hicache.workers import Workers

__all__ = ["HostPages", "PageItem", "PagesSpec", "Pool"]

CLEAR_BATCH_KEYS = 4096
CLEAR_S = 30.0
PREFIX_BYTES = 16  # of the namespace, in each object key


@dataclass(frozen=True, slots=True)
class PageItem:
    """What is stored as one object: what it is called, and where its bytes are or shall be, as (address, nbytes).

    An object is its extents one behind the other. With one extent, in a pool that hicached shares, it is moved without
    a copy in between; with several (a page in layer_first has one for each layer) it is gathered. ``key``: any bytes.
    ``page``: what to hold while hicached may touch the bytes itself; None where nobody can: then it never does.
    """

    key: bytes
    extents: tuple[tuple[int, int], ...]
    page: OwnedPage | None = None

    @property
    def size_bytes(self) -> int:
        """Of the object."""
        return sum(size_bytes for _, size_bytes in self.extents)


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


class _PoolLink:
    """A pool, and the client over which its pages move where hicached shares it."""

    def __init__(self, pool: Pool, shared: SharedPool | None, l3: DaemonL3 | None) -> None:
        self.pool = pool
        self.shared = shared
        self.l3 = l3

    @property
    def shares(self) -> bool:
        """Whether hicached moves its bytes itself, as things are."""
        return self.l3 is not None and self.l3.shares_memory

    def close(self) -> None:
        if self.l3 is not None:
            self.l3.close()
        if self.shared is not None:
            self.shared.close()


class HostPages:
    """Moves pages. Thread-safe; no call blocks longer than its deadline, or raises for a fault of L3.

    Pages of a pool with a memfd that somebody can hold move without a copy in between: hicached reads and writes them.
    A call about them that ends without an answer has its pages **held**, before it returns, until hicached has let go.
    All other pages, and memory that is in no pool, go through staging, and hicached never touches them.

    So when a call has returned, nobody touches a page that its engine may use for something else. A page that is not
    OK after ``get`` holds undefined bytes. Memory that an item names must stay mapped until the call returns.
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
        self._deadline_s = deadline_s
        self._connect = partial(
            DaemonL3,
            address,
            spec=spec,
            token=token,
            client_name=client_name,
            deployment=deployment,
            settings=settings,
        )
        self._staging = Staging(slot_bytes=max(SLOT_BYTES_MIN, spec.object_bytes_max), slot_count=SLOT_COUNT)
        self._links: list[_PoolLink] = []
        try:
            self.l3 = self._connect(memory=self._staging)
            for pool in pools:
                self.add_pool(pool)
        except BaseException:
            self._staging.close()
            raise
        self._workers = Workers("hicache-pages", threads=SLOT_COUNT, queue_max=SLOT_COUNT)

    def add_pool(self, pool: Pool) -> None:
        """Items may lie in ``pool`` from now on. A second time it changes nothing."""
        if any(link.pool == pool for link in self._links):
            return
        shared = share(pool)
        self._links.append(_PoolLink(pool, shared, None if shared is None else self._connect(memory=shared)))

    def wait_ready(self, *, timeout_s: float) -> bool:
        """Whether hicached is connected, with all memory that it can share, within ``timeout_s``.

        An engine need not wait for this.
        """
        ends_at_s = time.monotonic() + timeout_s
        clients = [self.l3, *(link.l3 for link in self._links if link.l3 is not None)]
        return all(client.wait_ready(timeout_s=max(0.0, ends_at_s - time.monotonic())) for client in clients)

    def shares(self, address: int) -> bool:
        """Whether hicached touches a page at ``address`` itself, as things are, if it can be held."""
        link = self._link_of(address, 1)
        return link is not None and link.shares

    @property
    def slots_in_doubt(self) -> int:
        """Slots of staging whose calls have ended, and that hicached may still touch."""
        return self._staging.slots_in_doubt

    def contains(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[bool]:
        """Whether each object is there now. False, too, where L3 cannot say."""
        outcomes = self.l3.lookup([self._object_key(key) for key in keys], timeout_s=self._timeout_s(deadline_s))
        return [outcome is Outcome.OK for outcome in outcomes]

    def put(self, items: Sequence[PageItem], *, deadline_s: float | None = None) -> list[Outcome]:
        """Store objects. OK or EXISTS (nothing was copied) means that hicached keeps them across restarts."""
        return self._move(items, deadline_s, is_get=False)

    def get(self, items: Sequence[PageItem], *, deadline_s: float | None = None) -> list[Outcome]:
        """Bring objects in. OK means complete and verified where it lies."""
        return self._move(items, deadline_s, is_get=True)

    def delete(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[Outcome]:
        """Remove objects: OK, or ABSENT where there was none."""
        return self.l3.delete([self._object_key(key) for key in keys], timeout_s=self._timeout_s(deadline_s))

    def clear(self, *, deadline_s: float = CLEAR_S) -> bool:
        """Remove all objects of this spec and tenant, of whichever engine. Whether none of those is left that were
        there when this began.
        """
        ends_at_s = time.monotonic() + deadline_s
        keys = self._stored_keys(ends_at_s)
        if keys is None:
            return False
        for start in range(0, len(keys), CLEAR_BATCH_KEYS):
            outcomes = self.l3.delete(keys[start : start + CLEAR_BATCH_KEYS], timeout_s=ends_at_s - time.monotonic())
            if not all(outcome in (Outcome.OK, Outcome.ABSENT) for outcome in outcomes):
                return False
        return True

    def close(self) -> None:
        """Give up what is in flight and disconnect. Idempotent.

        A page that is held stays so until hicached lets go of it, or dies.
        """
        self.l3.close()
        for link in self._links:
            link.close()
        self._workers.close(timeout_s=1.0)
        self._staging.close()

    def _timeout_s(self, deadline_s: float | None) -> float:
        return self._deadline_s if deadline_s is None else deadline_s

    def _object_key(self, key: bytes) -> bytes:
        """``start of the namespace | hash of the key``: of one length, whatever the engine calls its pages."""
        return self._spec.namespace[:PREFIX_BYTES] + blake2b(key, digest_size=32).digest()

    def _stored_keys(self, ends_at_s: float) -> list[bytes] | None:
        """All objects of the namespace that are there; None when that was not told in time."""
        prefix = self._spec.namespace[:PREFIX_BYTES]
        keys: list[bytes] = []
        watch = self.l3.watch()
        alarm = threading.Timer(max(0.0, ends_at_s - time.monotonic()), watch.close)
        alarm.daemon = True
        alarm.start()
        try:
            for event in watch:
                match event.kind:
                    case WatchKind.RESET:
                        keys.clear()
                    case WatchKind.PRESENT | WatchKind.STORED:
                        keys += [key for key in event.keys if key.startswith(prefix)]
                    case WatchKind.SYNCED:
                        return keys
        finally:
            alarm.cancel()
            watch.close()
        return None

    def _link_of(self, address: int, size_bytes: int) -> _PoolLink | None:
        return next((link for link in self._links if link.pool.has(address, size_bytes)), None)

    def _move(self, items: Sequence[PageItem], deadline_s: float | None, *, is_get: bool) -> list[Outcome]:
        ends_at_s = time.monotonic() + self._timeout_s(deadline_s)
        outcomes = [Outcome.BAD_RANGE] * len(items)
        staged: list[int] = []
        direct: dict[_PoolLink, list[int]] = {}
        for position, item in enumerate(items):
            links = [self._link_of(*extent) for extent in item.extents]
            size_bytes = item.size_bytes
            if min((size for _, size in item.extents), default=0) < 1:
                continue
            if size_bytes > self._spec.object_bytes_max:
                outcomes[position] = Outcome.TOO_LARGE
            elif item.page is not None and len(links) == 1 and (link := links[0]) is not None and link.shares:
                direct.setdefault(link, []).append(position)
            else:
                staged.append(position)
        for link, positions in direct.items():
            moved = self._move_shared(link, [items[position] for position in positions], ends_at_s, is_get=is_get)
            for position, outcome in zip(positions, moved, strict=True):
                outcomes[position] = outcome
        if staged:
            moved = self._move_staged([items[position] for position in staged], ends_at_s, is_get=is_get)
            for position, outcome in zip(staged, moved, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _move_shared(
        self, link: _PoolLink, items: Sequence[PageItem], ends_at_s: float, *, is_get: bool
    ) -> list[Outcome]:
        assert link.l3 is not None
        move = SharedMove(
            [L3Item(self._object_key(i.key), i.extents[0][0] - link.pool.address, i.extents[0][1]) for i in items],
            [item.page for item in items if item.page is not None],
        )
        outcomes = move.run(link.l3, timeout_s=ends_at_s - time.monotonic(), is_get=is_get)
        return [Outcome.DEADLINE] * len(items) if outcomes is None else outcomes

    def _move_staged(self, items: Sequence[PageItem], ends_at_s: float, *, is_get: bool) -> list[Outcome]:
        objects = [StagedObject(self._object_key(item.key), item.extents, item.size_bytes) for item in items]
        move = StagedMove(self.l3, self._staging, self._workers, objects, ends_at_s=ends_at_s)
        return move.get() if is_get else move.put()
