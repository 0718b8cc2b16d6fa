"""Tells vLLM's event stream what came into L2 and L3 and what went, so that a router knows where a prefix lies."""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from hicache.client.watch import Watch, WatchKind
from hicache.keys import page_of_object
from hicache.page_changes import PageChange, Place

_log = logging.getLogger(__name__)

OWNERSHIP = "hicache"
QUEUED_MAX = 100_000
KNOWN_MAX = 200_000  # pages, of which about 1 KB each is remembered

_AT_ONCE = 1000

Told: TypeAlias = tuple[bytes, int]  # the key of a page, and a group of vLLM

_MEDIUMS = {Place.L2: MEDIUM_CPU, Place.L3: MEDIUM_STORAGE}


@dataclass(frozen=True, slots=True)
class EventGroup:
    """A group of vLLM, and which groups of the spec its blocks are, as a mask."""

    index: int
    mask: int
    kind: str | None = None
    window_tokens: int | None = None


@dataclass(slots=True)
class _Page:
    block_hash: bytes
    parent: bytes | None
    tokens: array[int]
    lora: tuple[int | None, str | None]
    extra_keys: list[tuple[Any, ...] | None] | None
    session_id: str | None


class StoreEvents:
    """Makes events of changes of pages; each is told once, until the reverse is. Thread-safe.

    vLLM knows a page by its block hash at the page's end, and hicache by a key: what requests said of their pages is
    remembered for the latest KNOWN_MAX. Events that nobody takes are bounded: the oldest go, and ``dropped`` counts.
    """

    def __init__(
        self,
        groups: Sequence[EventGroup],
        *,
        page_tokens: int,
        take_changes: Callable[[], Iterable[PageChange]],
        locality: str | None = None,
    ) -> None:
        """``locality``: of L3, "LOCAL" or "REMOTE"."""
        self.dropped = 0
        self._groups = groups
        self._page_tokens = page_tokens
        self._take_changes = take_changes
        self._locality = locality
        self._lock = threading.Lock()
        self._events: deque[KVCacheEvent] = deque()
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()  # by key
        self._told: dict[Place, set[Told]] = {place: set() for place in Place}  # to be there, and known

    def name_pages(self, request: Any, keys: Sequence[bytes], page_hashes: Sequence[bytes], first: int) -> None:
        """``keys`` and ``page_hashes`` are of all full pages of a request of vLLM; those before ``first`` are known."""
        with self._lock:
            for page in range(first, len(keys)):
                if keys[page] not in self._pages:
                    self._pages[keys[page]] = self._page(request, page_hashes, page)
                self._pages.move_to_end(keys[page])
            while len(self._pages) > KNOWN_MAX:
                key, _ = self._pages.popitem(last=False)
                for told in self._told.values():
                    told.difference_update((key, group.index) for group in self._groups)

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call, in order."""
        with self._lock:
            self._follow_changes()
            events, self._events = list(self._events), deque()
        return events

    def forget(self) -> None:
        """Whatever was told is of no use to this engine any more."""
        with self._lock:
            self._follow_changes()
            for place, told in self._told.items():
                self._remove(place, sorted(told))
            self._pages.clear()

    def removed_objects(self, object_keys: Iterable[bytes]) -> None:
        """hicached has let go of objects: a block that misses one cannot be used. Those of others are left out."""
        with self._lock:
            self._follow_changes()
            for key, group in map(page_of_object, object_keys):
                self._tell(PageChange(key, Place.L3, 1 << group, is_there=False))

    def in_l3(self) -> list[Told]:
        """What is told to be in L3 now, for ``keep_only``."""
        with self._lock:
            self._follow_changes()
            return list(self._told[Place.L3])

    def keep_only(self, told: Iterable[Told], object_keys: Iterable[bytes]) -> None:
        """hicached was away and is there again, or is another one: of what it had, ``told``, it has these objects."""
        present: dict[bytes, int] = {}
        for key, group in map(page_of_object, object_keys):
            present[key] = present.get(key, 0) | 1 << group
        masks = {group.index: group.mask for group in self._groups}
        gone = [(key, index) for key, index in told if masks[index] & ~present.get(key, 0)]
        for start in range(0, len(gone), _AT_ONCE):  # the scheduler does not wait for all of them
            with self._lock:
                self._remove(Place.L3, gone[start : start + _AT_ONCE])

    # -- inside, with the lock held ----------------------------------------------------------------------------------

    def _follow_changes(self) -> None:
        for change in self._take_changes():
            self._tell(change)

    def _tell(self, change: PageChange) -> None:
        page = self._pages.get(change.key)
        if page is None:
            return
        if not change.is_there:
            gone = ((change.key, group.index) for group in self._groups if group.mask & change.groups)
            self._remove(change.place, gone)
            return
        told = self._told[change.place]
        for group in self._groups:
            if not group.mask & ~change.groups and (change.key, group.index) not in told:
                told.add((change.key, group.index))
                self._append(self._stored(page, change.place, group))

    def _stored(self, page: _Page, place: Place, group: EventGroup) -> BlockStored:
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(page.block_hash)],
            parent_block_hash=None if page.parent is None else maybe_convert_block_hash(page.parent),
            token_ids=page.tokens.tolist(),
            block_size=self._page_tokens,
            lora_id=page.lora[0],
            medium=_MEDIUMS[place],
            lora_name=page.lora[1],
            extra_keys=page.extra_keys,
            group_idx=group.index,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window_tokens,
            locality=self._locality if place is Place.L3 else None,
            ownership=OWNERSHIP,
            session_id=page.session_id,
        )

    def _remove(self, place: Place, gone: Iterable[Told]) -> None:
        told = self._told[place]
        for key, group in gone:
            if (key, group) in told:
                told.remove((key, group))
                self._append(
                    BlockRemoved(
                        block_hashes=[maybe_convert_block_hash(self._pages[key].block_hash)],
                        medium=_MEDIUMS[place],
                        group_idx=group,
                        locality=self._locality if place is Place.L3 else None,
                        ownership=OWNERSHIP,
                    )
                )

    def _append(self, event: KVCacheEvent) -> None:
        self._events.append(event)
        if len(self._events) > QUEUED_MAX:
            self._events.popleft()
            self.dropped += 1

    def _page(self, request: Any, page_hashes: Sequence[bytes], page: int) -> _Page:
        size, lora = self._page_tokens, request.lora_request
        start = page * size
        return _Page(
            page_hashes[page],
            page_hashes[page - 1] if page else None,
            array("I", request.all_token_ids[start : start + size]),
            (lora.adapter_id, lora.name) if lora else (None, None),
            to_event_extra_keys([_extra_keys(request, start, size)]),
            getattr(request, "session_id", None),
        )


class L3Removals:
    """Follows what hicached removes, in a thread of its own, until it is closed."""

    def __init__(self, watch: Watch, events: StoreEvents) -> None:
        self._watch = watch
        self._events = events
        self._thread = threading.Thread(target=self._follow, name="hicache-l3-removals", daemon=True)
        self._thread.start()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """End the stream and wait for the thread. Idempotent."""
        self._watch.close()
        self._thread.join(timeout_s)

    def _follow(self) -> None:
        try:
            self._tell()
        except Exception:  # a mistake of ours: routers are told no removals any more, which they must survive anyway
            _log.exception("removals from L3 are not told any more")

    def _tell(self) -> None:
        present: set[bytes] | None = None  # of a snapshot that is under way
        before: list[Told] = []  # what was told before it; what comes after is not in it
        for event in self._watch:
            match event.kind:
                case WatchKind.RESET:
                    present, before = set(), self._events.in_l3()
                case WatchKind.PRESENT | WatchKind.STORED if present is not None:
                    present.update(event.keys)
                case WatchKind.SYNCED if present is not None:
                    self._events.keep_only(before, present)
                    present, before = None, []
                case WatchKind.REMOVED:
                    if present is not None:
                        present.difference_update(event.keys)
                    self._events.removed_objects(event.keys)


def _extra_keys(request: Any, start: int, size: int) -> tuple[Any, ...] | None:
    first_item = 0
    for item in getattr(request, "mm_features", None) or ():
        if item.mm_position.offset + item.mm_position.length > start:
            break
        first_item += 1
    keys: tuple[Any, ...] | None = generate_block_hash_extra_keys(request, start, start + size, first_item)[0]
    return keys
