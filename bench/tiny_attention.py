"""Grouped-query attention over pages, full or sliding, whose bits for a token depend on nothing but its past."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.tiny_config import BlockRows, TinyConfig

# Query and key are RMS-normalised with this gain, so a score is at most GAIN**2 * sqrt(head_dim), 16 by default: exp()
# of it needs no running maximum, and the sums over context blocks are plain additions in a fixed order. A token attends
# to few others then, so that one wrong page is felt.
QK_GAIN = 2.0
ROPE_BASE = 10_000.0


class Rope:
    """Rotary tables for every position, computed once: a row never depends on how many are asked for."""

    def __init__(self, config: TinyConfig) -> None:
        half = config.head_dim // 2
        frequencies = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(config.tokens_max, dtype=torch.float64)[:, None] * frequencies
        self._cos = angles.cos().float().repeat(1, 2)[:, None]  # [tokens_max, 1, head_dim]
        self._sin = torch.cat((-angles.sin(), angles.sin()), 1).float()[:, None]

    def rotate(self, heads: torch.Tensor, start: int) -> torch.Tensor:
        """``heads`` [rows, heads, head_dim] of positions ``start`` and after, rotated."""
        end = start + heads.shape[0]
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return heads * self._cos[start:end] + swapped * self._sin[start:end]


class PagedAttention:
    """One attention layer. Writes K and V of its rows to their pages, then reads all context from pages."""

    def __init__(self, config: TinyConfig, rope: Rope, generator: torch.Generator, *, sliding: bool) -> None:
        self._config = config
        self._rope = rope
        self._sliding = sliding
        projected = (config.query_heads + 2 * config.kv_heads) * config.head_dim
        self._qkv = torch.randn(config.hidden, projected, generator=generator) * config.hidden**-0.5
        inner = config.query_heads * config.head_dim
        self._out = torch.randn(inner, config.hidden, generator=generator) * inner**-0.5
        self._masks = _window_masks(config) if sliding else _causal_masks(config)

    def __call__(
        self, hidden: torch.Tensor, rows: BlockRows, pages: torch.Tensor, table: Sequence[int | None]
    ) -> torch.Tensor:
        """Attention output of a block. Writes rows ``[first, end)`` of ``pages``; raises nothing.

        ``hidden`` [block_tokens, hidden], ``pages`` [n_pages, 2, page_tokens, kv_heads, head_dim] of this layer.
        """
        config = self._config
        query, keys_values = self._project(hidden, rows)
        _write_rows(pages, table, keys_values, rows)
        sums = self._window_sums if self._sliding else self._full_sums
        numerator, denominator = sums(query, rows, pages, table)
        mixed = (numerator / denominator).reshape(config.query_heads, config.block_tokens, config.head_dim)
        mixed = torch.rms_norm(mixed, (config.head_dim,), eps=1e-6)  # an average over many would be faint
        return torch.mm(mixed.permute(1, 0, 2).reshape(config.block_tokens, -1), self._out)

    def _project(self, hidden: torch.Tensor, rows: BlockRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Scaled queries [kv_heads, groups * block, dim], and K and V as pages hold them, [2, block, kv_heads, dim]."""
        config = self._config
        block, dim = config.block_tokens, config.head_dim
        rotated_heads = config.query_heads + config.kv_heads
        projected = (hidden @ self._qkv).reshape(block, rotated_heads + config.kv_heads, dim)
        normed = torch.rms_norm(projected[:, :rotated_heads], (dim,), eps=1e-6) * QK_GAIN
        rotated = self._rope.rotate(normed, rows.start)
        query = rotated[:, : config.query_heads].permute(1, 0, 2) * dim**-0.5
        keys_values = torch.stack((rotated[:, config.query_heads :], projected[:, rotated_heads:]))
        return query.reshape(config.kv_heads, -1, dim), keys_values

    def _full_sums(
        self, query: torch.Tensor, rows: BlockRows, pages: torch.Tensor, table: Sequence[int | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over context blocks at fixed places, in order: [0, width), [width, 2 * width), ... up to the rows."""
        width = self._config.context_block_tokens
        last_base = rows.start // width * width
        numerator = torch.zeros_like(query)
        denominator = query.new_zeros(*query.shape[:2], 1)
        for base in range(0, last_base + 1, width):
            context = _gather_rows(pages, table, low=base, high=min(rows.end, base + width), base=base, width=width)
            mask = self._masks[rows.start - base] if base == last_base else None
            block_numerator, block_denominator = _weighted_sums(query, context, mask)
            numerator += block_numerator
            denominator += block_denominator
        return numerator, denominator

    def _window_sums(
        self, query: torch.Tensor, rows: BlockRows, pages: torch.Tensor, table: Sequence[int | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over one context of fixed width, ``[start - reach, start + block)``; only what rows reach is read."""
        config = self._config
        base = rows.start - config.window_reach_tokens
        low = max(0, rows.first - config.window_tokens + 1) // config.page_tokens * config.page_tokens
        width = config.window_reach_tokens + config.block_tokens
        context = _gather_rows(pages, table, low=low, high=rows.end, base=base, width=width)
        return _weighted_sums(query, context, self._masks[min(base, 0)])


def _weighted_sums(
    query: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of exp(score) * value, and of exp(score). A masked row has weight 0.0, which adds nothing, to the bit."""
    keys, values = context[0].transpose(1, 2), context[1]
    if mask is None:
        weights = torch.bmm(query, keys).exp_()
    else:
        weights = torch.baddbmm(mask.expand(len(query), -1, -1), query, keys).exp_()
    return torch.bmm(weights, values), weights.sum(-1, keepdim=True)


def _write_rows(pages: torch.Tensor, table: Sequence[int | None], block: torch.Tensor, rows: BlockRows) -> None:
    """Copies rows ``[first, end)`` of ``block`` [2, block_tokens, heads, dim] to their pages, and nothing else."""
    page_tokens = pages.shape[2]
    position = rows.first
    while position < rows.end:
        page_index, offset = divmod(position, page_tokens)
        count = min(page_tokens - offset, rows.end - position)
        page = table[page_index]
        assert page is not None, f"no page for tokens at {position}"
        source = position - rows.start
        pages[page, :, offset : offset + count] = block[:, source : source + count]
        position += count


def _gather_rows(
    pages: torch.Tensor, table: Sequence[int | None], *, low: int, high: int, base: int, width: int
) -> torch.Tensor:
    """Rows ``[low, high)`` of a sequence at their places in the context ``[base, base + width)``, zeros elsewhere.

    Returns [2, heads, width, head_dim], freshly allocated: neither the pool's strides nor what unwritten rows hold
    (a NaN, perhaps) reaches the arithmetic. ``low`` is a multiple of the page size.
    """
    _, planes, page_tokens, heads, dim = pages.shape
    numbers = table[low // page_tokens : -(-high // page_tokens)]
    assert None not in numbers, f"tokens [{low}, {high}) are needed and not all of their pages are there"
    gathered = pages.index_select(0, torch.tensor(numbers))
    rows = gathered.permute(1, 3, 0, 2, 4).reshape(planes, heads, -1, dim)
    if low == base and high == base + width:
        return rows
    context = rows.new_zeros(planes, heads, width, dim)
    context[:, :, low - base : high - base] = rows[:, :, : high - low]
    return context


def _causal_masks(config: TinyConfig) -> dict[int, torch.Tensor]:
    """Masks [1, groups * block, context block] by where in its context block a block starts."""
    width, block = config.context_block_tokens, config.block_tokens
    columns = torch.arange(width)
    return {
        offset: _additive(columns <= torch.arange(offset, offset + block)[:, None], config)
        for offset in range(0, width, block)
    }


def _window_masks(config: TinyConfig) -> dict[int, torch.Tensor]:
    """Masks [1, groups * block, reach + block] by ``min(base, 0)``: what lies before token 0 is masked too."""
    block, reach = config.block_tokens, config.window_reach_tokens
    columns = torch.arange(reach + block)
    ages = torch.arange(reach, reach + block)[:, None] - columns
    visible = (ages >= 0) & (ages < config.window_tokens)
    bases = {min(start - reach, 0) for start in range(0, reach + block, block)}
    return {base: _additive(visible & (columns + base >= 0), config) for base in bases}


def _additive(visible: torch.Tensor, config: TinyConfig) -> torch.Tensor:
    mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    return mask.repeat(config.query_heads // config.kv_heads, 1)[None]
