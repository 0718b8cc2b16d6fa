"""What a hybrid model reuses of a trace: attention counts up to the nearest snapshot of the state, and no further."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache.plan.workload import Blocks, Workload


@dataclass(frozen=True, slots=True)
class SnapshotPoint:
    """One way to take snapshots. ``hit_ratio``: prompt tokens found, of all; ``attention_ratio``: those whose KV is.

    ``snapshots`` is how many were taken, in a cache that drops nothing.
    """

    policy: str
    hit_ratio: float
    attention_ratio: float
    snapshots: int


def snapshot_points(workload: Workload, *, chunk_tokens: int) -> list[SnapshotPoint]:
    """Each policy over the trace's prompts, in whole blocks of it. The trace has to have blocks."""
    chunk_blocks = max(1, chunk_tokens // workload.block_tokens)
    return [
        _point(workload, "every block of the trace", every_blocks=1),
        _point(workload, "every chunk", every_blocks=chunk_blocks),
        _point(workload, "ends of prompts", at_ends=True),
        _point(workload, "ends, and where prompts part", at_ends=True, at_branches=True),
    ]


def _point(
    workload: Workload, policy: str, *, every_blocks: int = 0, at_ends: bool = False, at_branches: bool = False
) -> SnapshotPoint:
    """``every_blocks``: at multiples of it. Where prompts part, the one that does takes one for those behind."""
    seen = np.zeros(workload.block_count, dtype=bool)
    has_state = np.zeros(workload.block_count, dtype=bool)  # a snapshot at the end of the block
    total = hits = attention = 0
    for request in workload.requests:
        if request.blocks is None:
            continue
        blocks: Blocks = request.blocks[: request.input_tokens // workload.block_tokens]  # the whole ones
        total += request.input_tokens
        shared = int(np.count_nonzero(seen[blocks]))  # a prefix: each block stands for all before it
        states = np.flatnonzero(has_state[blocks[:shared]])
        hits += (int(states[-1]) + 1 if len(states) else 0) * workload.block_tokens
        attention += shared * workload.block_tokens
        seen[blocks] = True
        if every_blocks:
            has_state[blocks[every_blocks - 1 :: every_blocks]] = True
        if at_ends:
            has_state[blocks[-1:]] = True
        if at_branches and 0 < shared < len(blocks):
            has_state[blocks[shared - 1]] = True
    return SnapshotPoint(policy, hits / max(1, total), attention / max(1, total), int(np.count_nonzero(has_state)))
