"""What the planner knows of a model: its attention, its recurrent state and its weights, over all layers and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hicache.errors import ConfigError
from hicache.groups import Group, PagedGroup, StateField, StateGroup
from hicache.plan.dtypes import row_elements
from hicache.slices import HeadSplit

StateKind: TypeAlias = Literal["gdn", "kda", "mamba1", "mamba2", "lightning"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers that keep keys and values for each token. ``kv_heads == 0`` means MLA: one latent for all heads."""

    layers: tuple[int, ...]
    query_heads: int
    head_dim: int  # of queries and keys as they are computed
    v_head_dim: int
    kv_heads: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    window_tokens: int | None = None
    index_dim: int = 0  # keys of a sparse attention's indexer

    @property
    def is_mla(self) -> bool:
        """Whether one latent is kept in place of keys and values."""
        return self.kv_heads == 0


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Layers that keep one state per sequence: a convolution over ``heads x head_dim`` and twice ``groups x
    state_dim`` channels, and a temporal state [heads, head_dim, state_dim]."""

    kind: StateKind
    layers: tuple[int, ...]
    heads: int
    head_dim: int
    groups: int  # heads of keys (GDN, KDA), groups of B and C (Mamba2)
    state_dim: int
    conv_kernel: int

    @property
    def conv_sections(self) -> tuple[tuple[int, int], ...]:
        """Heads and channels of each part of the convolution, which tensor parallelism splits one by one."""
        keys = ((self.groups, self.state_dim),) * 2 if self.groups else ()
        return (*keys, (self.heads, self.head_dim))


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the weights: experts, what tensor parallelism cuts and copies, and what every GPU has of any stage.

    ``active_parameters`` are those that a token is multiplied with, without embeddings.
    """

    expert_bytes: float
    sharded_bytes: float
    copied_bytes: float = 0.0
    replicated_bytes: float = 0.0
    active_parameters: float = 0.0
    parameters: float = 0.0


@dataclass(frozen=True, slots=True)
class Experts:
    """How many routed experts a layer has, and how many of them a token takes."""

    count: int
    top_k: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as far as its sizes go."""

    name: str
    layer_count: int
    attention: tuple[Attention, ...]
    recurrence: tuple[Recurrence, ...]
    weights: Weights
    experts: Experts | None
    context_tokens: int
    state_dtype: str = "float32"
    source: str = field(default="", compare=False)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers with recurrent state."""
        return tuple(sorted(layer for group in self.recurrence for layer in group.layers))

    @property
    def full_attention(self) -> tuple[Attention, ...]:
        """Attention to everything before."""
        return tuple(group for group in self.attention if group.window_tokens is None)

    @property
    def window_attention(self) -> tuple[Attention, ...]:
        """Attention to a window."""
        return tuple(group for group in self.attention if group.window_tokens is not None)

    def groups(self, *, kv_dtype: str, state_dtype: str, conv_dtype: str) -> tuple[Group, ...]:
        """The model as the groups of a CacheSpec, for pools that hold exactly the planned bytes."""
        paged = [_paged_group(f"attention{i}", a, kv_dtype) for i, a in enumerate(self.attention) if a.layers]
        states = [_state_group(f"state{i}", r, state_dtype, conv_dtype) for i, r in enumerate(self.recurrence)]
        return (*paged, *states)


def stage_counts(layers: Sequence[int], stages: Sequence[range]) -> list[int]:
    """How many of ``layers`` each pipeline stage has."""
    return [sum(layer in stage for layer in layers) for stage in stages]


def pipeline_stages(layer_count: int, pp: int) -> list[range]:
    """The layers of each pipeline stage; layers that are left over go to the last stages, one each.

    As SGLang's ``get_pp_indices``. Raises ConfigError where a stage would have none.
    """
    if pp > layer_count:
        raise ConfigError("pp", pp, f"at most {layer_count}, the model's layers")
    base, extra = divmod(layer_count, pp)
    stops = [base * (stage + 1) + max(0, stage + 1 - (pp - extra)) for stage in range(pp)]
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def heads_on_rank(heads: int, tp: int, *, setting: str) -> int:
    """An equal share of ``heads``, or the one that several ranks have in common. Raises ConfigError otherwise."""
    if heads % tp and tp % heads:
        raise ConfigError("tp", tp, f"a divisor or a multiple of the model's {heads} {setting}")
    return max(1, heads // tp)


def _paged_group(name: str, attention: Attention, kv_dtype: str) -> Group:
    if attention.index_dim:
        raise ConfigError(name, "indexer", "attention without an indexer: a group has one kind of rows")
    elements, dtype = row_elements(attention, kv_dtype)
    if attention.is_mla:
        return PagedGroup(name, attention.layers, heads=1, head_dim=elements, dtype=dtype, planes=1)
    if attention.head_dim != attention.v_head_dim:
        raise ConfigError(f"{name}.v_head_dim", attention.v_head_dim, f"{attention.head_dim}, as the keys have")
    return PagedGroup(
        name,
        attention.layers,
        heads=attention.kv_heads,
        head_dim=elements,
        dtype=dtype,
        window_tokens=attention.window_tokens,
    )


def _state_group(name: str, recurrence: Recurrence, state_dtype: str, conv_dtype: str) -> Group:
    channels = sum(heads * dim for heads, dim in recurrence.conv_sections)
    temporal = StateField(
        "temporal",
        (recurrence.heads, recurrence.head_dim, recurrence.state_dim),
        state_dtype,
        split=HeadSplit(0),
    )
    if recurrence.conv_kernel < 2:
        return StateGroup(name, recurrence.layers, (temporal,))
    conv = StateField(
        "conv",
        (channels, recurrence.conv_kernel - 1),
        conv_dtype,
        split=HeadSplit(0, recurrence.conv_sections),
    )
    return StateGroup(name, recurrence.layers, (conv, temporal))
