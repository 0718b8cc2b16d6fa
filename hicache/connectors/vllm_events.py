"""Tells vLLM's event stream what came into L2 and L3 and what went, so that a router knows where a prefix lies."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from hicache.client.watch import Watch, WatchKind

_log = logging.getLogger(__name__)

L2, L3 = MEDIUM_CPU, MEDIUM_STORAGE

OBJECT_SUFFIX_BYTES = 4  # group and shard, at the end of an object key
QUEUED_MAX = 100_000
KNOWN_MAX = 1_000_000  # pages whose removal from L3 can be told: about 200 MB


class StoreEvents:
    """Events between two calls of the scheduler's ``take_events``. Thread-safe.

    Bounded: when nobody takes them, the oldest go, and ``dropped`` counts. A page is ``page_tokens`` tokens; its hash
    is vLLM's block hash at its end.
    """

    def __init__(self, *, page_tokens: int, ownership: str = "hicache", locality: str | None = None) -> None:
        self.dropped = 0
        self._page_tokens = page_tokens
        self._ownership = ownership
        self._locality = locality  # of L3: "LOCAL" or "REMOTE"
        self._lock = threading.Lock()
        self._events: deque[KVCacheEvent] = deque()
        self._by_key: OrderedDict[bytes, bytes] = OrderedDict()  # page key in L3 -> block hash

    def stored(
        self,
        request: Any,
        page_hashes: Sequence[bytes],
        pages: range,
        *,
        medium: str,
        group: int | None = None,
        keys: Sequence[bytes] = (),
    ) -> None:
        """Pages of ``request``, contiguous, are in a tier now. ``page_hashes``: of all its pages, from the first on.

        ``keys``: the names of ``pages`` in L3, which object keys begin with; without them, no removal is told.
        """
        if not pages:
            return
        size = self._page_tokens
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(page_hashes[page]) for page in pages],
            parent_block_hash=maybe_convert_block_hash(page_hashes[pages.start - 1]) if pages.start else None,
            token_ids=list(request.all_token_ids[pages.start * size : pages.stop * size]),
            block_size=size,
            lora_id=request.lora_request.adapter_id if request.lora_request else None,
            medium=medium,
            lora_name=request.lora_request.name if request.lora_request else None,
            extra_keys=to_event_extra_keys([_extra_keys(request, page * size, size) for page in pages]),
            group_idx=group,
            locality=self._locality if medium == L3 else None,
            ownership=self._ownership,
            session_id=getattr(request, "session_id", None),
        )
        with self._lock:
            self._append(event)
            for page, key in zip(pages, keys, strict=False):
                self._by_key[key] = page_hashes[page]
                self._by_key.move_to_end(key)
            while len(self._by_key) > KNOWN_MAX:
                self._by_key.popitem(last=False)

    def removed(self, page_hashes: Iterable[bytes], *, medium: str, group: int | None = None) -> None:
        """Pages have left a tier."""
        hashes = [maybe_convert_block_hash(each) for each in page_hashes]
        if hashes:
            with self._lock:
                self._append(self._removal(hashes, medium, group))

    def removed_objects(self, object_keys: Iterable[bytes]) -> None:
        """hicached has let go of objects: a page that misses one cannot be used. Those of others are left out."""
        with self._lock:
            page_keys = dict.fromkeys(key[:-OBJECT_SUFFIX_BYTES] for key in object_keys)
            gone = [hashed for key in page_keys if (hashed := self._by_key.pop(key, None)) is not None]
            if gone:
                self._append(self._removal([maybe_convert_block_hash(each) for each in gone], L3, None))

    def keep_only(self, page_keys: Collection[bytes]) -> None:
        """hicached was away and is there again, or is another one: of what it had, it has ``page_keys``."""
        with self._lock:
            gone = [key for key in self._by_key if key not in page_keys]
            hashes = [maybe_convert_block_hash(self._by_key.pop(key)) for key in gone]
            if hashes:
                self._append(self._removal(hashes, L3, None))

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call, in order."""
        with self._lock:
            events, self._events = list(self._events), deque()
        return events

    def _removal(self, hashes: list[Any], medium: str, group: int | None) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=hashes,
            medium=medium,
            group_idx=group,
            locality=self._locality if medium == L3 else None,
            ownership=self._ownership,
        )

    def _append(self, event: KVCacheEvent) -> None:
        self._events.append(event)
        if len(self._events) > QUEUED_MAX:
            self._events.popleft()
            self.dropped += 1


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
        for event in self._watch:
            match event.kind:
                case WatchKind.RESET:
                    present = set()
                case WatchKind.PRESENT | WatchKind.STORED if present is not None:
                    present.update(event.keys)
                case WatchKind.SYNCED if present is not None:
                    self._events.keep_only({key[:-OBJECT_SUFFIX_BYTES] for key in present})
                    present = None
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
