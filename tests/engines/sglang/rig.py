"""A SGLang engine's cache as its scheduler has it: device pools, the radix tree, host pools, controller and threads."""

from __future__ import annotations

import contextlib
import json
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel

from hicache.connectors.sglang import HiCacheStorage
from tests.client.support import wait_until
from tests.engines.sglang.devices import PAGE_TOKENS, Device

IO_BACKENDS = {"layer_first": "direct", "page_first": "kernel", "page_first_direct": "direct", "page_head": "kernel"}


def extra_config(l3: str, **settings: Any) -> dict[str, Any]:
    """What an operator gives SGLang so that it loads hicache."""
    return {
        "backend_name": "hicache",
        "module_path": "hicache.connectors.sglang",
        "class_name": "HiCacheStorage",
        "interface_v1": 1,
        "prefetch_threshold": PAGE_TOKENS,
        "model_revision": "r1",
        "l3": l3,
        **settings,
    }


def tokens(page_count: int, *, seed: int = 0) -> array[int]:
    """A prompt of whole pages."""
    return array("q", range(5000 + 100_000 * seed, 5000 + 100_000 * seed + page_count * PAGE_TOKENS))


@contextlib.contextmanager
def server(
    config: dict[str, Any],
    *,
    layout: str = "page_first_direct",
    tp_rank: int = 0,
    tp_size: int = 1,
    policy: str = "wait_complete",
    write_policy: str = "write_through",
    **arguments: Any,
) -> Iterator[Any]:
    """SGLang's process-wide arguments, as one rank of a server has them."""
    given = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_mem_layout": layout,
        "hicache_io_backend": IO_BACKENDS[layout],
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(config),
        "hicache_storage_prefetch_policy": policy,
        "hicache_write_policy": write_policy,
        "page_size": PAGE_TOKENS,
        "served_model_name": "org/model",
        "tp_size": tp_size,
        "_mamba_cache_chunk_size": 64,
        **arguments,
    }
    ranks = {"tp_rank": tp_rank, "tp_size": tp_size, "attn_tp_rank": tp_rank, "attn_tp_size": tp_size}
    with (
        get_context().override_server_args(**given) as server_args,
        get_parallel().override(pp_rank=0, attn_dcp_rank=0, attn_cp_rank=0, **ranks),
    ):
        yield server_args


def _some(indices: torch.Tensor | None) -> torch.Tensor:
    assert indices is not None, "the device pool is full"
    return indices


class Engine:
    """One rank of a SGLang server, within ``server(...)``. Each step is what the scheduler does."""

    def __init__(self, server_args: Any, device: Device, *, core: str = "rust", **groups: Any) -> None:
        self.device = device
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=device.requests,
            token_to_kv_pool_allocator=device.allocator,
            page_size=PAGE_TOKENS,
            tree_components=device.components,
            tree_core_backend=core,
            **device.options,
            **groups,
        )
        self.cache = UnifiedRadixCache(parameters)
        self.cache.init_hicache(server_args, parameters)
        for entry in self.cache.host_pool_group.entries:
            entry.host_pool.pin_memory = False
        self._numbers = iter(range(1_000_000))

    @property
    def storage(self) -> HiCacheStorage:
        storage = self.cache.cache_controller.storage_backend
        assert isinstance(storage, HiCacheStorage)
        return storage

    def connect(self) -> None:
        """Wait until hicached is there: an engine does not."""
        pages = self.storage._connected()
        assert pages is not None
        assert pages.wait_ready(timeout_s=10)

    def compute(self, prompt: array[int], *, salt: str | None = None) -> dict[str, torch.Tensor]:
        """As after a prefill: random bytes in fresh slots, given to the tree. Returns the bytes."""
        self.device.randomise()
        indices = self._allocate(len(prompt))
        state = self.device.requests.mamba_allocator.alloc(1) if self.device.states else None
        computed = self._bytes(indices, state)
        self.cache.insert(InsertParams(key=RadixKey(prompt, cache_salt=salt), value=indices, mamba_value=state))
        return computed

    def extend(self, prompt: array[int], longer: array[int]) -> None:
        """As a request that goes on from a prompt that the tree has."""
        kept = self.cache.path_device_indices(self.match(prompt).last_device_node)
        indices = torch.cat([kept, self._allocate(len(longer) - len(prompt))])
        self.cache.insert(InsertParams(key=RadixKey(longer), value=indices, mamba_value=self._spare_state()))

    def _allocate(self, token_count: int) -> torch.Tensor:
        allocator = self.device.allocator
        if not self.device.window:
            return _some(allocator.alloc(token_count))
        indices = _some(allocator.full_attn_allocator.alloc(token_count))
        allocator.set_full_to_swa_mapping(indices, _some(allocator.swa_attn_allocator.alloc(token_count)))
        return indices

    def step(self) -> None:
        """One pass of the scheduler's housekeeping."""
        self.cache.flush_pending_backups()
        self.cache.check_hicache_events()

    def settle(self) -> None:
        """Steps until nothing is on its way down any more."""

        def is_settled() -> bool:
            self.step()
            return not self.cache.ongoing_write_through and not self.cache.ongoing_backup

        wait_until(is_settled, what="backup")

    def hashes(self, prompt: array[int], *, salt: str | None = None) -> list[str]:
        """SGLang's names of the pages."""
        return list(get_storage_hash_str(RadixKey(prompt, cache_salt=salt), None, page_size=PAGE_TOKENS))

    def on_device(self, prompt: array[int], *, salt: str | None = None) -> dict[str, torch.Tensor]:
        """The bytes that the tree has of a prompt on the device."""
        matched = self.match(prompt, salt=salt)
        state = None
        if self.device.states:
            state = self.cache.tree_core.get_component_device_value(matched.best_match_node, ComponentType.MAMBA)
        return self._bytes(self.cache.path_device_indices(matched.last_device_node), state)

    def shares_host_memory(self) -> bool:
        """Whether hicached touches the host pages itself."""
        layouts = [pool.layout for pool in self.storage._pools.values()]
        addresses = [run.address for layout in layouts for part in layout.parts for run in part.runs]
        assert self.storage._pages is not None
        return all(self.storage._pages.shares(address) for address in addresses)

    def host_locks(self) -> int:
        """Backups and prefetches that still hold something."""
        return len(self.cache.ongoing_write_through) + len(self.cache.ongoing_backup) + len(self.cache.ongoing_prefetch)

    def stored(self, prompt: array[int], *, salt: str | None = None) -> int:
        """How many pages of the prompt L3 has at which this engine could go on."""
        names = [entry.name for entry in self.cache.host_pool_group.entries if not entry.is_primary_index_anchor]
        states = [PoolTransfer(name, keys=["..."], hit_policy=PoolHitPolicy.TRAILING_PAGES) for name in names]
        return int(self.storage.batch_exists_v2(self.hashes(prompt, salt=salt), states).kv_hit_pages)

    def idle(self) -> None:
        """Steps until no prefetch is left, also of requests that have gone on without."""

        def is_idle() -> bool:
            self.step()
            controller = self.cache.cache_controller
            return not self.cache.ongoing_prefetch and controller.prefetch_tokens_occupied == 0

        wait_until(is_idle, what="the end of prefetches")

    def use_again(self, prompt: array[int]) -> None:
        """As a second request that finds the prompt on the device does."""
        matched = self.match(prompt)
        indices = self.cache.path_device_indices(matched.last_device_node)
        self.cache.insert(InsertParams(key=RadixKey(prompt), value=indices.clone(), mamba_value=self._spare_state()))

    def _spare_state(self) -> torch.Tensor | None:
        return self.device.requests.mamba_allocator.alloc(1) if self.device.states else None

    def evict_from_the_device(self, token_count: int) -> None:
        """As when other requests need the room."""
        states = 1 if self.device.states else 0
        self.cache.evict(EvictParams(num_tokens=token_count, mamba_num=states))

    def evict_everything(self) -> None:
        """Forget what L1 and L2 have."""
        self.cache.reset()
        self.device.allocator.clear()

    def prefetch(
        self, prompt: array[int], *, salt: str | None = None, timeout_s: float = 20.0, until_done: bool = False
    ) -> int:
        """Tokens that came from L3 for a new request, when the policy lets it go on.

        ``until_done``: the scheduler comes to the request only when all has been fetched.
        """
        handle = CacheRequestHandle(f"request-{next(self._numbers)}", 0)
        matched = self.match(prompt, salt=salt)
        self.cache.prefetch_from_storage(handle, matched.last_host_node, prompt, None, None, None, None, salt)

        if until_done:
            wait_until(lambda: self._is_fetched(handle), what="all of the prefetch")

        def may_go_on() -> bool:
            self.step()
            return bool(self.cache.check_prefetch_progress(handle))

        wait_until(may_go_on, timeout_s=timeout_s, what="prefetch")
        return int(self.cache.pop_prefetch_loaded_tokens(handle))

    def _is_fetched(self, handle: CacheRequestHandle) -> bool:
        self.step()
        return handle not in self.cache.ongoing_prefetch

    def match(self, prompt: array[int], *, salt: str | None = None) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt, cache_salt=salt)))

    def load(self, prompt: array[int], *, salt: str | None = None) -> dict[str, torch.Tensor]:
        """Bring what L2 has to the device; the bytes that are there then."""
        assert self.cache.load_back(self.match(prompt, salt=salt).best_match_node)
        self.cache.ready_to_load_host_cache()
        self.cache.loading_check()
        return self.on_device(prompt, salt=salt)

    def host_slots(self) -> dict[str, tuple[int, int]]:
        """Free and all slots of each host pool that has slots of its own."""
        return {
            str(entry.name): (entry.host_pool.available_size(), entry.host_pool.size)
            for entry in self.cache.host_pool_group.entries
        }

    def close(self) -> None:
        self.cache.detach_storage_backend()

    def _bytes(self, indices: torch.Tensor, state: torch.Tensor | None) -> dict[str, torch.Tensor]:
        found = {f"attention {number}": tensor[indices] for number, tensor in enumerate(self.device.tensors)}
        if state is not None:
            found |= {f"state {number}": tensor[:, state] for number, tensor in enumerate(self.device.states)}
        if self.device.window:
            last = indices[-2 * PAGE_TOKENS :]
            slots = self.device.allocator.translate_loc_from_full_to_swa(last)
            found |= {f"window {number}": tensor[slots] for number, tensor in enumerate(self.device.window)}
        return found


def assert_equal(found: dict[str, torch.Tensor], computed: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == computed.keys()
    for name, tensor in computed.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def storage_threads() -> list[str]:
    """Threads that hicache runs in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache")]
