"""``HiCacheStorage``: hicached as the L3 of SGLang's HiCache, loaded by ``--hicache-storage-backend dynamic``.

SGLang keeps the tree, L2 and the policies of each rank; this is L3, and follows the engine's own reductions over ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as SGLangStorage
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.version import __version__ as sglang_version

from hicache.client.address import parse_address
from hicache.connectors.host_pages import HostPages, PageItem, PagesSpec
from hicache.connectors.host_pages_holds import OwnedPage, PageHolds, holds_of
from hicache.connectors.sglang_arguments import Arguments
from hicache.connectors.sglang_hits import PoolPages, leading, prefix_hits
from hicache.connectors.sglang_identity import EngineIdentity, Rank
from hicache.connectors.sglang_plugin import LIVE_WEIGHTS
from hicache.connectors.sglang_pools import Extents, PoolLayout, pool_layout
from hicache.connectors.sglang_settings import StorageSettings
from hicache.connectors.sglang_stats import TransferLog
from hicache.errors import ConfigError
from hicache.outcome import Outcome

LOOKUP_S_MAX = 0.5  # of one lookup: SGLang makes some in its scheduler's own thread
LOOKUP_PAGES = 1024  # at a time: what lies behind a gap is not asked for
CLEAR_S_MAX = 30.0

_log = logging.getLogger(__name__)


class _StoredPool:
    """One host pool, and what its pages are called in L3."""

    def __init__(self, layout: PoolLayout, roots: Sequence[bytes], holds: PageHolds | None) -> None:
        """``holds``: what can keep pages of it from being given out."""
        self.layout = layout
        self.holds = holds
        self._roots = roots

    def names(self, page_hashes: Sequence[str]) -> list[bytes]:
        """The keys of the objects of all pages, part after part."""
        return [root + page_hash.encode() for page_hash in page_hashes for root in self._roots]

    def items(
        self, page_hashes: Sequence[str], extents: Sequence[Sequence[Extents]], pages: Iterable[OwnedPage | None]
    ) -> list[PageItem]:
        """The objects of all pages, part after part."""
        of_parts = chain.from_iterable(repeat(page, len(self._roots)) for page in pages)
        return list(map(PageItem, self.names(page_hashes), chain.from_iterable(extents), of_parts))

    def whole(self, is_there: Sequence[bool], page_count: int) -> list[bool]:
        """Of each page, whether all of its parts are."""
        parts = len(self._roots)
        return [all(is_there[page * parts : (page + 1) * parts]) for page in range(page_count)]


class HiCacheStorage(SGLangStorage):
    """Thread-safe as SGLang needs it: it looks up, reads, stores and steers from one thread each.

    No call blocks longer than ``deadline_s`` (lookups: LOOKUP_S_MAX), and none raises for a fault of L3: what cannot be
    had is a miss, and what cannot be stored is left out. Configuration that cannot be right raises ConfigError, here or
    when the host pools are registered.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self.settings = StorageSettings.parse(storage_config.extra_config)
        if LIVE_WEIGHTS.has_changed and not self.settings.model_revision:
            expected = "a name of the weights that this process has been given in place: its files are of others"
            raise ConfigError("model_revision", "", expected)
        self._rank = Rank.of(storage_config)
        self._identity = EngineIdentity.of(Arguments(), storage_config, self.settings, version=sglang_version)
        parse_address(self.settings.l3)
        self.registered_pools: dict[str, Any] = {}
        self._pools: dict[str, _StoredPool] = {}
        self._pages: HostPages | None = None
        self._object_bytes_max = 0
        self._prefetched = TransferLog()
        self._backed_up = TransferLog()
        self._is_closed = False
        self._lock = threading.Lock()
        LIVE_WEIGHTS.tell(self)

    # What SGLang registers, in its scheduler's thread

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool that anchors the tree: attention pages, or none where all bytes are in other pools."""
        super().register_mem_pool_host(mem_pool_host)
        self._check_split(mem_pool_host)
        self._add_pool(mem_pool_host, PoolName.KV)
        self._check_flat(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take a pool of the hybrid cache. The anchor comes here a second time."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add_pool(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Begin to connect, in the background: an engine starts whether hicached is there or not.

        SGLang before 0.5.23 does not call this: then the first use does it.
        """
        self._connected()

    # Lookups

    def exists(self, key: str) -> bool:
        """Whether the attention page is stored."""
        return bool(self.batch_exists([key]))

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many attention pages from the start are stored."""
        pool = self._pools[PoolName.KV]
        if not pool.layout.has_bytes:
            return 0  # the anchor has no bytes of its own, and nothing here tells which pools must have some
        return leading(self._present(keys, [pool], [True])[0])

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Every prefix length at which all pools can go on, and the longest of each alone."""
        anchor = self._pools[PoolName.KV]
        gating = [each for each in pool_transfers or [] if each.hit_policy != PoolHitPolicy.BLOCK_GROUPS]
        asked = [anchor] * anchor.layout.has_bytes + [self._pools[each.name] for each in gating]
        if not asked:
            return PoolTransferResult(0, {}, [])
        needs_all = [True] * anchor.layout.has_bytes + [_trailing_pages(each) is None for each in gating]
        present = self._present(keys, asked, needs_all)
        kv_pages = leading(present[0]) if anchor.layout.has_bytes else len(keys)
        side = present[1:] if anchor.layout.has_bytes else present
        pools = [
            PoolPages(each.name, is_there, _trailing_pages(each)) for each, is_there in zip(gating, side, strict=True)
        ]
        hits = prefix_hits(kv_pages, pools)
        pages_of = {PoolName.KV: kv_pages, **hits.pages_of}
        return PoolTransferResult(
            hits.boundaries[-1] if hits.boundaries else 0,
            {name: pages for name, pages in pages_of.items() if pages},
            list(hits.boundaries),
        )

    # Pages in tensors of their own (without interface_v1)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """The attention page in ``target_location``, or None."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Each page in its tensor, or None."""
        pool = self._pools[PoolName.KV]
        if not pool.layout.has_bytes:
            return list(target_locations)
        extents = [pool.layout.flat_extents(each) for each in target_locations]
        is_there = self._move(pool, pool.items(keys, extents, repeat(None)), self._ends_at_s(), is_get=True)
        return [target if there else None for target, there in zip(target_locations, is_there, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Whether the attention page is stored."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Whether all of the pages are stored."""
        pool = self._pools[PoolName.KV]
        if not pool.layout.has_bytes:
            return True
        tensors = [each.contiguous() for each in values]
        extents = [pool.layout.flat_extents(each) for each in tensors]
        return all(self._move(pool, pool.items(keys, extents, repeat(None)), self._ends_at_s(), is_get=False))

    # Pages where they lie (interface_v1), and those of all pools

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Which of the attention pages are now at their host indices, complete and checked."""
        return self._move_pools([PoolTransfer(PoolName.KV, host_indices, keys=keys)], is_get=True)[PoolName.KV]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Which of the attention pages are stored; those that were cost a lookup and no copy."""
        return self._move_pools([PoolTransfer(PoolName.KV, host_indices, keys=keys)], is_get=False)[PoolName.KV]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same of pages of any pools, all within the deadline of one call."""
        return self._move_pools(transfers, is_get=True)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """The same of pages of any pools, all within the deadline of one call."""
        return self._move_pools(transfers, is_get=False)

    # Administration, in the scheduler's thread

    def clear(self) -> bool:
        """Remove what engines of this namespace and tenant have stored, of all ranks; whether all of it is gone."""
        pages = self._connected()
        is_gone = pages is not None and pages.clear(deadline_s=CLEAR_S_MAX)
        if not is_gone:
            _log.warning("hicache: not everything was cleared within %g s; clear again", CLEAR_S_MAX)
        return is_gone

    def get_stats(self) -> Any:
        """What was moved since the last call, in SGLang's own form. Never raises: the scheduler asks in every step."""
        try:
            prefetched, backed_up = self._prefetched.drain(), self._backed_up.drain()
            return StorageMetrics(prefetched.pages, backed_up.pages, prefetched.gb_per_s, backed_up.gb_per_s)
        except Exception:
            _log.exception("hicache has no statistics")
            return None

    def close(self) -> None:
        """Disconnect and free everything. Idempotent; calls that come afterwards are misses."""
        with self._lock:
            self._is_closed = True
            pages, self._pages = self._pages, None
        if pages is not None:
            pages.close()

    def weights_will_change(self) -> None:
        """Everything is a miss from now on, and nothing is stored: nobody can say what the new weights are called."""
        if not self._is_closed:
            _log.warning("hicache: the weights change in place; attach again, with another model_revision, to go on")
        self.close()

    def _add_pool(self, host_pool: Any, name: str) -> None:
        layout = pool_layout(host_pool, str(name), head_slices=self._rank.head_slices)
        roots = [self._identity.root(layout, self._rank, part) for part in layout.parts]
        self._pools[name] = _StoredPool(layout, roots, holds_of(host_pool))
        with self._lock:
            pages = self._pages
            if pages is None:
                return
            if layout.object_bytes_max <= self._object_bytes_max:
                for pool in layout.memory:
                    pages.add_pool(pool)
                return
            self._pages = None  # of a draft model that came after the others: its objects need larger buffers
        pages.close()
        self._connected()

    def _connected(self) -> HostPages | None:
        """What moves pages; None after the end, and where no pool has bytes."""
        with self._lock:
            if self._pages is None and not self._is_closed:
                self._pages = self._open()
            return self._pages

    def _open(self) -> HostPages | None:
        layouts = [pool.layout for pool in self._pools.values()]
        self._object_bytes_max = max((layout.object_bytes_max for layout in layouts), default=0)
        if not self._object_bytes_max:
            return None
        memory = dict.fromkeys(pool for layout in layouts for pool in layout.memory)
        fields = self._identity.described(self._pools[PoolName.KV].layout, self._rank)
        pages = HostPages(
            self.settings.l3,
            spec=PagesSpec(fields, self._object_bytes_max),
            pools=list(memory),
            deadline_s=self.settings.deadline_s,
            token=self.settings.token,
            deployment=self.settings.deployment,
        )
        if self.settings.deployment and (fault := pages.l3.wait_first_answer()) is not None and fault.is_lasting:
            pages.close()
            self._is_closed = True
            expected = f"one whose engines this one can share with: hicached refused it ({fault})"
            raise ConfigError("deployment", self.settings.deployment, expected)
        return pages

    def _present(
        self, keys: Sequence[str], pools: Sequence[_StoredPool], stops_at_gap: Sequence[bool]
    ) -> list[list[bool]]:
        """For each pool which pages are stored; none behind the deadline, nor far behind a gap of a pool where that
        ends the prefix.
        """
        ends_at_s = time.monotonic() + min(LOOKUP_S_MAX, self.settings.deadline_s)
        found: list[list[bool]] = [[] for _ in pools]
        for start in range(0, len(keys), LOOKUP_PAGES):
            part = keys[start : start + LOOKUP_PAGES]
            names = [pool.names(part) for pool in pools]
            is_there = iter(self._contains(list(chain.from_iterable(names)), ends_at_s - time.monotonic()))
            for pool, pages, of_pool in zip(pools, found, names, strict=True):
                pages.extend(pool.whole(list(islice(is_there, len(of_pool))), len(part)))
            if not all(all(pages[start:]) for pages, is_gating in zip(found, stops_at_gap, strict=True) if is_gating):
                break
        return [pages + [False] * (len(keys) - len(pages)) for pages in found]

    def _contains(self, names: Sequence[bytes], timeout_s: float) -> list[bool]:
        pages = self._connected()
        if pages is None or timeout_s <= 0:
            return [False] * len(names)
        return pages.contains(names, deadline_s=timeout_s)

    def _ends_at_s(self) -> float:
        return time.monotonic() + self.settings.deadline_s

    def _move_pools(self, transfers: Sequence[PoolTransfer], *, is_get: bool) -> dict[str, list[bool]]:
        ends_at_s = self._ends_at_s()
        return {each.name: self._move_pool(each, ends_at_s, is_get=is_get) for each in transfers}

    def _move_pool(self, transfer: PoolTransfer, ends_at_s: float, *, is_get: bool) -> list[bool]:
        pool = self._pools[transfer.name]
        keys = transfer.keys or []
        if not pool.layout.has_bytes:
            return [True] * len(keys)
        pages = pool.layout.pages(transfer.host_indices, len(keys))
        items = pool.items(keys, pool.layout.extents(pages), self._owned(transfer, pages.tolist()))
        return self._move(pool, items, ends_at_s, is_get=is_get)

    def _owned(self, transfer: PoolTransfer, pages: Sequence[int]) -> Iterator[OwnedPage | None]:
        """The pages as what SGLang frees when it is done with them: many pools go by the indices of another one."""
        pool, owner = self._pools[transfer.name], self._pools.get(transfer.indices_from_pool or transfer.name)
        holds = owner.holds if owner is not None and owner.layout.page_tokens == pool.layout.page_tokens else None
        for page in pages:
            yield None if holds is None else OwnedPage(holds, page)

    def _move(self, pool: _StoredPool, items: Sequence[PageItem], ends_at_s: float, *, is_get: bool) -> list[bool]:
        """Of each page, whether all of its objects are where they should be."""
        parts = len(pool.layout.parts)
        started_at_s = time.perf_counter()
        left_s = ends_at_s - time.monotonic()
        pages = self._connected()
        if pages is None or left_s <= 0:
            return [False] * (len(items) // parts)
        outcomes = pages.get(items, deadline_s=left_s) if is_get else pages.put(items, deadline_s=left_s)
        moved = sum(outcome is Outcome.OK for outcome in outcomes) // parts
        log = self._prefetched if is_get else self._backed_up
        log.note(moved, page_bytes=pool.layout.page_bytes, started_at_s=started_at_s)
        return pool.whole([outcome.is_ok for outcome in outcomes], len(items) // parts)

    def _check_split(self, host_pool: Any) -> None:
        slices = self._rank.head_slices
        heads = getattr(host_pool, "head_num", None)
        if slices == 1 or heads is None:
            return
        if host_pool.layout != "page_head":
            expected = f"none with --hicache-mem-layout {host_pool.layout}: heads can be split in page_head alone"
            raise ConfigError("tp_lcm_size", self._rank.heads_lcm, expected)
        if heads % slices:
            expected = (
                f"at most {heads * self._rank.tp_size}, so that each of the {heads} heads of a rank is in one slice"
            )
            raise ConfigError("tp_lcm_size", self._rank.heads_lcm, expected)

    def _check_flat(self, host_pool: Any) -> None:
        if self.settings.moves_without_copy or not self._pools[PoolName.KV].layout.has_bytes:
            return
        try:
            host_pool.get_data_page(0)
        except NotImplementedError as error:
            expected = f"1: the pages of {type(host_pool).__name__} have no flat form"
            raise ConfigError("interface_v1", 0, expected) from error


def _trailing_pages(transfer: PoolTransfer) -> int | None:
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return None
    return max(1, len(transfer.keys or ()))
