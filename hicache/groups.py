"""Groups of layers: what each keeps in a cache, its geometry, and what one rank of a replica has of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TypeAlias

from hicache.errors import SpecError
from hicache.slices import HeadSplit, Section, check_heads, check_whole, head_span, local_sections, whole_numbers

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

STORED_DTYPE = "float8_e4m3fn"
QUANTISED_DTYPES = ("bfloat16", "float16", "float32")
SCALE_BYTES = 4  # float32, for each layer and plane of a page


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises SpecError for an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise SpecError("dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Layers that keep bytes per token: MHA or GQA (``planes=2``: K and V), MLA (``planes=1``), sliding window.

    ``heads`` are the KV heads of the whole model. An L3 object of the group is one page, of the layers of one pipeline
    stage and the heads of one slice: ``[layers][planes][page_tokens][heads x head_dim]``.

    ``stored_dtype="float8_e4m3fn"`` keeps pages of bfloat16, float16 or float32 in L2 and L3 in one byte an element,
    and loses precision. Behind such a payload lie ``[layers][planes]`` scales in float32, each a power of two.
    """

    name: str
    layers: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: str
    planes: int = 2
    window_tokens: int | None = None
    stored_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _checked_layers(self.name, self.layers))
        check_whole(f"{self.name}.heads", self.heads)
        check_whole(f"{self.name}.head_dim", self.head_dim)
        if self.planes not in (1, 2):
            raise SpecError(f"{self.name}.planes", self.planes, "2 (K and V) or 1 (MLA latent)")
        if self.window_tokens is not None:
            check_whole(f"{self.name}.window_tokens", self.window_tokens, otherwise=", or None for full attention")
        dtype_bytes(self.dtype)
        if self.stored_dtype is not None:
            self._check_stored()

    def _check_stored(self) -> None:
        if self.stored_dtype != STORED_DTYPE:
            raise SpecError(f"{self.name}.stored_dtype", self.stored_dtype, f"{STORED_DTYPE!r}, or None for dtype")
        if self.dtype not in QUANTISED_DTYPES:
            expected = f"one of {', '.join(QUANTISED_DTYPES)} with stored_dtype, which rounds numbers"
            raise SpecError(f"{self.name}.dtype", self.dtype, expected)
        if self.head_dim % 4:
            expected = "a multiple of 4 with stored_dtype, so that the scales behind the payload are aligned"
            raise SpecError(f"{self.name}.head_dim", self.head_dim, expected)

    @classmethod
    def mla(
        cls,
        name: str,
        *,
        layers: tuple[int, ...],
        latent_dim: int,
        rope_dim: int,
        dtype: str,
        stored_dtype: str | None = None,
    ) -> PagedGroup:
        """A multi-head latent attention group: one row of ``latent_dim + rope_dim`` elements per token and layer."""
        head_dim = latent_dim + rope_dim
        return cls(name, layers, heads=1, head_dim=head_dim, dtype=dtype, planes=1, stored_dtype=stored_dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one plane of one layer."""
        return self.heads * self.head_dim * dtype_bytes(self.dtype)

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of one page in L1, over all layers and heads."""
        return len(self.layers) * self.planes * page_tokens * self.row_bytes

    def object_bytes(self, page_tokens: int) -> int:
        """Bytes of one page in L2 and L3, over all layers and heads: with its scales, where it has them."""
        if self.stored_dtype is None:
            return self.page_bytes(page_tokens)
        return len(self.layers) * self.planes * (page_tokens * self.heads * self.head_dim + SCALE_BYTES)

    @property
    def sections(self) -> tuple[tuple[Section, ...], ...]:
        """What tensor parallelism splits of a page: its heads."""
        return (((self.heads, 1),),)

    def check_parallel(self, *, tp_size: int, slices_max: int) -> None:
        """Raises SpecError unless the heads can be split so."""
        check_heads(f"{self.name}.heads", self.heads, tp_size=tp_size, slices_max=slices_max)

    def on_rank(self, layers: tuple[int, ...], *, tp_size: int, tp_rank: int) -> PagedGroup:
        """The group as one rank has it: ``layers`` of its stage, and its heads."""
        first, stop = head_span(self.heads, parts=tp_size, part=tp_rank)
        return dataclasses.replace(self, layers=layers, heads=stop - first)

    def reach_pages(self, page_tokens: int) -> int | None:
        """How many pages before a boundary must be there to go on from it; None means all of them.

        The token after the boundary attends to the ``window_tokens - 1`` tokens before it.
        """
        if self.window_tokens is None:
            return None
        return math.ceil((self.window_tokens - 1) / page_tokens)


@dataclass(frozen=True, slots=True)
class StateField:
    """One tensor of a recurrent state, per layer and sequence, in the ``shape`` of the whole model.

    ``transient`` fields never leave L1. ``split`` tells which part of it a rank has under tensor parallelism; without
    one every rank has it whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    transient: bool = False
    split: HeadSplit | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("state field name", self.name, "a non-empty name")
        object.__setattr__(self, "shape", whole_numbers(f"{self.name}.shape", self.shape, at_least=1))
        if not self.shape:
            raise SpecError(f"{self.name}.shape", self.shape, "one or more dimensions of at least 1")
        dtype_bytes(self.dtype)
        if self.split is not None:
            if not isinstance(self.split, HeadSplit):
                raise SpecError(f"{self.name}.split", self.split, "a HeadSplit, or None for what every rank has whole")
            self.split.sections_of(self.shape, setting=self.name)

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections of the axis that is split; none where the field is whole on every rank."""
        return () if self.split is None else self.split.sections_of(self.shape, setting=self.name)

    def on_rank(self, *, tp_size: int, tp_rank: int) -> StateField:
        """The field as one rank has it."""
        if self.split is None:
            return self
        axis, sections = self.split.axis, local_sections(self.sections, tp_size=tp_size, tp_rank=tp_rank)
        elements = sum(heads * head_elements for heads, head_elements in sections)
        shape = (*self.shape[:axis], elements, *self.shape[axis + 1 :])
        return dataclasses.replace(self, shape=shape, split=HeadSplit(axis, sections))

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of the field in one layer."""
        return math.prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers that keep one fixed-size state per sequence (Mamba2, GDN, KDA).

    A snapshot is valid only at the boundary it was taken at: it "reaches" exactly one page back, its own. An L3 object
    of the group is the concatenation of its persistent fields, ``[layers][shape]`` each: of the layers of one pipeline
    stage, and of each field the part of one slice.
    """

    name: str
    layers: tuple[int, ...]
    fields: tuple[StateField, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _checked_layers(self.name, self.layers))
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

    @property
    def sections(self) -> tuple[tuple[Section, ...], ...]:
        """What tensor parallelism splits of each persistent field."""
        return tuple(state_field.sections for state_field in self.persistent_fields)

    def check_parallel(self, *, tp_size: int, slices_max: int) -> None:
        """Raises SpecError unless every section can be split so; transient fields are in no slice."""
        for state_field in self.fields:
            setting = f"{self.name}.{state_field.name}.split.sections"
            for heads, _ in state_field.sections:
                check_heads(
                    setting, heads, tp_size=tp_size, slices_max=tp_size if state_field.transient else slices_max
                )

    def on_rank(self, layers: tuple[int, ...], *, tp_size: int, tp_rank: int) -> StateGroup:
        """The group as one rank has it: ``layers`` of its stage, and its part of each field."""
        fields = tuple(state_field.on_rank(tp_size=tp_size, tp_rank=tp_rank) for state_field in self.fields)
        return dataclasses.replace(self, layers=layers, fields=fields)

    def reach_pages(self, page_tokens: int) -> int | None:
        """1: the snapshot that belongs to the last page before the boundary."""
        return 1


Group: TypeAlias = PagedGroup | StateGroup


def _checked_layers(name: str, layers: tuple[int, ...]) -> tuple[int, ...]:
    if not name:
        raise SpecError("group name", name, "a non-empty name")
    checked = whole_numbers(f"{name}.layers", layers, at_least=0)
    if not checked or len(set(checked)) != len(checked):
        raise SpecError(f"{name}.layers", layers, "one or more distinct layer ids")
    return checked
