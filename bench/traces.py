"""The tokens that the block ids of a trace stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest


def prompt_of(request: TraceRequest, *, scale: int, vocab: int, tokens_max: int, seed: int = 0) -> list[int]:
    """Token ids for a request at 1/``scale`` of its length, at most ``tokens_max``.

    A block id always gives the same ``512 / scale`` tokens, so that equal prefixes of the trace are equal prefixes
    here, and unequal ones differ.
    """
    block_tokens = MOONCAKE_BLOCK_TOKENS // scale
    length = min(max(1, round(request.input_length / scale)), block_tokens * len(request.hash_ids), tokens_max)
    blocks = request.hash_ids[: -(-length // block_tokens)]
    return [token for block in blocks for token in _block_tokens(block, block_tokens, vocab, seed)][:length]


def _block_tokens(block: int, count: int, vocab: int, seed: int) -> Sequence[int]:
    tokens: list[int] = np.random.default_rng([seed, block]).integers(0, vocab, count).tolist()
    return tokens
