"""The cache of a vLLM engine as a CacheSpec: made of the tensors that its workers have registered, on all ranks alike.

vLLM hands out *blocks*: one number names the same block in every layer of a group. The bytes of a block are stored as
they lie, so their layout is part of the identity. One page has ``page_tokens`` tokens, the scheduler's block size;
where a group has several blocks to a page, each of them is a group of the spec (``BlockGroup.part``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from hicache.errors import ConfigError
from hicache.groups import Group, PagedGroup, StateField, StateGroup
from hicache.keys import FieldValue
from hicache.slices import HeadSplit
from hicache.spec import CacheSpec

if TYPE_CHECKING:  # which tensors come with
    import torch

ATTENTION_KINDS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec")
STATE_KIND = "MambaSpec"
_STATE_FIELD = "state"


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """What one rank has of one layer: blocks of ``runs`` equal runs of bytes, ``size_bytes`` in all.

    ``shards``: how many different parts tensor parallelism makes of the layer, 1 where all ranks have the same.
    """

    name: str
    group: int  # of vLLM
    is_state: bool
    block_tokens: int
    size_bytes: int
    runs: int
    shards: int
    window_tokens: int | None
    layout: str  # shapes, dtypes and order of what is in a block

    @property
    def alike(self) -> tuple[object, ...]:
        """What layers of one group of the spec have in common."""
        return (
            self.group,
            self.is_state,
            self.block_tokens,
            self.size_bytes,
            self.runs,
            self.shards,
            self.window_tokens,
            self.layout,
        )


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """A group of the spec: of each page the ``part``-th of its ``parts`` blocks in the vLLM group ``group``."""

    group: int
    part: int
    parts: int
    is_state: bool

    def block_index(self, page: int) -> int:
        """Where in the block table of the vLLM group the block of ``page`` stands; of a state, the one at its end."""
        return page * self.parts + self.part


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The spec of a replica, and which blocks of vLLM its groups are."""

    spec: CacheSpec
    groups: tuple[BlockGroup, ...]  # by group index of the spec
    layers: tuple[tuple[tuple[str, ...], ...], ...]  # names by stage and group index


# -- what one rank has ------------------------------------------------------------------------------------------------


def described(
    kv_cache_config: Any,  # vLLM's KVCacheConfig: this module imports no engine
    tensors: Mapping[str, torch.Tensor],
    *,
    tp_size: int,
) -> list[LayerBlocks]:
    """The layers of this rank, in vLLM's order: of groups that a prefix cache can hold. Raises ConfigError."""
    found = []
    for index in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        if getattr(group, "host_resident", False):
            raise ConfigError("kv cache group", index, "groups on the device: HiSparse host groups are not supported")
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            layer_spec = by_layer.get(name, group.kv_cache_spec)
            tensor = tensors.get(name)
            if not hasattr(tensor, "untyped_storage"):
                raise ConfigError(f"kv cache of {name}", type(tensor).__name__, "one tensor, as vLLM 0.31 registers it")
            assert tensor is not None
            found.append(_layer(name, index, layer_spec, tensor, kv_cache_config.num_blocks, tp_size=tp_size))
    if not found:
        raise ConfigError("kv cache groups", 0, "a model with KV cache that vLLM can keep by prefix")
    return found


def _layer(name: str, group: int, spec: Any, tensor: torch.Tensor, num_blocks: int, *, tp_size: int) -> LayerBlocks:
    kind = type(spec).__name__
    if kind not in (*ATTENTION_KINDS, STATE_KIND):
        expected = f"{', '.join(ATTENTION_KINDS)} or {STATE_KIND}; try --disable-hybrid-kv-cache-manager"
        raise ConfigError(f"kv cache spec of {name}", kind, expected)
    is_state = kind == STATE_KIND
    if is_state and spec.mamba_cache_mode != "align":
        raise ConfigError(
            "mamba_cache_mode",
            spec.mamba_cache_mode,
            "'align', which says where a state can be restored: --enable-prefix-caching --mamba-cache-mode align",
        )
    sizes, strides = _inner(name, tensor, num_blocks)
    runs = 1 if _is_dense(sizes, strides) else sizes[0]
    if runs > 1 and (len(sizes) > 3 or not _is_dense(sizes[1:], strides[1:])):
        raise ConfigError(f"kv cache of {name}", (sizes, strides), "blocks of which each head is one run of bytes")
    window = None if is_state else getattr(spec, "sliding_window", None) if "SlidingWindow" in kind else None
    return LayerBlocks(
        name=name,
        group=group,
        is_state=is_state,
        block_tokens=spec.block_size,
        size_bytes=math.prod(sizes) * tensor.element_size(),
        runs=runs,
        shards=_shards(spec, kind, tp_size=tp_size, runs=runs),
        window_tokens=None if window is None else window + getattr(spec, "extra_retained_tokens", 0),
        layout=_layout(spec, tensor, sizes, strides),
    )


def _inner(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides in one block: [heads, rows, row] of it, or of each of the kernel blocks that it is cut into."""
    if tensor.dim() != 4 or tensor.shape[0] % num_blocks:
        raise ConfigError(f"kv cache of {name}", tuple(tensor.shape), f"[{num_blocks} blocks, heads, rows, bytes]")
    if tensor.shape[0] == num_blocks:
        return tuple(tensor.shape[1:]), tensor.stride()[1:]
    pieces = tensor.shape[0] // num_blocks
    return (pieces, *tensor.shape[1:]), tensor.stride()


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether it is one run of memory, in whatever order."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if stride != extent:
            return False
        extent *= size
    return True


def _shards(spec: Any, kind: str, *, tp_size: int, runs: int) -> int:
    if kind == STATE_KIND:
        return 1 if getattr(spec, "tp_replicated", False) else tp_size
    if "MLA" in kind:
        return 1
    shards = min(tp_size, getattr(spec, "max_tp_shards", None) or tp_size)
    return shards if runs == 1 and tp_size % shards == 0 else tp_size


def _layout(spec: Any, tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> str:
    order = "".join(str(axis) for axis in sorted(range(len(sizes)), key=lambda axis: (-strides[axis], axis)))
    parts = [str(tensor.dtype).removeprefix("torch."), "x".join(map(str, sizes)), order]
    for shape, dtype in zip(getattr(spec, "shapes", ()), getattr(spec, "dtypes", ()), strict=True):
        parts.append(f"{str(dtype).removeprefix('torch.')}:{'x'.join(map(str, shape))}")
    parts += [str(value) for value in (getattr(spec, "cache_dtype_str", None), _name(spec, "kv_quant_mode")) if value]
    return " ".join(parts)


def _name(spec: Any, attribute: str) -> str | None:
    return getattr(getattr(spec, attribute, None), "name", None)


# -- what the replica is ----------------------------------------------------------------------------------------------


def engine_spec(
    ranks: Sequence[Sequence[LayerBlocks]],
    *,
    tp_size: int,
    page_tokens: int,
    model: str,
    revision: str,
    identity: tuple[tuple[str, FieldValue], ...] = (),
) -> EngineSpec:
    """The spec that all ranks agree on. ``ranks``: what each has, as ``described``, at ``stage * tp_size + tp_rank``.

    Raises ConfigError where ranks of a stage differ, and where blocks cannot be cut into equal rows.
    """
    stages = [_stage(ranks, stage, tp_size=tp_size) for stage in range(len(ranks) // tp_size)]
    kinds = list(dict.fromkeys(layer.alike for layers in stages for layer in layers))
    first = {layer.alike: layer for layers in reversed(stages) for layer in reversed(layers)}
    numbers = _numbers(stages)
    groups: list[Group] = []
    blocks: list[BlockGroup] = []
    names: list[tuple[tuple[str, ...], ...]] = []
    for position, alike in enumerate(kinds):
        layers = tuple(number for number, layer in numbers if layer.alike == alike)
        by_stage = tuple(tuple(layer.name for layer in stage if layer.alike == alike) for stage in stages)
        for group, block in _groups(f"{position}", first[alike], layers, page_tokens=page_tokens):
            groups.append(group)
            blocks.append(block)
            names.append(by_stage)
    layouts = ((f"vllm.layout.{position}", first[alike].layout) for position, alike in enumerate(kinds))
    layer_names = "\n".join(layer.name for _, layer in numbers)
    spec = CacheSpec(
        model,
        revision,
        tuple(groups),
        page_tokens=page_tokens,
        tp_size=tp_size,
        pp_layers=tuple(map(len, stages)) if len(stages) > 1 else None,
        identity=(*identity, *layouts, ("vllm.layers", blake2b(layer_names.encode(), digest_size=16).hexdigest())),
    )
    return EngineSpec(spec, tuple(blocks), tuple(zip(*names, strict=True)))


def _stage(ranks: Sequence[Sequence[LayerBlocks]], stage: int, *, tp_size: int) -> Sequence[LayerBlocks]:
    first = ranks[stage * tp_size]
    for rank in range(stage * tp_size, (stage + 1) * tp_size):
        if list(ranks[rank]) != list(first):
            raise ConfigError(f"kv cache of rank {rank}", list(ranks[rank]), f"that of rank {stage * tp_size}: {first}")
    return first


def _numbers(stages: Iterable[Sequence[LayerBlocks]]) -> list[tuple[int, LayerBlocks]]:
    return list(enumerate(layer for layers in stages for layer in layers))


def _groups(
    name: str, layer: LayerBlocks, layers: tuple[int, ...], *, page_tokens: int
) -> Iterator[tuple[Group, BlockGroup]]:
    parts, rest = divmod(page_tokens, layer.block_tokens)
    if rest or not parts:
        raise ConfigError("block size", layer.block_tokens, f"a divisor of the scheduler's block size {page_tokens}")
    if layer.is_state:
        yield _state_group(f"state{name}", layer, layers), BlockGroup(layer.group, parts - 1, parts, is_state=True)
        return
    head_bytes, rest = divmod(layer.size_bytes, page_tokens * layer.runs)
    if rest or not head_bytes:
        expected = f"a multiple of {page_tokens * layer.runs} bytes, the tokens of a page times the runs of a block"
        raise ConfigError(f"block of {layer.name}", layer.size_bytes, expected)
    for part in range(parts):
        group = PagedGroup(
            f"kv{name}" if parts == 1 else f"kv{name}.{part}",
            layers,
            heads=layer.shards * layer.runs,
            head_dim=head_bytes,
            dtype="uint8",
            planes=1,
            window_tokens=layer.window_tokens,
        )
        yield group, BlockGroup(layer.group, part, parts, is_state=False)


def _state_group(name: str, layer: LayerBlocks, layers: tuple[int, ...]) -> StateGroup:
    if layer.shards == 1:
        field = StateField(_STATE_FIELD, (layer.size_bytes,), "uint8")
    else:
        field = StateField(_STATE_FIELD, (layer.shards, layer.size_bytes), "uint8", split=HeadSplit(0))
    return StateGroup(name, layers, (field,))


# -- the bytes of one rank --------------------------------------------------------------------------------------------


def adoptable(
    engine: EngineSpec, tensors: Mapping[str, torch.Tensor], *, rank: int, num_blocks: int
) -> dict[int, Any]:  # what L1Pool.adopt takes: tensors by layer, for states by field
    """Views of this rank's registered tensors, as the spec describes them, for ``L1Pool.adopt``: nothing is copied."""
    part = engine.spec.rank(rank)
    found: dict[int, Any] = {}
    for index, group in enumerate(part.groups):
        if group is None:
            continue
        names = engine.layers[part.stage][index]
        if isinstance(group, PagedGroup):
            page = (1, engine.spec.page_tokens, group.heads, group.head_dim)
            found[index] = [_pages(tensors[name], num_blocks, page) for name in names]
        else:
            state = group.fields[0].shape
            found[index] = {_STATE_FIELD: [_bytes(tensors[name], num_blocks, state) for name in names]}
    return found


def _pages(tensor: torch.Tensor, num_blocks: int, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """uint8 [n_blocks, 1, page_tokens, runs, run bytes / page_tokens]: each run in one piece."""
    _, page_tokens, runs, row_bytes = shape
    run_bytes = page_tokens * row_bytes
    run_stride = run_bytes if runs == 1 else tensor.stride(1) * tensor.element_size()
    return _raw(tensor, num_blocks, shape, (runs * run_bytes, row_bytes, run_stride, 1))


def _bytes(tensor: torch.Tensor, num_blocks: int, shape: tuple[int, ...]) -> torch.Tensor:
    """uint8 [n_blocks, *shape] of the state at the beginning of each block: not the padding behind it."""
    return _raw(tensor, num_blocks, shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))


def _raw(tensor: torch.Tensor, num_blocks: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    import torch

    item = tensor.element_size()
    block_stride = tensor.stride(0) * item * (tensor.shape[0] // num_blocks)
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * item
    return raw.set_(tensor.untyped_storage(), start, (num_blocks, *shape), (block_stride, *strides))
