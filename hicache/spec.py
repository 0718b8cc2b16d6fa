"""What a model keeps in its cache: groups of layers, how ranks share them, and the namespace digest made of it all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from hicache.errors import SpecError
from hicache.groups import DTYPE_BYTES, Group, PagedGroup, StateField, StateGroup, dtype_bytes
from hicache.keys import KEY_HASHES, FieldValue, KeyHash, digest_fields, encode_fields
from hicache.rank_spec import RankSpec
from hicache.slices import HeadSplit, check_whole, slice_count, whole_numbers

__all__ = [
    "DTYPE_BYTES",
    "FORMAT_VERSION",
    "SHARDS_MAX",
    "CacheSpec",
    "Group",
    "HeadSplit",
    "Layout",
    "PagedGroup",
    "RankSpec",
    "StateField",
    "StateGroup",
    "differing_fields",
    "dtype_bytes",
    "namespace_digest",
]

Layout: TypeAlias = Literal["page_first_direct"]

FORMAT_VERSION = 2
SHARDS_MAX = 1 << 16  # an object key has 16 bits for the shard


@dataclass(frozen=True)
class CacheSpec:
    """Everything that two engines must have equal to share bytes. The same on every rank of a replica.

    ``groups`` describe the whole model: all layers, all heads. ``revision`` names the weights: two checkpoints of one
    model must differ in it.

    ``tp_size`` ranks share the heads of each layer. ``tp_lcm``, a multiple of it, is the number of slices that heads
    are stored in: replicas with one ``tp_lcm`` share what they store, whatever their ``tp_size``. None: ``tp_size``.
    ``pp_layers`` gives the pipeline stages, by how many layers each has: layer ids count on from 0. None: one stage.
    Rank ``stage * tp_size + tp_rank`` has the part that ``rank`` tells.
    """

    model: str
    revision: str
    groups: tuple[Group, ...]
    page_tokens: int = 64
    layout: Layout = "page_first_direct"
    key_hash: KeyHash = "blake2b"
    tp_size: int = 1
    tp_lcm: int | None = None
    pp_layers: tuple[int, ...] | None = None
    identity: tuple[tuple[str, FieldValue], ...] = field(default=())  # whatever else the engine must keep apart

    def __post_init__(self) -> None:
        given: object = self.groups
        if not isinstance(given, list | tuple) or not all(isinstance(group, Group) for group in given):
            raise SpecError("groups", self.groups, "a tuple of PagedGroup and StateGroup")
        object.__setattr__(self, "groups", tuple(self.groups))
        names = [group.name for group in self.groups]
        if not self.groups or len(set(names)) != len(names):
            raise SpecError("groups", names, "one or more groups with distinct names")
        if len(self.groups) > 32:
            raise SpecError("groups", len(self.groups), "at most 32 groups")
        check_whole("page_tokens", self.page_tokens)
        check_whole("tp_size", self.tp_size)
        self._check_parallel()
        identity_names = [name for name, _ in self.identity]
        if len(set(identity_names)) != len(identity_names):
            raise SpecError("identity", identity_names, "distinct names")
        for name, value in self.identity:
            if type(value) is int and not -(2**63) <= value < 2**64:
                raise SpecError(f"identity.{name}", value, "a number of 64 bits, as hicached is told it, or its text")
        if self.layout != "page_first_direct":
            raise SpecError("layout", self.layout, "page_first_direct, the only layout that L3 reads in one extent")
        if self.key_hash not in KEY_HASHES:
            raise SpecError("key_hash", self.key_hash, f"one of {', '.join(KEY_HASHES)}")

    def _check_parallel(self) -> None:
        if self.tp_lcm is not None:
            check_whole("tp_lcm", self.tp_lcm)
            if self.tp_lcm % self.tp_size:
                raise SpecError("tp_lcm", self.tp_lcm, f"a multiple of tp_size = {self.tp_size}, or None")
        for group in self.groups:
            group.check_parallel(tp_size=self.tp_size, slices_max=self._slices_max)
        if self.pp_layers is not None:
            object.__setattr__(self, "pp_layers", whole_numbers("pp_layers", self.pp_layers, at_least=1))
            self._check_stages(self.pp_layers)
        shards_max = max(self.slice_counts) * self.pp_size
        if shards_max > SHARDS_MAX:
            expected = f"at most {SHARDS_MAX} slices times pipeline stages: a smaller tp_lcm"
            raise SpecError("shards of a page", shards_max, expected)

    def _check_stages(self, pp_layers: tuple[int, ...]) -> None:
        if not pp_layers:
            raise SpecError("pp_layers", pp_layers, "at least 1 layer in each pipeline stage, or None for one stage")
        for group in self.groups:
            outside = [layer for layer in group.layers if not 0 <= layer < sum(pp_layers)]
            if outside:
                expected = f"layers within [0, {sum(pp_layers)}), the sum of pp_layers"
                raise SpecError(f"{group.name}.layers", outside, expected)
        for stage in range(self.pp_size):
            if not any(self.stage_layers(group, stage) for group in self.groups):
                expected = f"a layer of some group in every stage; stage {stage} has none"
                raise SpecError("pp_layers", pp_layers, expected)

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return 1 if self.pp_layers is None else len(self.pp_layers)

    @property
    def rank_count(self) -> int:
        """Ranks of a replica: ``tp_size`` in each pipeline stage."""
        return self.tp_size * self.pp_size

    @property
    def _slices_max(self) -> int:
        return self.tp_lcm or self.tp_size

    def rank(self, rank: int | None = None) -> RankSpec:
        """What one rank has of the model, and which objects it reads and writes; None for the only one there is.

        Raises SpecError for a rank that the replica does not have.
        """
        if rank is None and self.rank_count > 1:
            raise SpecError("rank", rank, f"one of the {self.rank_count} ranks of the replica, from 0")
        return RankSpec.of(self, rank or 0)

    def stage_layers(self, group: Group, stage: int) -> tuple[int, ...]:
        """The layers of a group in one pipeline stage, perhaps none."""
        if self.pp_layers is None:
            return group.layers
        first = sum(self.pp_layers[:stage])
        return tuple(layer for layer in group.layers if first <= layer < first + self.pp_layers[stage])

    @cached_property
    def slice_counts(self) -> tuple[int, ...]:
        """Slices that the heads are stored in, by group index: 1 for what every rank has whole (MLA)."""
        return tuple(
            slice_count((heads for sections in group.sections for heads, _ in sections), slices_max=self._slices_max)
            for group in self.groups
        )

    @cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """Shards that one page (or snapshot) is stored in, by group index: ``stage * slices + slice``."""
        return tuple(
            tuple(
                stage * slices + slice_index
                for stage in range(self.pp_size)
                if self.stage_layers(group, stage)
                for slice_index in range(slices)
            )
            for group, slices in zip(self.groups, self.slice_counts, strict=True)
        )

    def shard_bytes(self, group: int, stage: int) -> int:
        """Payload bytes of each object of a group in one pipeline stage; 0 where the stage has no layer of it."""
        layers = self.stage_layers(self.groups[group], stage)
        if not layers:
            return 0
        sliced = self.groups[group].on_rank(layers, tp_size=self.slice_counts[group], tp_rank=0)
        return sliced.object_bytes(self.page_tokens)

    @cached_property
    def object_bytes(self) -> tuple[int, ...]:
        """Payload bytes of one page or snapshot, by group index: all its shards together."""
        stages = range(self.pp_size)
        return tuple(
            slices * sum(self.shard_bytes(group, stage) for stage in stages)
            for group, slices in enumerate(self.slice_counts)
        )

    @cached_property
    def object_bytes_max(self) -> int:
        """Payload bytes of the largest object: of one shard."""
        return max(self.shard_bytes(group, stage) for group in range(len(self.groups)) for stage in range(self.pp_size))

    @cached_property
    def reach_pages(self) -> tuple[int | None, ...]:
        """Pages before a boundary that must be there, by group index; None means all."""
        return tuple(group.reach_pages(self.page_tokens) for group in self.groups)

    @property
    def has_state(self) -> bool:
        """Whether any group keeps recurrent state."""
        return any(isinstance(group, StateGroup) for group in self.groups)

    def group_index(self, name: str) -> int:
        """Index of the group called ``name``. Raises KeyError."""
        for index, group in enumerate(self.groups):
            if group.name == name:
                return index
        raise KeyError(name)

    @cached_property
    def descriptor(self) -> dict[str, FieldValue]:
        """Every identity field by its dotted name: what the namespace digest covers and a mismatch is named by."""
        return dict(self._descriptor_items())

    @cached_property
    def namespace(self) -> bytes:
        """The 32-byte namespace digest."""
        return namespace_digest(self.descriptor)

    def _descriptor_items(self) -> Iterator[tuple[str, FieldValue]]:
        yield "format_version", FORMAT_VERSION
        for name in ("model", "revision", "page_tokens", "layout", "key_hash"):
            yield name, getattr(self, name)
        yield "pp_layers", None if self.pp_size == 1 else ",".join(map(str, self.pp_layers or ()))
        yield "groups", len(self.groups)
        for index, group in enumerate(self.groups):
            prefix = f"group.{index}"
            yield f"{prefix}.name", group.name
            yield f"{prefix}.layers", ",".join(map(str, group.layers))
            yield f"{prefix}.slices", self.slice_counts[index]
            if isinstance(group, PagedGroup):
                yield f"{prefix}.kind", "paged"
                for name in ("heads", "head_dim", "dtype", "planes", "window_tokens"):
                    yield f"{prefix}.{name}", getattr(group, name)
                if group.stored_dtype is not None:
                    yield f"{prefix}.stored_dtype", group.stored_dtype
            else:
                yield f"{prefix}.kind", "state"
                yield f"{prefix}.fields", len(group.fields)
                for position, state_field in enumerate(group.fields):
                    yield f"{prefix}.field.{position}", _described(state_field)
        for name, value in self.identity:
            yield f"identity.{name}", value


def namespace_digest(descriptor: dict[str, FieldValue]) -> bytes:
    """The digest of a descriptor, whatever order its fields arrived in."""
    return digest_fields(sorted(descriptor.items()))


def differing_fields(left: dict[str, FieldValue], right: dict[str, FieldValue]) -> list[str]:
    """Human-readable differences between two descriptors: ``page_tokens: 64 != 32``. None when the digests agree."""
    return [
        f"{name}: {left.get(name)!r} != {right.get(name)!r}"
        for name in sorted(left.keys() | right.keys())
        if encode_fields(_present(left, name)) != encode_fields(_present(right, name))
    ]


def _described(state_field: StateField) -> str:
    shape = "x".join(map(str, state_field.shape))
    persistence = "transient" if state_field.transient else "persistent"
    sections = ",".join(f"{heads}x{elements}" for heads, elements in state_field.sections)
    split = "whole" if state_field.split is None else f"split {state_field.split.axis}: {sections}"
    return f"{state_field.name} {shape} {state_field.dtype} {persistence} {split}"


def _present(descriptor: dict[str, FieldValue], name: str) -> list[tuple[str, FieldValue]]:
    return [(name, descriptor[name])] if name in descriptor else []
