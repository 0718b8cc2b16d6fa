"""What SGLang lacks on a machine without a GPU, in plain torch; nothing of its caches and controllers is touched.

torchvision is imported by SGLang's model configs and never used here; the copies between device and host pools are CUDA
kernels, which plain indexing takes the place of. Both must be in place before the modules that use them are imported.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch

_TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
_TORCHVISION_MORE = ("torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def install() -> None:
    """Both. Idempotent."""
    if "torchvision" not in sys.modules:
        _stand_in_for_torchvision()
    _copy_on_the_cpu()


class _Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


def _stand_in_for_torchvision() -> None:
    import transformers.utils.import_utils

    transformers.utils.import_utils.is_torchvision_available()  # remembers that there is none
    import sglang  # noqa: F401  # probes for torchvision, too

    for name in (*_TORCHVISION, *_TORCHVISION_MORE, "torchvision.io", "torchvision.ops"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__getattr__ = _attribute_of_a_stand_in  # type: ignore[method-assign]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _attribute_of_a_stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


def _copy_on_the_cpu() -> None:
    from sglang.srt.mem_cache.pool_host import common, mamba, mha, mla

    common._cuda_host_register = lambda *arguments, **options: None
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load_attention
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up_attention
    mla.MLATokenToKVPoolHost.load_to_device_per_layer = _load_latent
    mla.MLATokenToKVPoolHost.backup_from_device_all_layer = _back_up_latent
    mamba.MambaPoolHost.load_to_device_per_layer = _load_state
    mamba.MambaPoolHost.backup_from_device_all_layer = _back_up_state


def token_rows(buffer: torch.Tensor, layout: str, page_tokens: int, layer: int) -> torch.Tensor:
    """One layer of a host pool's K, V or latents as [pages, tokens of a page, heads, dim], a view of it."""
    if layout == "layer_first":
        rows = buffer[layer]
        return rows.view(-1, page_tokens, *rows.shape[1:])
    if layout == "page_first":
        rows = buffer[:, layer]
        return rows.view(-1, page_tokens, *rows.shape[1:])
    if layout == "page_first_direct":
        return buffer[:, layer]
    assert layout == "page_head"
    return buffer[:, :, :, layer].transpose(1, 2)


def _places(host_indices: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return host_indices // page_tokens, host_indices % page_tokens


def _load_attention(self: Any, device_pool: Any, host: Any, device: Any, layer: int, io: str, **options: Any) -> None:
    if layer < self.target_layer_num:
        for plane, target in ((0, self.device_k_buffers[layer]), (1, self.device_v_buffers[layer])):
            rows = token_rows(self.kv_buffer[plane], self.layout, self.page_size, layer)
            target[device] = rows[_places(host, self.page_size)]


def _back_up_attention(self: Any, device_pool: Any, host: Any, device: Any, io: str) -> None:
    for plane, sources in ((0, self.device_k_buffers), (1, self.device_v_buffers)):
        for layer, source in enumerate(sources):
            rows = token_rows(self.kv_buffer[plane], self.layout, self.page_size, layer)
            rows[_places(host, self.page_size)] = source[device]


def _load_latent(self: Any, device_pool: Any, host: Any, device: Any, layer: int, io: str, **options: Any) -> None:
    rows = token_rows(self.kv_buffer, self.layout, self.page_size, layer)
    self.device_kv_buffers[layer][device] = rows[_places(host, self.page_size)]


def _back_up_latent(self: Any, device_pool: Any, host: Any, device: Any, io: str) -> None:
    for layer, source in enumerate(self.device_kv_buffers):
        rows = token_rows(self.kv_buffer, self.layout, self.page_size, layer)
        rows[_places(host, self.page_size)] = source[device]


def _states(pool: Any) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    conv = list(zip(pool.conv_buffer, pool.conv_device_layers, strict=True))
    return [(pool.temporal_buffer, pool.temporal_device_layers), *conv]


def _load_state(self: Any, device_pool: Any, host: Any, device: Any, layer: int, io: str, **options: Any) -> None:
    for buffer, layers in _states(self):
        layers[layer][device] = buffer[host, layer, 0]


def _back_up_state(self: Any, device_pool: Any, host: Any, device: Any, io: str) -> None:
    for buffer, layers in _states(self):
        for layer, source in enumerate(layers):
            buffer[host, layer, 0] = source[device]
