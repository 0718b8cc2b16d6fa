"""What a replica computes, made up from the tokens alone: every byte of every rank can be checked, on any split."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from hicache.pools import L1Pool
from hicache.pools.dtypes import torch_dtype
from hicache.spec import CacheSpec, PagedGroup, StateField


@dataclass(frozen=True, slots=True)
class Slot:
    """An L1 slot of a group, and the prefix that it is of: of so many tokens, by their seed. Seed 0: emptied."""

    group: int
    slot: int
    seed: int


def seed_of(tokens: Sequence[int]) -> int:
    """A number for a prefix; never 0."""
    return zlib.crc32(",".join(map(str, tokens)).encode()) + 1


def whole_page(group: PagedGroup, page_tokens: int, seed: int) -> torch.Tensor:
    """A page of the whole model: [layers, planes, page_tokens, heads, head_dim]."""
    return _random((len(group.layers), group.planes, page_tokens, group.heads, group.head_dim), group.dtype, seed)


def whole_state(layers: int, field: StateField, seed: int) -> torch.Tensor:
    """A field of a state of the whole model: [layers, *shape]."""
    return _random((layers, *field.shape), field.dtype, seed ^ zlib.crc32(field.name.encode()))


def rank_part_of_page(spec: CacheSpec, group: PagedGroup, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank has of a page: the layers of its stage, and its share of the heads, or the one that it shares."""
    stage, tp_rank = divmod(rank, spec.tp_size)
    own = whole[_stage_positions(spec, group.layers, stage)]
    if group.planes == 1:  # a latent, which every rank has whole
        return own
    share = max(1, group.heads // spec.tp_size)
    first = tp_rank * group.heads // spec.tp_size
    return own[:, :, :, first : first + share]


def rank_part_of_state(
    spec: CacheSpec, layers: tuple[int, ...], field: StateField, whole: torch.Tensor, rank: int
) -> torch.Tensor:
    """What a rank has of a field: its heads of every section, one section after the other."""
    stage, tp_rank = divmod(rank, spec.tp_size)
    own = whole[_stage_positions(spec, layers, stage)]
    if field.split is None:
        return own
    axis = field.split.axis
    sections = field.split.sections or ((field.shape[axis], 1),)
    parts = []
    start = 0
    for heads, elements in sections:
        share, first = max(1, heads // spec.tp_size), tp_rank * heads // spec.tp_size
        parts.append(own.narrow(axis + 1, start + first * elements, share * elements))
        start += heads * elements
    return torch.cat(parts, dim=axis + 1)


def compute(l1: L1Pool, slots: Sequence[Slot]) -> None:
    """What the model does to L1 of one rank: write the rank's part of every slot."""
    for slot in slots:
        for target, part in _parts(l1, slot, with_transient=False):
            target.copy_(part)


def differing(l1: L1Pool, slots: Sequence[Slot]) -> list[Slot]:
    """The slots that do not hold, byte for byte, the rank's part of what they are of, and nothing transient."""
    return [
        slot
        for slot in slots
        if not all(
            torch.equal(_bytes_of(held), _bytes_of(part)) for held, part in _parts(l1, slot, with_transient=True)
        )
    ]


def bytes_of_slots(l1: L1Pool, slots: Sequence[Slot]) -> int:
    """Bytes of one rank that ``compute`` writes and ``differing`` compares."""
    return sum(part.nbytes for slot in slots for _, part in _parts(l1, slot, with_transient=False))


def _parts(l1: L1Pool, slot: Slot, *, with_transient: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the rank holds in a slot, with what should be there."""
    spec, rank = l1.spec, l1.rank.rank
    group = spec.groups[slot.group]
    if l1.rank.lacks(slot.group):
        return []
    if isinstance(group, PagedGroup):
        whole = whole_page(group, spec.page_tokens, slot.seed)
        return [(l1.paged[slot.group][:, slot.slot], rank_part_of_page(spec, group, whole, rank))]
    parts = []
    for field in group.fields:
        held = l1.state[slot.group][field.name][:, slot.slot]
        if field.transient or slot.seed == 0:
            if with_transient:
                parts.append((held, torch.zeros_like(held)))
            continue
        whole = whole_state(len(group.layers), field, slot.seed)
        parts.append((held, rank_part_of_state(spec, group.layers, field, whole, rank)))
    return parts


def _stage_positions(spec: CacheSpec, layers: Sequence[int], stage: int) -> list[int]:
    if spec.pp_layers is None:
        return list(range(len(layers)))
    first = sum(spec.pp_layers[:stage])
    return [position for position, layer in enumerate(layers) if first <= layer < first + spec.pp_layers[stage]]


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Random bytes of a shape, every eight of them changed by the seed: at the speed of memory."""
    element = torch_dtype(dtype)
    count = torch.Size(shape).numel() * element.itemsize
    word = seed * 0x9E3779B97F4A7C15 % (1 << 63)
    return (_random_words(-(-count // 8)) ^ word).view(torch.uint8)[:count].view(element).reshape(shape)


@cache
def _random_words(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), dtype=torch.int64, generator=generator)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
