"""Connectors with one fault each, which the checks of this folder must find: loaded by `kv_connector_module_path`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from hicache.connectors import vllm_worker
from hicache.connectors.vllm import HiCacheConnector


class SkipsStates(HiCacheConnector):
    """Brings attention back and never a state: those go to memory that the model does not read."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        states = {
            layer
            for group in self._kv_cache_config.kv_cache_groups
            if isinstance(group.kv_cache_spec, MambaSpec)
            for layer in group.layer_names
        }
        assert states, "the model has no states to skip"
        super().register_kv_caches(
            {name: _elsewhere(tensor) if name in states else tensor for name, tensor in kv_caches.items()}
        )


class SkipsWindows(HiCacheConnector):
    """Brings full attention back, and nothing of a sliding window."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        windows = {
            layer
            for group in self._kv_cache_config.kv_cache_groups
            if getattr(group.kv_cache_spec, "sliding_window", None)
            for layer in group.layer_names
        }
        assert windows, "the model has no sliding window to skip"
        super().register_kv_caches(
            {name: _elsewhere(tensor) if name in windows else tensor for name, tensor in kv_caches.items()}
        )


class DropsSalts(HiCacheConnector):
    """Names pages by their tokens alone, whosever they are."""

    def on_new_request(self, request: Any) -> None:
        request.cache_salt = None
        request.block_hashes = []
        request.update_block_hashes()
        super().on_new_request(request)


class LoadsOtherRank(HiCacheConnector):
    """Gives each of two ranks the heads of the other one."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        open_worker = vllm_worker._open_worker

        def swapped(*arguments: Any) -> Any:
            *before, rank, leader = arguments
            return open_worker(*before, 1 - rank, leader)

        with mock.patch.object(vllm_worker, "_open_worker", swapped):
            super().register_kv_caches(kv_caches)


class FailsLoads(HiCacheConnector):
    """Whose copies from L2 into the engine's blocks all fail; they are counted."""

    loads_failed = 0

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)

        def failing(*arguments: Any, **options: Any) -> None:
            type(self).loads_failed += 1
            raise OSError("a copy that was made to fail")

        self._worker._worker._executor._copies.load = failing


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes and strides over a copy of the memory."""
    place = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone(), *place)
