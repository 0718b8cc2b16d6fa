"""R(tau): what keeping everything for a time finds, and the room and the idle time that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from bench.admission.traces import Trace

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

DECODE_TOKENS_S = 60.0  # of an answer, where a trace does not tell how long it took
TTLS_S = (60.0, 300.0, 600.0, 1800.0, 3600.0)


def residency(
    trace: Trace, ttls_s: Sequence[float] = TTLS_S, *, decode_tokens_s: float = DECODE_TOKENS_S
) -> list[dict[str, float]]:
    """One row for each time to live, of a cache without bounds that keeps each page so long after its last use:

    - ``token_hit_share``: usable tokens per prompt token
    - ``resident_tokens_mean``: what it holds, over the span of the trace
    - ``R``: seconds that prompts are held between the requests that go on from them, per second of decoding; of the
      GPU memory of a server that keeps them there, 1 / (1 + R) is at work
    - ``A``: tokens computed, per token that no cache could have found

    Where nothing is used twice R and what is held are those of last uses alone.
    """
    ttls = np.asarray(ttls_s, float)
    usable, held_s, idle_s = np.zeros(len(ttls)), np.zeros(len(ttls)), np.zeros(len(ttls))
    fresh = 0
    for request, gaps in _gaps(trace):
        known = int(np.isfinite(gaps).sum())  # a page is never used without those before it: gaps rise with depth
        pages = np.minimum(np.searchsorted(gaps, ttls, side="right"), known)
        usable += np.minimum(pages * trace.block_tokens, request.tokens)
        fresh += request.tokens - min(known * trace.block_tokens, request.tokens)
        if known:
            held_s += np.minimum(gaps[:known, None], ttls).sum(0)
            idle_s += np.minimum(gaps[known - 1], ttls)
    total, decode_s = trace.input_tokens, sum(request.output_tokens for request in trace.requests) / decode_tokens_s
    held_s += _held_last_s(trace, ttls)
    span_s = max(trace.requests[-1].at_s - trace.requests[0].at_s, 1e-9)
    return [
        {
            "ttl_s": float(ttl_s),
            "token_hit_share": float(usable[place] / total),
            "resident_tokens_mean": float(held_s[place] * trace.block_tokens / span_s),
            "R": float(idle_s[place] / max(decode_s, 1e-9)),
            "A": float((total - usable[place]) / max(fresh, 1)),
        }
        for place, ttl_s in enumerate(ttls_s)
    ]


def _gaps(trace: Trace) -> Iterator[tuple[Any, Array]]:
    """Each request, with the time since the last use of each of its pages; infinite for a new one."""
    last_s = np.full(trace.block_count, -np.inf)
    for request in trace.requests:
        blocks = np.asarray(request.blocks, np.int64)
        yield request, request.at_s - last_s[blocks]
        last_s[blocks] = request.at_s


def _held_last_s(trace: Trace, ttls: Array) -> Array:
    """How long pages are held after their last use, until the trace ends."""
    last_s = np.full(trace.block_count, np.inf)
    for request in trace.requests:
        last_s[np.asarray(request.blocks, np.int64)] = request.at_s
    left_s = trace.requests[-1].at_s - last_s[np.isfinite(last_s)]
    held: Array = np.array([np.minimum(left_s, ttl_s).sum() for ttl_s in ttls])
    return held
