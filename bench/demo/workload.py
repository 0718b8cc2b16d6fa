"""What the demo serves: turns of conversations, built in or taken from a trace."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.traces import prompt_of
from hicache.errors import ConfigError
from hicache.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, read_mooncake_trace

TENANTS = ("amber", "birch")
LONG_PROMPT_TOKENS = 33  # two pages, and a token that is always computed
LONG_PROMPTS_MIN = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """``new_tokens`` after all that the conversation said before, or a prompt of its own without one."""

    tenant: str
    conversation: int | None
    new_tokens: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is made to fit the tiny model."""

    divisor: int = 32  # lengths are divided by it
    prompt_tokens_max: int = 768
    output_tokens_max: int = 8

    def __post_init__(self) -> None:
        if self.divisor < 1 or MOONCAKE_BLOCK_TOKENS % self.divisor:
            raise ConfigError("scale", self.divisor, f"a divisor of {MOONCAKE_BLOCK_TOKENS}: blocks stay whole")


def built_in_workload(*, conversations: int, turns: int, vocab: int, seed: int) -> list[Turn]:
    """Multi-turn conversations of two tenants; those of a tenant share one of two system prompts. Round by round."""
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(rng.randint(low, high)))

    systems = {tenant: [tokens(128, 192) for _ in range(2)] for tenant in TENANTS}
    order = []
    for turn in range(turns):
        for conversation in range(conversations):
            tenant = TENANTS[conversation % len(TENANTS)]
            start = systems[tenant][conversation // len(TENANTS) % 2] if turn == 0 else ()
            order.append(Turn(tenant, conversation, start + tokens(24, 96), rng.randint(4, 10)))
    return order


def trace_workload(path: str | Path, *, limit: int, scale: TraceScale, vocab: int) -> list[Turn]:
    """The first requests of a Mooncake trace. The second block tells the conversations, and so the tenants, apart."""
    requests = read_mooncake_trace(path, limit=limit)
    turns = list(_turns(requests, scale, vocab))
    long_count = sum(len(turn.new_tokens) >= LONG_PROMPT_TOKENS for turn in turns)
    if long_count < LONG_PROMPTS_MIN:
        raise ConfigError(
            "trace",
            str(path),
            f"at least {LONG_PROMPTS_MIN} requests with {LONG_PROMPT_TOKENS} or more prompt tokens after scaling, so"
            f" that every tier has something to do; here are {long_count} among {len(turns)}",
        )
    return turns


def _turns(requests: Iterable[TraceRequest], scale: TraceScale, vocab: int) -> Iterator[Turn]:
    for request in requests:
        tenant = TENANTS[request.hash_ids[:2][-1] % len(TENANTS)]
        prompt = prompt_of(request, scale=scale.divisor, vocab=vocab, tokens_max=scale.prompt_tokens_max)
        output_tokens = min(max(1, request.output_length // scale.divisor), scale.output_tokens_max)
        yield Turn(tenant, None, tuple(prompt), output_tokens)
