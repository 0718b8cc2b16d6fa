"""Sessions of coding agents, drawn so that their marginals are those published for real ones.

Source: TraceLab (arXiv 2606.30560), about 4,300 sessions of two coding agents. A user's request is answered in steps;
each step calls the model with all that came before and what was appended since: the user's words, or what tools gave.
Drawn independently of each other: nothing here knows which sessions go on longest, or that long prompts think longer.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from bench.admission.traces import SESSION_GAP_S, Trace, TraceRequest
from hicache.errors import ConfigError

Quantiles = tuple[tuple[float, float], ...]  # (share of draws below, value), the logarithm in between is linear

REQUESTS: Quantiles = ((0, 1), (0.5, 2), (0.9, 12), (0.99, 137), (1, 250))  # of a user, a session: mean 9.2, p99 137
HUMAN_WAIT_S: Quantiles = (
    (0, 5), (0.5, 86), (0.796, 300), (0.9, 1260), (0.964, 3600), (0.99, 50_400), (1, 200_000),
)  # fmt: skip
TOOL_S: Quantiles = ((0, 0.02), (0.5, 0.129), (0.9, 10), (0.9603, 60), (1, 1100))  # mean 16.8 s, 84.7 % of it in 3.97 %
APPENDED: Quantiles = ((0, 100), (0.5, 875), (0.91, 1000), (0.95, 10_000), (1, 90_000))  # tokens a step
STEPS_MEAN = 8.8  # of one request
TOOLS_PER_STEP = 10.8 / 8.8
OUTPUT_MEDIAN = 214  # tokens a step
_OUTPUT_SIGMA = 1.1
SYSTEM_TOKENS = 25_000  # instructions and tools, the same for all sessions of a tenant
WINDOW_TOKENS = 210_000  # a longer context is summarised; makes the median prefix that of the source, 119,000
_SUMMARY_TOKENS = 40_000
_DECODE_TOKENS_S = 60.0


def draw(quantiles: Quantiles, rng: random.Random) -> float:
    """One value."""
    share = rng.random()
    place = min(bisect_right([below for below, _ in quantiles], share), len(quantiles) - 1)
    (low, at_low), (high, at_high) = quantiles[place - 1], quantiles[place]
    return at_low * math.pow(at_high / at_low, (share - low) / (high - low))


@dataclass(slots=True)
class _Context:
    """What the model is called with: whole blocks, and the beginning of one."""

    blocks: list[int]
    tokens: int
    block_tokens: int
    fresh: Iterator[int]

    def append(self, tokens: int) -> None:
        self.tokens += tokens
        self.blocks += itertools.islice(self.fresh, self.tokens // self.block_tokens - len(self.blocks))

    def path(self) -> tuple[int, ...]:
        """A block that is not full names a prefix of its own."""
        return (*self.blocks, *itertools.islice(self.fresh, bool(self.tokens % self.block_tokens)))


def agent_sessions(
    sessions: int = 100,
    *,
    seed: int = 0,
    block_tokens: int = 512,
    tenants: int = 4,
    session_gap_s: float = SESSION_GAP_S,
) -> Trace:
    """Sessions that start ``session_gap_s`` apart on average, each of one tenant. The same for the same seed."""
    for name, value in (("sessions", sessions), ("block_tokens", block_tokens), ("tenants", tenants)):
        if type(value) is not int or value < 1:
            raise ConfigError(name, value, "a whole number of at least 1")
    if not 0 < session_gap_s < math.inf:
        raise ConfigError("session_gap_s", session_gap_s, "a finite time above 0 s")
    rng = random.Random(seed)
    fresh = itertools.count()
    systems = [tuple(itertools.islice(fresh, SYSTEM_TOKENS // block_tokens)) for _ in range(tenants)]
    requests: list[TraceRequest] = []
    start_s = 0.0
    for session in range(sessions):
        tenant = rng.randrange(tenants)
        context = _Context(list(systems[tenant]), len(systems[tenant]) * block_tokens, block_tokens, fresh)
        requests += _session(f"session {session}", f"tenant {tenant}", start_s, context, systems[tenant], rng)
        start_s += rng.expovariate(1 / session_gap_s)
    requests.sort(key=lambda request: request.at_s)
    return Trace(f"agents_{sessions}_seed_{seed}", block_tokens, requests, next(fresh))


def _session(
    session: str, tenant: str, start_s: float, context: _Context, system: tuple[int, ...], rng: random.Random
) -> Iterator[TraceRequest]:
    at_s, turn = start_s, 0
    for number in range(round(draw(REQUESTS, rng))):
        wait_s = draw(HUMAN_WAIT_S, rng) if number else 0.0
        kind = "user"
        for _ in range(_steps(rng)):
            at_s += wait_s
            if context.tokens > WINDOW_TOKENS:
                context.blocks, context.tokens = list(system), len(system) * context.block_tokens
                context.append(_SUMMARY_TOKENS)
            context.append(round(draw(APPENDED, rng)))
            output = round(rng.lognormvariate(math.log(OUTPUT_MEDIAN), _OUTPUT_SIGMA))
            yield TraceRequest(
                at_s, context.tokens, output, context.path(), tenant, session, turn, kind, (), wait_s if turn else None
            )
            context.append(output)
            at_s += output / _DECODE_TOKENS_S
            turn, kind = turn + 1, "tool"
            wait_s = sum(draw(TOOL_S, rng) for _ in range(_tools(rng)))


def _steps(rng: random.Random) -> int:
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / STEPS_MEAN))


def _tools(rng: random.Random) -> int:
    return 1 + (rng.random() < TOOLS_PER_STEP - 1)
