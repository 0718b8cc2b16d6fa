"""SGLang's HiCacheController on a CPU, as it is released: its threads, its host pool, and the stores that it loads."""

from __future__ import annotations

import contextlib
import itertools
import queue
import shutil
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel

from bench.daemon_process import TOKEN, BenchError, DaemonProcess
from bench.engine_rows import OPS, OWN_STORE, EngineRow, rows_of
from bench.limits import MemoryCopy
from hicache.connectors import sglang_plugin

PAGE_TOKENS = 64
HEAD_DIM = 128
DTYPE = torch.bfloat16
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")  # that SGLang has for MHA
SHARED = "hicache shm"
STORES = (OWN_STORE, SHARED, "hicache staging")
WAIT_S = 60.0
MEMCPY_BYTES = 512 << 20
CAPACITY_BYTES_MIN = 1 << 30


@dataclass(frozen=True, slots=True)
class Cell:
    """Pages of one size in one host layout: ``layers * heads * PAGE_TOKENS * HEAD_DIM * 2 * 2`` bytes each."""

    layout: str
    layers: int
    heads: int
    pages: int
    rounds: int

    @property
    def page_bytes(self) -> int:
        return self.layers * self.heads * PAGE_TOKENS * HEAD_DIM * 2 * DTYPE.itemsize

    def __str__(self) -> str:
        return f"{self.layout}, {self.pages} pages of {self.page_bytes >> 20} MiB"


def full_plan(layouts: Sequence[str]) -> list[Cell]:
    """Both page sizes in each of ``layouts``."""
    return [
        cell
        for layout in layouts
        for cell in (Cell(layout, 8, 4, pages=256, rounds=7), Cell(layout, 32, 8, pages=48, rounds=7))
    ]


def quick_plan() -> list[Cell]:
    """The layouts that targets are for."""
    return [Cell("page_first_direct", 8, 4, pages=256, rounds=3), Cell("page_first_direct", 32, 8, pages=48, rounds=3)]


def run(cell: Cell, folder: Path) -> list[EngineRow]:
    """Measure every store in turn, round after round, each beside a memcpy. Raises BenchError."""
    sglang_plugin.register()
    HookRegistry.apply_hooks()
    copies = MemoryCopy(threads=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(get_context().override_server_args(served_model_name="org/model"))
        stack.enter_context(get_parallel().override(tp_rank=0, pp_rank=0, attn_dcp_rank=0))
        size_bytes = cell.pages * cell.page_bytes
        capacity_bytes = max(CAPACITY_BYTES_MIN, 4 * size_bytes)
        place = folder / f"{cell.layout}-{cell.page_bytes}"
        daemon = DaemonProcess(place, backend="lmdb", capacity_bytes=capacity_bytes)
        daemon.start()
        stack.callback(daemon.stop)
        files = place / "files"
        engines = [Engine(cell, store, l3=daemon.address("memory"), files=files) for store in STORES]
        for engine in engines:
            stack.callback(engine.close)
        for engine in engines:
            engine.check()
        _fill(engines[1], rounds=-(-capacity_bytes // size_bytes))
        speeds: dict[tuple[str, str], list[float]] = {(store, op): [] for store in STORES for op in OPS}
        memcpy_gbps: list[float] = []
        for _ in range(cell.rounds):
            memcpy_gbps.append(copies.measure(MEMCPY_BYTES))
            for engine in engines:
                prompt = engine.new_prompt()
                for op, seconds in zip(OPS, (engine.backup(prompt), engine.prefetch(prompt)), strict=True):
                    speeds[engine.store, op].append(size_bytes / seconds / 1e9)
                shutil.rmtree(files)
                files.mkdir()
    return rows_of(
        "sglang",
        cell.layout,
        page_bytes=cell.page_bytes,
        pages=cell.pages,
        speeds=speeds,
        memcpy_gbps=memcpy_gbps,
    )


def _fill(engine: Engine, *, rounds: int) -> None:
    """The store of hicached once over, so that what is measured is the recycling of space."""
    for _ in range(rounds):
        engine.backup(engine.new_prompt())


class Engine:
    """One rank's controller, with a host pool of its own, attached to one store."""

    _numbers: Iterator[int] = itertools.count(1)  # of prompts, in all engines: no two share a page

    def __init__(self, cell: Cell, store: str, *, l3: str, files: Path) -> None:
        files.mkdir(exist_ok=True)
        self.store = store
        self._cell = cell
        self._tokens = cell.pages * PAGE_TOKENS
        device = MHATokenToKVPool(
            size=self._tokens,
            page_size=PAGE_TOKENS,
            dtype=DTYPE,
            head_num=cell.heads,
            head_dim=HEAD_DIM,
            layer_num=cell.layers,
            device="cpu",
            enable_memory_saver=False,
        )
        (info,) = device.get_device_pool_infos()
        self.host = MHATokenToKVPoolHost(
            info.buffer_info,
            1.2,
            0,
            PAGE_TOKENS,
            cell.layout,
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=self._tokens,
            start_layer=0,
            end_layer=cell.layers,
            allocator_type="shm" if store == SHARED else "default",
        )
        allocator = PagedTokenToKVPoolAllocator(self._tokens, PAGE_TOKENS, DTYPE, "cpu", device, need_sort=False)
        self._controller = HiCacheController(
            allocator,
            self.host,
            PAGE_TOKENS,
            None,
            load_cache_event=threading.Event(),
            io_backend="direct",
            storage_backend="file" if store == OWN_STORE else "dynamic",
            prefetch_threshold=PAGE_TOKENS,
            model_name="org/model",
            storage_backend_extra_config=_extra_config(store, l3, files),
        )
        if store != OWN_STORE:
            self._connect()

    def new_prompt(self) -> array[int]:
        """Tokens that no store has seen."""
        first = next(self._numbers) << 24
        return array("q", range(first, first + self._tokens))

    def backup(self, prompt: array[int]) -> float:
        """Seconds from the order until SGLang has the acknowledgement of all pages. Raises BenchError."""
        indices = self.host.alloc(self._tokens)
        hashes = get_storage_hash_str(RadixKey(prompt), None, page_size=PAGE_TOKENS)
        start_s = time.perf_counter()
        self._controller.write_storage(indices, prompt, hash_value=hashes, prefix_keys=[])
        operation = _take(self._controller.ack_backup_queue)
        seconds = time.perf_counter() - start_s
        self._last_indices = indices
        self.host.free(indices)
        self._demand(operation.completed_tokens, "stored")
        return seconds

    def prefetch(self, prompt: array[int]) -> float:
        """Seconds from the order, with the look-up, until all pages are in the host pool. Raises BenchError."""
        start_s = time.perf_counter()
        self._controller.prefetch("request", RadixKey(prompt), None, [])
        operation = _take(self._controller.prefetch_hit_queue)
        self._demand(operation.storage_hit_count, "found")
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        self._controller.prefetch_buffer.put(operation)
        completed = 0
        while not (acknowledgement := _take(self._controller.ack_prefetch_queue)).completed_req:
            completed = acknowledgement.completed_tokens
        seconds = time.perf_counter() - start_s
        self._last_indices = operation.host_indices
        self.host.free(operation.host_indices)
        self._demand(completed, "brought back")
        return seconds

    def check(self) -> None:
        """One round trip, bit by bit, through a host pool that has been wiped meanwhile. Raises BenchError."""
        prompt = self.new_prompt()
        self.host.kv_buffer.view(torch.uint8).random_()
        self.backup(prompt)
        stored = self._pages_at(self._last_indices)
        self.host.kv_buffer.zero_()
        self.prefetch(prompt)
        brought = self._pages_at(self._last_indices)
        if not all(torch.equal(one, other) for one, other in zip(stored, brought, strict=True)):
            raise BenchError(f"{self.store}: other bytes came back than were stored")

    def _pages_at(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [self.host.get_data_page(int(start)).clone().view(torch.uint8) for start in indices[::PAGE_TOKENS]]

    def close(self) -> None:
        """Detach the store."""
        self._controller.detach_storage_backend()

    def _connect(self) -> None:
        storage = self._controller.storage_backend
        if storage._pages is None:
            storage.on_host_pools_registered()
        if not storage._pages.wait_ready(timeout_s=WAIT_S):
            raise BenchError(f"{self.store}: hicached did not take this engine: {storage._pages.l3.status()}")
        is_shared = storage._pages.shares(self.host.kv_buffer.data_ptr())
        if is_shared != (self.store == SHARED):
            raise BenchError(f"{self.store}: hicached {'shares' if is_shared else 'does not share'} the host pool")

    def _demand(self, tokens: int, done: str) -> None:
        if tokens != self._tokens:
            raise BenchError(f"{self.store}: {tokens} of {self._tokens} tokens were {done}")


def _extra_config(store: str, l3: str, files: Path) -> dict[str, Any]:  # Any: what SGLang reads from JSON
    if store == OWN_STORE:
        return {"file_storage_path": str(files)}
    return {
        "backend_name": "hicache",
        "module_path": "hicache.connectors.sglang",
        "class_name": "HiCacheStorage",
        "interface_v1": 1,
        "l3": l3,
        "token": TOKEN,
        "model_revision": "bench",
        "deadline_s": WAIT_S,
    }


def _take(answers: queue.Queue[Any]) -> Any:  # Any: SGLang's operations
    try:
        return answers.get(timeout=WAIT_S)
    except queue.Empty as error:
        raise BenchError(f"SGLang did not answer within {WAIT_S:g} s") from error
