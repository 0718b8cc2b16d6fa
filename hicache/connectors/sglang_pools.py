"""Where the bytes of a page lie in a host pool of SGLang, in the order in which an object has them.

Imports no SGLang: it reads the attributes of host pools, and asks them for the addresses of a page where they tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hicache.connectors.host_pages import Pool
from hicache.errors import ConfigError
from hicache.keys import FieldValue

# Host layouts in which the tokens of one layer of a page are together give objects of one byte order, and share them.
_BYTE_ORDERS = {
    "layer_first": "layers",
    "page_first_direct": "layers",
    "page_first": "tokens",
    "page_head": "heads",
}
# What each class keeps the same on all TP ranks: one rank's page is every rank's.
_REPLICATED = ("MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool")
_GEOMETRY = (
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "dsa_kv_cache_store_fp8",
    "indexer_page_stride_size",
    "item_bytes",
    "state_page_bytes",
    "num_mamba_layers",
    "storage_format_tag",
)


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of every page that lie together: of page ``i`` at ``address + i * stride_bytes``."""

    address: int
    stride_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class PoolLayout:
    """A host pool as storage sees it. A page is one object, or ``len(slices)``: one for each slice of its heads.

    A logical pool (DeepSeek-V4's anchor) has no slices: its pages have no bytes.
    """

    name: str
    page_tokens: int
    page_count: int
    slices: tuple[tuple[Run, ...], ...]
    is_replicated: bool  # over the TP ranks
    identity: dict[str, FieldValue] = field(compare=False)
    memory: tuple[Pool, ...] = field(default=(), compare=False)

    @property
    def has_bytes(self) -> bool:
        """Whether there is anything to store."""
        return bool(self.slices)

    @property
    def object_bytes(self) -> int:
        """Payload bytes of each object of a page; 0 without any."""
        return sum(run.size_bytes for run in self.slices[0]) if self.slices else 0

    def extents(self, host_indices: torch.Tensor, page_count: int) -> list[list[tuple[tuple[int, int], ...]]]:
        """(address, bytes) of the pages that ``host_indices`` name, ``page_tokens`` each: [page][slice][extent].

        Raises ValueError for indices that are not of so many whole pages of this pool.
        """
        pages = self._pages(host_indices, page_count)
        per_slice = [_addresses(runs, pages) for runs in self.slices]
        return [
            [
                tuple(zip(addresses[position].tolist(), (run.size_bytes for run in runs), strict=True))
                for runs, addresses in zip(self.slices, per_slice, strict=True)
            ]
            for position in range(page_count)
        ]

    def flat_extents(self, tensor: torch.Tensor) -> list[tuple[tuple[int, int], ...]]:
        """The same of a page in a tensor of its own, as SGLang's flat interface hands it over.

        Raises ValueError for a tensor of another size.
        """
        count = len(self.slices)
        if not tensor.is_contiguous() or tensor.nbytes != count * self.object_bytes:
            raise ValueError(
                f"a page of {self.name} is {count * self.object_bytes} contiguous bytes, not {tensor.nbytes}"
            )
        if count == 1:
            return [((tensor.data_ptr(), tensor.nbytes),)]
        extents: list[list[tuple[int, int]]] = [[] for _ in self.slices]
        address = tensor.data_ptr()
        for plane in range(len(self.slices[0])):  # K of all heads, then V of all heads
            for slice_index, runs in enumerate(self.slices):
                extents[slice_index].append((address, runs[plane].size_bytes))
                address += runs[plane].size_bytes
        return [tuple(of_slice) for of_slice in extents]

    def _pages(self, host_indices: torch.Tensor, page_count: int) -> NDArray[np.int64]:
        indices = host_indices.detach().cpu().numpy()
        if len(indices) != page_count * self.page_tokens:
            expected = page_count * self.page_tokens
            raise ValueError(f"{page_count} pages of {self.name} are {expected} host indices, not {len(indices)}")
        first = indices[:: self.page_tokens].astype(np.int64, copy=False)
        pages, within = np.divmod(first, self.page_tokens)
        if within.any() or (len(pages) and (pages.min() < 0 or pages.max() >= self.page_count)):
            raise ValueError(
                f"host indices {first.tolist()} of {self.name} are no page starts of its {self.page_count} pages"
            )
        return pages


def pool_layout(host_pool: Any, name: str, *, slices: int = 1) -> PoolLayout:
    """How ``host_pool`` lies. ``slices``: in how many objects the heads of a page are stored, where it has heads.

    Raises ConfigError for a pool or a layout that objects cannot be made of.
    """
    if _is_logical(host_pool):
        return PoolLayout(name, int(host_pool.page_size), int(host_pool.size) // int(host_pool.page_size), (), True, {})
    page_tokens = int(getattr(host_pool, "page_size", 1) or 1)
    count = slices if _has_heads(host_pool) and host_pool.layout == "page_head" else 1
    runs = _runs(host_pool, count)
    per_slice = len(runs) // count
    parts = tuple(tuple(runs[start : start + per_slice]) for start in range(0, len(runs), per_slice))
    return PoolLayout(
        name,
        page_tokens,
        page_count=int(host_pool.size) // page_tokens,
        slices=parts,
        is_replicated=_class_names(host_pool).intersection(_REPLICATED) != set(),
        identity=_identity(host_pool, parts, heads=int(host_pool.head_num) // count if count > 1 else None),
        memory=tuple(_memory(host_pool)),
    )


def _addresses(runs: Sequence[Run], pages: NDArray[np.int64]) -> NDArray[np.int64]:
    starts = np.array([run.address for run in runs], dtype=np.int64)
    strides = np.array([run.stride_bytes for run in runs], dtype=np.int64)
    return starts + pages[:, None] * strides


def _is_logical(host_pool: Any) -> bool:
    return "LogicalHostPool" in _class_names(host_pool)


def _class_names(host_pool: Any) -> set[str]:
    return {each.__name__ for each in type(host_pool).__mro__}


def _has_heads(host_pool: Any) -> bool:
    return "MHATokenToKVPoolHost" in _class_names(host_pool)


def _runs(host_pool: Any, slices: int) -> list[Run]:
    classes = _class_names(host_pool)
    if "MambaPoolHost" in classes:
        return _state_runs(host_pool)
    if "DSAIndexerPoolHost" in classes and host_pool.layout == "layer_first":
        return _tensor_runs(host_pool.index_k_with_scale_buffer)
    runs = _asked_runs(host_pool, slices)
    if _has_heads(host_pool) and host_pool.layout == "layer_first":
        return runs[0::2] + runs[1::2]  # told as K and V of layer 0, of layer 1, ...; wanted as in the other layouts
    return runs


def _state_runs(host_pool: Any) -> list[Run]:
    """A state slot: temporal, then each conv state, then what else the checkpoint keeps; empty ones have no bytes."""
    tensors = [host_pool.temporal_buffer, *host_pool.conv_buffer, *host_pool.slot_state_buffers]
    return [
        Run(each.data_ptr(), each.stride(0) * each.element_size(), each[0].nbytes) for each in tensors if each.numel()
    ]


def _tensor_runs(layers: torch.Tensor) -> list[Run]:
    """``[layers, pages, bytes]``: a run for each layer."""
    return [Run(layer.data_ptr(), layer.stride(0) * layer.element_size(), layer[0].nbytes) for layer in layers]


def _asked_runs(host_pool: Any, slices: int) -> list[Run]:
    """What the pool tells of its first two pages; of the last one it must tell what follows from them."""
    last = int(host_pool.size) // int(host_pool.page_size) - 1
    try:
        first, sizes = _told(host_pool, 0, slices)
        second, _ = _told(host_pool, min(1, last), slices)
        final, _ = _told(host_pool, last, slices)
    except (NotImplementedError, ValueError, AttributeError, AssertionError) as error:
        raise _unsupported(host_pool, str(error) or type(error).__name__) from error
    runs = [Run(at, then - at, size) for at, then, size in zip(first, second, sizes, strict=True)]
    if [run.address + last * run.stride_bytes for run in runs] != list(final):
        raise _unsupported(host_pool, "its pages are not at equal distances")
    return runs


def _told(host_pool: Any, page: int, slices: int) -> tuple[list[int], list[int]]:
    page_tokens = int(host_pool.page_size)
    indices = torch.arange(page * page_tokens, (page + 1) * page_tokens)
    if slices > 1:
        addresses, sizes = host_pool.get_split_heads_page_buffer_meta(indices, slices)
    else:
        addresses, sizes = host_pool.get_page_buffer_meta(indices)
    return list(addresses), list(sizes)


def _unsupported(host_pool: Any, reason: str) -> ConfigError:
    expected = f"a host pool whose pages hicache can address, such as page_first_direct of MHA or MLA ({reason})"
    return ConfigError("host pool", f"{type(host_pool).__name__} {getattr(host_pool, 'layout', '')}", expected)


def _identity(host_pool: Any, slices: tuple[tuple[Run, ...], ...], *, heads: int | None) -> dict[str, FieldValue]:
    """Everything that the bytes of a page depend on. ``heads``: of a slice, where the page is split."""
    layout = str(host_pool.layout)
    has_tokens = bool(_class_names(host_pool) & {"MHATokenToKVPoolHost", "MLATokenToKVPoolHost"})
    is_known = has_tokens or bool(_class_names(host_pool) & {*_REPLICATED, "MambaPoolHost"})
    fields: dict[str, FieldValue] = {
        "class": type(host_pool).__name__,
        "byte_order": (_BYTE_ORDERS.get(layout, layout) if has_tokens else "layers") if is_known else layout,
        "page_tokens": int(getattr(host_pool, "page_size", 1) or 1),
        "dtype": str(host_pool.dtype),
        "object_bytes": sum(run.size_bytes for run in slices[0]),
        "tensors": ", ".join(_tensor_shapes(host_pool)),
    }
    for name in _GEOMETRY:
        value = getattr(host_pool, name, None)
        fields[name] = value if value is None or isinstance(value, bool | int | str) else str(value)
    if heads is not None:
        fields["head_num"] = heads
    return fields


def _tensor_shapes(host_pool: Any) -> Iterator[str]:
    """Of one row on the device, which tells attention back ends apart that keep it otherwise; of one state slot."""
    for name in ("device_k_buffers", "device_v_buffers"):
        for tensor in (getattr(host_pool, name, None) or ())[:1]:
            yield f"{tensor.dtype} {tuple(tensor.shape[2:])}" if tensor.ndim > 3 else str(tensor.dtype)
    if "MambaPoolHost" in _class_names(host_pool):
        for tensor in (host_pool.temporal_buffer, *host_pool.conv_buffer, *host_pool.slot_state_buffers):
            yield f"{tensor.dtype} {tuple(tensor.shape[1:])}"


def _memory(host_pool: Any) -> Iterator[Pool]:
    """The tensors of the pool, each with the memfd that SGLang's shm allocator took for it."""
    buffers = getattr(host_pool, "kv_buffer", None)
    if buffers is None:
        buffers = host_pool.index_k_with_scale_buffer
    tensors = list(buffers) if isinstance(buffers, list | tuple) else [buffers]
    descriptors = list(getattr(getattr(host_pool, "allocator", None), "fds", []))
    for position, tensor in enumerate(tensors):
        fd = descriptors[position] if len(descriptors) == len(tensors) else None
        yield Pool(tensor.data_ptr(), tensor.nbytes, fd)
