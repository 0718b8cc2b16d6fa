"""Small traces, drawn by a seed: conversations that go on, or do not, behind shared system prompts."""

from __future__ import annotations

import random

from bench.admission.traces import Prefixes, Trace, TraceRequest

BLOCK = 16  # tokens


def conversations(seed: int, *, requests: int = 300, decodes: bool = True) -> Trace:
    """Requests of whole blocks but for the last one, of two tenants; some name what decode has made."""
    rng, prefixes = random.Random(seed), Prefixes()
    open_: list[list[int]] = []
    drawn: list[TraceRequest] = []
    fresh = iter(range(10**6))
    for number in range(requests):
        if open_ and rng.random() < 0.6:
            ids = open_[rng.randrange(len(open_))]
        else:
            ids = [10**6 + rng.randrange(3)]
            open_.append(ids)
        ids += [next(fresh) for _ in range(rng.randrange(1, 6))]
        blocks = prefixes.numbers(list(ids))
        outputs = [next(fresh) for _ in range(rng.randrange(3) if decodes else 0)]
        output_blocks = prefixes.numbers(outputs, behind=blocks[-1]) if outputs else ()
        ids += outputs
        tokens = len(blocks) * BLOCK - (0 if outputs else rng.randrange(BLOCK))
        tenant = f"tenant{len(open_) % 2}"
        drawn.append(TraceRequest(float(number), tokens, 20, blocks, tenant, output_blocks=output_blocks))
    return Trace(f"seed{seed}", BLOCK, drawn, prefixes.count)
