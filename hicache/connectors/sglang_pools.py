"""Where the bytes of a page lie in a host pool of SGLang, in the order in which an object has them.

Imports no SGLang: it reads the attributes of host pools, and asks them for the addresses of a page where they tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

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


Extents: TypeAlias = tuple[tuple[int, int], ...]  # (address, bytes) each, one behind the other


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of every page that lie together: of page ``i`` at ``address + i * stride_bytes``."""

    address: int
    stride_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """What is one object of a page: one plane (K, V, latents, one tensor of a state) of one slice of its heads."""

    plane: int
    head_slice: int
    runs: tuple[Run, ...]

    @property
    def size_bytes(self) -> int:
        """Payload bytes of the object."""
        return sum(run.size_bytes for run in self.runs)


@dataclass(frozen=True)
class PoolLayout:
    """A host pool as storage sees it. ``parts`` make up a page, in the order in which a flat page has them.

    A logical pool (DeepSeek-V4's anchor) has no parts: its pages have no bytes.
    """

    name: str
    page_tokens: int
    page_count: int
    parts: tuple[Part, ...]
    is_replicated: bool  # over the TP ranks
    identity: dict[str, FieldValue] = field(compare=False)
    memory: tuple[Pool, ...] = field(default=(), compare=False)

    @property
    def has_bytes(self) -> bool:
        """Whether there is anything to store."""
        return bool(self.parts)

    @property
    def page_bytes(self) -> int:
        """Payload bytes of all objects of a page."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def object_bytes_max(self) -> int:
        """Payload bytes of the largest object; 0 without any."""
        return max((part.size_bytes for part in self.parts), default=0)

    @property
    def head_slices(self) -> int:
        """In how many objects the heads of a plane are stored."""
        return 1 + max((part.head_slice for part in self.parts), default=0)

    def extents(self, pages: NDArray[np.int64]) -> list[list[Extents]]:
        """(address, bytes) of pages: [page][part][extent]."""
        of_parts = [_extents_of(part.runs, pages) for part in self.parts]
        return [list(of_page) for of_page in zip(*of_parts, strict=True)]

    def flat_extents(self, tensor: torch.Tensor) -> list[Extents]:
        """The same of one page in a tensor of its own, as SGLang's flat interface hands it over: [part][extent].

        Raises ValueError for a tensor of another size.
        """
        if not tensor.is_contiguous() or tensor.nbytes != self.page_bytes:
            raise ValueError(f"a page of {self.name} is {self.page_bytes} contiguous bytes, not {tensor.nbytes}")
        ends = accumulate((part.size_bytes for part in self.parts), initial=tensor.data_ptr())
        return [((address, part.size_bytes),) for address, part in zip(ends, self.parts, strict=False)]

    def pages(self, host_indices: torch.Tensor, page_count: int) -> NDArray[np.int64]:
        """The numbers of the pages that ``host_indices`` name, ``page_tokens`` each.

        Raises ValueError for indices that are not of so many whole pages of this pool.
        """
        indices = host_indices.detach().cpu().numpy()
        if len(indices) != page_count * self.page_tokens:
            wanted = page_count * self.page_tokens
            raise ValueError(f"{page_count} pages of {self.name} are {wanted} host indices, not {len(indices)}")
        first = indices[:: self.page_tokens].astype(np.int64, copy=False)
        pages, within = np.divmod(first, self.page_tokens)
        if within.any() or (len(pages) and (pages.min() < 0 or pages.max() >= self.page_count)):
            expected = f"page starts of the {self.page_count} pages of {self.name}"
            raise ValueError(f"host indices {first.tolist()} are not {expected}")
        return pages


def pool_layout(host_pool: Any, name: str, *, head_slices: int = 1) -> PoolLayout:
    """How ``host_pool`` lies. ``head_slices``: in how many objects its heads are stored, where it has heads.

    Raises ConfigError for a pool or a layout that objects cannot be made of.
    """
    page_tokens = int(getattr(host_pool, "page_size", 1) or 1)
    page_count = int(host_pool.size) // page_tokens
    if "LogicalHostPool" in _class_names(host_pool):
        return PoolLayout(name, page_tokens, page_count, (), True, {})
    slices = head_slices if _has_heads(host_pool) and host_pool.layout == "page_head" else 1
    return PoolLayout(
        name,
        page_tokens,
        page_count,
        parts=tuple(_parts(host_pool, slices)),
        is_replicated=not _class_names(host_pool).isdisjoint(_REPLICATED),
        identity=_identity(host_pool, slices),
        memory=tuple(_memory(host_pool)),
    )


def _extents_of(runs: Sequence[Run], pages: NDArray[np.int64]) -> Iterator[Extents]:
    starts = np.array([run.address for run in runs], dtype=np.int64)
    strides = np.array([run.stride_bytes for run in runs], dtype=np.int64)
    sizes = [run.size_bytes for run in runs]
    for addresses in (starts + pages[:, None] * strides).tolist():
        yield tuple(zip(addresses, sizes, strict=True))


def _class_names(host_pool: Any) -> set[str]:
    return {each.__name__ for each in type(host_pool).__mro__}


def _has_heads(host_pool: Any) -> bool:
    return "MHATokenToKVPoolHost" in _class_names(host_pool)


def _parts(host_pool: Any, slices: int) -> Iterator[Part]:
    classes = _class_names(host_pool)
    if "MambaPoolHost" in classes:  # a slot: temporal, each conv state, and what else the checkpoint keeps
        for plane, tensor in enumerate(_state_tensors(host_pool)):
            yield Part(plane, 0, (_run_of(tensor),))
    elif "DSAIndexerPoolHost" in classes and host_pool.layout == "layer_first":
        yield Part(0, 0, tuple(map(_run_of, host_pool.index_k_with_scale_buffer)))
    else:
        runs = _asked_runs(host_pool, slices)
        planes = 2 if _has_heads(host_pool) else 1
        for plane in range(planes):  # told as K and V of the first layer or slice, of the second one, ...
            of_plane = runs[plane::planes]
            per_slice = len(of_plane) // slices
            for head_slice in range(slices):
                yield Part(plane, head_slice, tuple(of_plane[head_slice * per_slice :][:per_slice]))


def _state_tensors(host_pool: Any) -> list[torch.Tensor]:
    """``[slots, ...]`` each; a model without temporal or conv states has empty ones, which are not stored."""
    tensors = [host_pool.temporal_buffer, *host_pool.conv_buffer, *host_pool.slot_state_buffers]
    return [tensor for tensor in tensors if tensor.numel()]


def _run_of(tensor: torch.Tensor) -> Run:
    """Of pages along the first axis."""
    return Run(tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), tensor[0].nbytes)


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


def _identity(host_pool: Any, slices: int) -> dict[str, FieldValue]:
    """Everything that the bytes of a page depend on, of one slice of its heads where it is split."""
    layout = str(host_pool.layout)
    has_tokens = bool(_class_names(host_pool) & {"MHATokenToKVPoolHost", "MLATokenToKVPoolHost"})
    is_known = has_tokens or bool(_class_names(host_pool) & {*_REPLICATED, "MambaPoolHost"})
    fields: dict[str, FieldValue] = {
        "class": type(host_pool).__name__,
        "byte_order": (_BYTE_ORDERS.get(layout, layout) if has_tokens else "layers") if is_known else layout,
        "page_tokens": int(getattr(host_pool, "page_size", 1) or 1),
        "dtype": str(host_pool.dtype),
        "tensors": ", ".join(_tensor_shapes(host_pool)),
    }
    for name in _GEOMETRY:
        value = getattr(host_pool, name, None)
        fields[name] = value if value is None or isinstance(value, bool | int | str) else str(value)
    if slices > 1:
        fields["head_num"] = int(host_pool.head_num) // slices
    return fields


def _tensor_shapes(host_pool: Any) -> Iterator[str]:
    """Of one row on the device, which tells attention back ends apart that keep it otherwise; of one state slot."""
    for name in ("device_k_buffers", "device_v_buffers"):
        for tensor in (getattr(host_pool, name, None) or ())[:1]:
            yield f"{tensor.dtype} {tuple(tensor.shape[2:])}" if tensor.ndim > 3 else str(tensor.dtype)
    if "MambaPoolHost" in _class_names(host_pool):
        for tensor in _state_tensors(host_pool):
            yield f"{tensor.dtype} {tuple(tensor.shape[1:])}"


def _memory(host_pool: Any) -> Iterator[Pool]:
    """The tensors of the pool, each with the memfd that the shm allocator took for it, which hicached can share."""
    buffers = getattr(host_pool, "kv_buffer", None)
    if buffers is None:
        buffers = host_pool.get_hybrid_pool_buffer()
    tensors = list(buffers) if isinstance(buffers, list | tuple) else [buffers]
    descriptors = list(getattr(getattr(host_pool, "allocator", None), "fds", []))
    if len(descriptors) != len(tensors):
        descriptors = [None] * len(tensors)
    for tensor, fd in zip(tensors, descriptors, strict=True):
        yield Pool(tensor.data_ptr(), tensor.nbytes, fd)
