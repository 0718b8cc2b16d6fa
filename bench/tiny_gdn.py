"""A gated-delta-rule layer as in Qwen3-Next: a short causal convolution, then one matrix of memory per head.

Per head and token, with S [d_k, d_v]::

    S = exp(g) * S                      decay
    d = beta * (v - k^T S)              what the memory has wrong about k
    S = S + k d^T                       corrected
    o = q^T S

The triple (d, k, exp(g)) is all it takes to repeat an update later without the serial dependency. It is only known
where the state before it is, so of a draft the inputs are kept instead: k before it gets unit length, v, beta and
exp(g). A ReplaySSM ring keeps both. Either way the same operations run in the same shapes, so the bits are those of the
update that was put off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench.tiny_config import BlockRows, TinyConfig


@dataclass(frozen=True, slots=True)
class Update:
    """What one token does to the state of one layer, whatever that is by then."""

    conv_input: torch.Tensor  # [conv_channels]
    decay: torch.Tensor  # [heads, 1, 1], exp(g)
    key: torch.Tensor  # [heads, d_k, 1], of unit length
    d: torch.Tensor  # [heads, 1, d_v]


@dataclass(frozen=True, slots=True)
class DraftUpdate:
    """What one token brings for the state of one layer, before it is known what the state is."""

    conv_input: torch.Tensor  # [conv_channels]
    decay: torch.Tensor  # [heads, 1, 1], exp(g)
    raw_key: torch.Tensor  # [heads, d_k]
    raw_value: torch.Tensor  # [heads, d_v]
    beta: torch.Tensor  # [heads, 1]


@dataclass(slots=True)
class LayerState:
    """The working copy of one layer's state: private memory, so a pool's strides and alignment do not matter.

    ``drafts`` collects what every token brings when it is a list; ``boundaries`` copies of (conv, temporal) by the
    number of tokens they are the state after, at every page boundary passed.
    """

    conv: torch.Tensor  # [conv_tokens - 1, conv_channels], the last inputs
    temporal: torch.Tensor  # [heads, d_k, d_v]
    drafts: list[DraftUpdate] | None = None
    boundaries: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    def replay(self, update: Update) -> None:
        """Applies an update that was put off."""
        self.temporal.mul_(update.decay)
        self.temporal.baddbmm_(update.key, update.d)
        self.conv = torch.cat((self.conv[1:], update.conv_input[None]))

    def settle(self, draft: DraftUpdate) -> Update:
        """Applies what a draft brought, and returns the update that this was."""
        key = unit_length(draft.raw_key)
        self.temporal.mul_(draft.decay)
        scaled_key, scaled_value = (key * draft.beta)[:, None], (draft.raw_value * draft.beta)[:, None]
        d = torch.baddbmm(scaled_value, scaled_key, self.temporal, alpha=-1)
        self.temporal.baddbmm_(key[..., None], d)
        self.conv = torch.cat((self.conv[1:], draft.conv_input[None]))
        return Update(draft.conv_input, draft.decay, key[..., None], d)


class _Tokens(NamedTuple):
    """What the recurrence needs of each row of a block, and what a ring keeps of it."""

    query: torch.Tensor  # [block, heads, 1, d_k]
    key: torch.Tensor  # [block, heads, d_k, 1]
    scaled_key: torch.Tensor  # [block, heads, 1, d_k], beta * k
    scaled_value: torch.Tensor  # [block, heads, 1, d_v], beta * v
    decay: torch.Tensor  # [block, heads, 1, 1], exp(g)
    raw_key: torch.Tensor  # [block, heads, d_k]
    raw_value: torch.Tensor  # [block, heads, d_v]
    beta: torch.Tensor  # [block, heads, 1]


class GatedDelta:
    """One gated-delta-rule layer. Row-wise work is done on whole blocks, the recurrence token by token."""

    def __init__(self, config: TinyConfig, generator: torch.Generator) -> None:
        self._config = config
        heads = config.state_heads
        self._values = heads * config.state_value_dim
        projected = config.conv_channels + self._values + 2 * heads
        self._in = torch.randn(config.hidden, projected, generator=generator) * config.hidden**-0.5
        self._conv = torch.randn(config.conv_tokens, config.conv_channels, generator=generator)
        self._out = torch.randn(self._values, config.hidden, generator=generator) * self._values**-0.5
        # From a memory of tens of tokens to one of hundreds, by head.
        self._rate = torch.logspace(-3.0, -1.5, heads)
        self._rate_bias = torch.randn(heads, generator=generator)

    def __call__(self, hidden: torch.Tensor, rows: BlockRows, state: LayerState) -> torch.Tensor:
        """Output of a block [block_tokens, hidden]. Moves ``state`` from ``rows.first`` to ``rows.end``."""
        config = self._config
        sizes = (config.conv_channels, self._values, config.state_heads, config.state_heads)
        conv_input, z, beta, rate = (hidden @ self._in).split(sizes, dim=1)
        past = self._past(conv_input, rows, state)
        query, raw_key, value = self._convolve(past)
        query, key = unit_length(query), unit_length(raw_key)
        decay = torch.exp(-self._rate * torch.nn.functional.softplus(rate + self._rate_bias))
        beta = beta.sigmoid()[:, :, None]
        tokens = _Tokens(
            query=query[:, :, None],
            key=key[..., None],
            scaled_key=(key * beta)[:, :, None],
            scaled_value=(value * beta)[:, :, None],
            decay=decay[:, :, None, None],
            raw_key=raw_key,
            raw_value=value,
            beta=beta,
        )
        mixed = self._recur(tokens, past, rows, state)
        gated = torch.rms_norm(mixed, (config.state_value_dim,), eps=1e-6).reshape(z.shape)
        return torch.mm(gated * torch.nn.functional.silu(z), self._out)

    def _past(self, conv_input: torch.Tensor, rows: BlockRows, state: LayerState) -> torch.Tensor:
        """Convolution inputs so that row ``r`` of the block sees ``[r, r + conv_tokens)``: the past, then its own."""
        reach = self._config.conv_tokens - 1
        first, end = rows.first - rows.start, rows.end - rows.start
        past = conv_input.new_zeros(reach + len(conv_input), conv_input.shape[1])
        past[first : first + reach] = state.conv
        past[first + reach : end + reach] = conv_input[first:end]
        state.conv = past[end : end + reach].clone()
        return past

    def _convolve(self, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query and key ([block, heads, d_k], of any length) and value ([block, heads, d_v])."""
        config = self._config
        block, heads, key_dim = config.block_tokens, config.state_heads, config.state_key_dim
        summed = past[:block] * self._conv[0]
        for age in range(1, config.conv_tokens):
            summed.addcmul_(past[age : age + block], self._conv[age])
        active = torch.nn.functional.silu(summed)
        pair = active[:, : 2 * heads * key_dim].reshape(block, 2, heads, key_dim)
        return pair[:, 0], pair[:, 1], active[:, 2 * heads * key_dim :].reshape(block, heads, -1)

    def _recur(self, tokens: _Tokens, past: torch.Tensor, rows: BlockRows, state: LayerState) -> torch.Tensor:
        """The rule, token by token. Returns [block, heads, d_v], zeros in rows that are not computed."""
        config = self._config
        reach = config.conv_tokens - 1
        temporal = state.temporal
        mixed = temporal.new_zeros(config.block_tokens, config.state_heads, 1, config.state_value_dim)
        first, end = rows.first - rows.start, rows.end - rows.start
        per_token = zip(*(part[first:end].unbind() for part in tokens), strict=True)
        for row, token in enumerate(map(_Tokens._make, per_token), start=first):
            temporal.mul_(token.decay)
            d = torch.baddbmm(token.scaled_value, token.scaled_key, temporal, alpha=-1)
            temporal.baddbmm_(token.key, d)
            torch.bmm(token.query, temporal, out=mixed[row])
            if state.drafts is not None:
                inputs = past[row + reach], token.decay, token.raw_key, token.raw_value, token.beta
                state.drafts.append(DraftUpdate(*inputs))
            after = rows.start + row + 1
            if state.boundaries is not None and after % config.page_tokens == 0:
                state.boundaries[after] = (past[row + 1 : row + 1 + reach].clone(), temporal.clone())
        return mixed[:, :, 0]


def unit_length(vectors: torch.Tensor) -> torch.Tensor:
    """The same vectors [..., d_k] of length one; the bits of each do not depend on those beside it."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
