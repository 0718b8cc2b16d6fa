"""File tiers that run in the engine's own process, on the page cache."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np

from bench.peers_redis import NativeClient

LMCACHE_WORKERS = 4


class LmcacheFs(NativeClient):
    """LMCache's native file client."""

    def __init__(self, folder: Path, memory: memoryview) -> None:
        client_class = import_module("lmcache.lmcache_fs").LMCacheFSClient  # of the peers' Python
        (folder / "lmcache").mkdir()
        super().__init__(client_class(str(folder / "lmcache"), LMCACHE_WORKERS))

    def named(self, keys: Sequence[str]) -> list[str]:
        """Its keys have fields: model, world, worker, hash."""
        return [f"bench@1@0@{key}" for key in keys]


class SglangFile:
    """SGLang's HiCacheFile: one file for each page, written and read one after the other."""

    def __init__(self, folder: Path, memory: memoryview) -> None:
        storage = import_module("sglang.srt.mem_cache.hicache_storage")  # of the peers' Python
        config = storage.HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
        )
        self._folder = folder / "sglang"
        self._files = storage.HiCacheFile(config, str(self._folder))
        self._tensor = import_module("torch").from_numpy
        self._suffix = self._files.config_suffix

    def put(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """As its controller does: one batch_set."""
        tensors = [self._tensor(np.frombuffer(part, dtype=np.uint8)) for part in parts]
        if not self._files.batch_set(list(keys), tensors):
            raise ValueError("an object was not stored")

    def get(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One batch_get into the pages."""
        tensors = [self._tensor(np.frombuffer(part, dtype=np.uint8)) for part in parts]
        if any(found is None for found in self._files.batch_get(list(keys), tensors)):
            raise ValueError("an object is not there")

    def delete(self, keys: Sequence[str]) -> None:
        """It has no delete: its files are removed as an operator would."""
        for key in keys:
            (self._folder / f"{key}{self._suffix}.bin").unlink()

    def close(self) -> None:
        """Nothing runs."""
