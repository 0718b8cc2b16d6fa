"""What one rank of a replica has of the model, and which L3 objects hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache.errors import SpecError
from hicache.groups import Group
from hicache.slices import Span, is_first_holder, is_whole, rank_slices, slice_spans

if TYPE_CHECKING:  # which makes RankSpecs
    from hicache.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """One L3 object of each page (or snapshot) of a group, as one rank has it.

    ``spans[i]`` tells where along the split axis the shard's elements lie within the rank's own tensors, in their order
    within the object: tensor ``i`` is the heads of a paged group, or the i-th persistent field of a state group. No
    span: the whole tensor, which is not split.
    """

    index: int  # in the object key
    size_bytes: int
    is_written: bool  # by this rank: of those that have the shard, exactly one stores it, and all read it
    spans: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The part of rank ``stage * spec.tp_size + tp_rank``. By group index, which is the same on every rank:

    ``groups``: the group with the layers of the stage and the heads of the rank; None where the stage has no layer of
    it. ``shards``: the objects that make up the rank's part of a page, in the order in which they lie in an L2 slot:
    all of one size; none where the stage has no layer of the group.
    """

    spec: CacheSpec
    rank: int
    stage: int
    tp_rank: int
    groups: tuple[Group | None, ...]
    shards: tuple[tuple[Shard, ...], ...]

    @classmethod
    def of(cls, spec: CacheSpec, rank: int) -> RankSpec:
        """Use ``spec.rank``. Raises SpecError for a rank that the replica does not have."""
        if not is_whole(rank, at_least=0) or rank >= spec.rank_count:
            raise SpecError("rank", rank, f"one of the {spec.rank_count} ranks of the replica, from 0")
        stage, tp_rank = divmod(rank, spec.tp_size)
        groups = tuple(_local(spec, group, stage, tp_rank) for group in spec.groups)
        shards = tuple(
            () if group is None else _shards(spec, index, stage, tp_rank) for index, group in enumerate(groups)
        )
        return cls(spec, rank, stage, tp_rank, groups, shards)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.spec.page_tokens

    def lacks(self, group: int) -> bool:
        """Whether the rank has nothing of a group, so that there is nothing to do for it. Raises IndexError."""
        if group < 0:
            raise IndexError(f"group {group} is outside of [0, {len(self.groups)})")
        return self.groups[group] is None


def _local(spec: CacheSpec, group: Group, stage: int, tp_rank: int) -> Group | None:
    layers = spec.stage_layers(group, stage)
    return group.on_rank(layers, tp_size=spec.tp_size, tp_rank=tp_rank) if layers else None


def _shards(spec: CacheSpec, group: int, stage: int, tp_rank: int) -> tuple[Shard, ...]:
    slices, size_bytes = spec.slice_counts[group], spec.shard_bytes(group, stage)
    tp_size = spec.tp_size
    is_written = is_first_holder(slices, tp_size=tp_size, tp_rank=tp_rank)
    return tuple(
        Shard(
            index=stage * slices + slice_index,
            size_bytes=size_bytes,
            is_written=is_written,
            spans=tuple(
                slice_spans(sections, slices=slices, slice_index=slice_index, tp_size=tp_size, tp_rank=tp_rank)
                for sections in spec.groups[group].sections
            ),
        )
        for slice_index in rank_slices(slices, tp_size=tp_size, tp_rank=tp_rank)
    )
