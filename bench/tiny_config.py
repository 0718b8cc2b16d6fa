"""The dimensions of the tiny hybrid model: what they are, and the cache description that follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from hicache.errors import ConfigError
from hicache.keys import FieldValue
from hicache.spec import CacheSpec, Group, PagedGroup, StateField, StateGroup

LayerKind: TypeAlias = Literal["full", "swa", "gdn"]

GROUP_NAMES: dict[LayerKind, str] = {"full": "attn", "swa": "swa", "gdn": "gdn"}


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """Sizes of the model and of its arithmetic. Raises ConfigError for sizes that do not fit together.

    ``block_tokens`` and ``context_block_tokens`` do not change what is computed but the order of additions, so they
    are part of the identity: two engines that differ in them do not produce the same bits.
    """

    layers: tuple[LayerKind, ...] = ("gdn", "swa", "gdn", "full", "gdn", "full")
    vocab: int = 512
    hidden: int = 64
    mlp_hidden: int = 128
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window_tokens: int = 40
    state_heads: int = 4
    state_key_dim: int = 16
    state_value_dim: int = 16
    conv_tokens: int = 4
    ring_tokens: int = 8
    page_tokens: int = 16
    block_tokens: int = 64
    context_block_tokens: int = 128
    tokens_max: int = 4096

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(field.name, value, "at least 1")
        if not self.layers or not set(self.layers) <= set(GROUP_NAMES):
            raise ConfigError("layers", self.layers, f"one or more of {', '.join(GROUP_NAMES)}")
        if self.head_dim % 2:
            raise ConfigError("head_dim", self.head_dim, "an even number: rotary pairs")
        if self.conv_tokens < 2:
            raise ConfigError("conv_tokens", self.conv_tokens, "at least 2: one input of the past to keep")
        for setting, unit in (
            ("query_heads", "kv_heads"),
            ("block_tokens", "page_tokens"),
            ("context_block_tokens", "block_tokens"),
            ("tokens_max", "context_block_tokens"),
        ):
            value, step = getattr(self, setting), getattr(self, unit)
            if value % step:
                raise ConfigError(setting, value, f"a multiple of {unit} = {step}")

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: q, k and v of all state heads."""
        return self.state_heads * (2 * self.state_key_dim + self.state_value_dim)

    @property
    def window_reach_tokens(self) -> int:
        """Tokens before a block that its first row may still attend to, in whole pages."""
        return -(-(self.window_tokens - 1) // self.page_tokens) * self.page_tokens

    def layer_ids(self, kind: LayerKind) -> tuple[int, ...]:
        """Layers of one kind, in order."""
        return tuple(index for index, layer in enumerate(self.layers) if layer == kind)

    def cache_spec(self, *, revision: str) -> CacheSpec:
        """Groups "attn", "swa" and "gdn" (those that have layers), and every size that the bits depend on."""
        groups: list[Group] = []
        if full := self.layer_ids("full"):
            groups.append(PagedGroup("attn", full, self.kv_heads, self.head_dim, "float32"))
        if windowed := self.layer_ids("swa"):
            window = self.window_tokens
            groups.append(PagedGroup("swa", windowed, self.kv_heads, self.head_dim, "float32", window_tokens=window))
        if recurrent := self.layer_ids("gdn"):
            groups.append(StateGroup("gdn", recurrent, self._state_fields()))
        return CacheSpec(
            "tiny-hybrid", revision, tuple(groups), page_tokens=self.page_tokens, identity=self._identity()
        )

    def _state_fields(self) -> tuple[StateField, ...]:
        heads, keys, values, ring = self.state_heads, self.state_key_dim, self.state_value_dim, self.ring_tokens
        return (
            StateField("conv", (self.conv_tokens - 1, self.conv_channels), "float32"),
            StateField("temporal", (heads, keys, values), "float32"),
            StateField("ring_d", (ring, heads, values), "float32", transient=True),
            StateField("ring_k", (ring, heads, keys), "float32", transient=True),
            StateField("ring_g", (ring, heads), "float32", transient=True),
            StateField("ring_rawv", (ring, heads, values), "float32", transient=True),
            StateField("ring_rawk", (ring, heads, keys), "float32", transient=True),
            StateField("ring_beta", (ring, heads), "float32", transient=True),
            StateField("ring_conv", (ring, self.conv_channels), "float32", transient=True),
            StateField("ring_count", (2,), "int32", transient=True),
        )

    def _identity(self) -> tuple[tuple[str, FieldValue], ...]:
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("layers", "page_tokens")]
        sizes: list[tuple[str, FieldValue]] = [(f"tiny.{name}", getattr(self, name)) for name in names]
        return (("tiny.layers", ",".join(self.layers)), *sizes)


@dataclass(frozen=True, slots=True)
class SequenceView:
    """Where one sequence lives in the pools of an engine. Owns nothing; valid while its request holds its pages.

    ``pages[group]`` is ``[layers, n_pages, 2, page_tokens, heads, head_dim]`` and ``tables[group][i]`` the pool page
    that holds tokens ``[i * page_tokens, (i + 1) * page_tokens)``, None where a sliding window no longer reaches.
    ``state[field]`` is ``[layers, n_slots, *shape]``, empty for a model without recurrent layers. The state is
    written to ``slot``, where its ring lies, and read from ``source`` until a step has moved it; None: from ``slot``.
    """

    pages: Mapping[str, torch.Tensor]
    tables: Mapping[str, Sequence[int | None]]
    state: Mapping[str, torch.Tensor]
    slot: int
    source: int | None = None

    @property
    def read_slot(self) -> int:
        """Where the conv and temporal state are read from."""
        return self.slot if self.source is None else self.source


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Which rows of one fixed-shape block are computed.

    ``[start, first) computed before, rows hold rubbish | [first, end) these tokens | [end, start + block) padding``
    """

    start: int
    first: int
    end: int
