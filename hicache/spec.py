"""What a model keeps in its cache: groups of layers, their geometry, and the namespace digest made of all of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from hicache.errors import SpecError
from hicache.keys import KEY_HASHES, FieldValue, KeyHash, digest_fields, encode_fields

Layout: TypeAlias = Literal["page_first_direct"]

FORMAT_VERSION = 1
SHARDS_MAX = 1 << 16  # an object key has 16 bits for the shard
DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises SpecError for an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise SpecError("dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Layers that keep bytes per token: MHA or GQA (``planes=2``: K and V), MLA (``planes=1``), sliding window.

    ``heads`` and ``head_dim`` are those of one shard. An L3 object of the group is one page of all its layers:
    ``[layers][planes][page_tokens][heads x head_dim]``.
    """

    name: str
    layers: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: str
    planes: int = 2
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_name_and_layers(self.name, self.layers)
        for setting, value in (("heads", self.heads), ("head_dim", self.head_dim)):
            if value < 1:
                raise SpecError(f"{self.name}.{setting}", value, "at least 1")
        if self.planes not in (1, 2):
            raise SpecError(f"{self.name}.planes", self.planes, "2 (K and V) or 1 (MLA latent)")
        if self.window_tokens is not None and self.window_tokens < 1:
            raise SpecError(f"{self.name}.window_tokens", self.window_tokens, "at least 1, or None for full attention")
        dtype_bytes(self.dtype)

    @classmethod
    def mla(cls, name: str, *, layers: tuple[int, ...], latent_dim: int, rope_dim: int, dtype: str) -> PagedGroup:
        """A multi-head latent attention group: one row of ``latent_dim + rope_dim`` elements per token and layer."""
        return cls(name, layers, heads=1, head_dim=latent_dim + rope_dim, dtype=dtype, planes=1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one plane of one layer."""
        return self.heads * self.head_dim * dtype_bytes(self.dtype)

    def object_bytes(self, page_tokens: int) -> int:
        """Bytes of one page over all layers."""
        return len(self.layers) * self.planes * page_tokens * self.row_bytes

    def reach_pages(self, page_tokens: int) -> int | None:
        """How many pages before a boundary must be there to go on from it; None means all of them.

        The token after the boundary attends to the ``window_tokens - 1`` tokens before it.
        """
        if self.window_tokens is None:
            return None
        return math.ceil((self.window_tokens - 1) / page_tokens)


@dataclass(frozen=True, slots=True)
class StateField:
    """One tensor of a recurrent state, per layer and sequence. ``transient`` fields never leave L1."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    transient: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("state field name", self.name, "a non-empty name")
        if not self.shape or min(self.shape) < 1:
            raise SpecError(f"{self.name}.shape", self.shape, "one or more dimensions of at least 1")
        dtype_bytes(self.dtype)

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of the field in one layer."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers that keep one fixed-size state per sequence (Mamba2, GDN, KDA).

    A snapshot is valid only at the boundary it was taken at: it "reaches" exactly one page back, its own. An L3 object
    of the group is the concatenation of its persistent fields, ``[layers][shape]`` each.
    """

    name: str
    layers: tuple[int, ...]
    fields: tuple[StateField, ...]

    def __post_init__(self) -> None:
        _check_name_and_layers(self.name, self.layers)
        names = [state_field.name for state_field in self.fields]
        if len(set(names)) != len(names):
            raise SpecError(f"{self.name}.fields", names, "distinct names")
        if not self.persistent_fields:
            raise SpecError(f"{self.name}.fields", names, "at least one field that is not transient")

    @property
    def persistent_fields(self) -> tuple[StateField, ...]:
        """The fields that a snapshot holds."""
        return tuple(state_field for state_field in self.fields if not state_field.transient)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one L1 slot: all fields, transient ones included."""
        return len(self.layers) * sum(state_field.bytes_per_layer for state_field in self.fields)

    def object_bytes(self, page_tokens: int) -> int:
        """Bytes of one snapshot over all layers: persistent fields only, whatever ``page_tokens`` is."""
        return len(self.layers) * sum(state_field.bytes_per_layer for state_field in self.persistent_fields)

    def reach_pages(self, page_tokens: int) -> int | None:
        """1: the snapshot that belongs to the last page before the boundary."""
        return 1


Group: TypeAlias = PagedGroup | StateGroup


@dataclass(frozen=True)
class CacheSpec:
    """Everything that two engines must have equal to share bytes. The same on every rank of a replica.

    ``revision`` names the weights: two checkpoints of one model must differ in it. ``tp_size`` and ``pp_size`` are part
    of the geometry, since each shard's bytes are its own.
    """

    model: str
    revision: str
    groups: tuple[Group, ...]
    page_tokens: int = 64
    layout: Layout = "page_first_direct"
    key_hash: KeyHash = "blake2b"
    tp_size: int = 1
    pp_size: int = 1
    identity: tuple[tuple[str, FieldValue], ...] = field(default=())  # whatever else the engine must keep apart

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not self.groups or len(set(names)) != len(names):
            raise SpecError("groups", names, "one or more groups with distinct names")
        if len(self.groups) > 32:
            raise SpecError("groups", len(self.groups), "at most 32 groups")
        for setting, value in (("page_tokens", self.page_tokens), ("tp_size", self.tp_size), ("pp_size", self.pp_size)):
            if value != int(value) or value < 1:
                raise SpecError(setting, value, "a whole number of at least 1")
        if self.shard_count > SHARDS_MAX:
            raise SpecError("tp_size * pp_size", self.shard_count, f"at most {SHARDS_MAX} shards")
        identity_names = [name for name, _ in self.identity]
        if len(set(identity_names)) != len(identity_names):
            raise SpecError("identity", identity_names, "distinct names")
        if self.layout != "page_first_direct":
            raise SpecError("layout", self.layout, "page_first_direct, the only layout that L3 reads in one extent")
        if self.key_hash not in KEY_HASHES:
            raise SpecError("key_hash", self.key_hash, f"one of {', '.join(KEY_HASHES)}")

    @property
    def shard_count(self) -> int:
        """Shards that one page is stored in."""
        return self.tp_size * self.pp_size

    @cached_property
    def object_bytes(self) -> tuple[int, ...]:
        """Payload bytes of one object, by group index."""
        return tuple(group.object_bytes(self.page_tokens) for group in self.groups)

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
        for name in ("model", "revision", "page_tokens", "layout", "key_hash", "tp_size", "pp_size"):
            yield name, getattr(self, name)
        yield "groups", len(self.groups)
        for index, group in enumerate(self.groups):
            prefix = f"group.{index}"
            yield f"{prefix}.name", group.name
            yield f"{prefix}.layers", ",".join(map(str, group.layers))
            if isinstance(group, PagedGroup):
                yield f"{prefix}.kind", "paged"
                for name in ("heads", "head_dim", "dtype", "planes", "window_tokens"):
                    yield f"{prefix}.{name}", getattr(group, name)
            else:
                yield f"{prefix}.kind", "state"
                yield f"{prefix}.fields", len(group.fields)
                for position, state_field in enumerate(group.fields):
                    shape = "x".join(map(str, state_field.shape))
                    persistence = "transient" if state_field.transient else "persistent"
                    yield f"{prefix}.field.{position}", f"{state_field.name} {shape} {state_field.dtype} {persistence}"
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


def _present(descriptor: dict[str, FieldValue], name: str) -> list[tuple[str, FieldValue]]:
    return [(name, descriptor[name])] if name in descriptor else []


def _check_name_and_layers(name: str, layers: tuple[int, ...]) -> None:
    if not name:
        raise SpecError("group name", name, "a non-empty name")
    if not layers or len(set(layers)) != len(layers):
        raise SpecError(f"{name}.layers", layers, "one or more distinct layer ids")
