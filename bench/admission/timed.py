"""Replays in time: what requests wait for GPUs and tiers, when a trace is served from tiers under policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.admission.options import Load
from bench.admission.queueing import Arrival, Queueing, Reads, WaitS, run_queueing
from bench.admission.replay import LoadRule, Replayer, Served, TierSpec
from bench.admission.traces import Trace, TraceRequest
from hicache.costs.model import ModelCosts
from hicache.policies.read import LoadFacts, read_policy_of

SATURATING_CLIENTS = 64  # of each group of GPUs
UTILISATION = 0.8  # of GPU groups that nobody has counted, were everything computed


class ReadRule:
    """A read policy of production, asked for what a replay finds; what is in GPU memory is not loaded.

    ``wait_s`` says how long a tier is busy, where there is time in the replay.
    """

    def __init__(self, policy: str, costs: ModelCosts, page_tokens: int) -> None:
        self._policy = read_policy_of(policy, costs)
        self._costs, self._page_tokens = costs, page_tokens
        self.wait_s: WaitS = lambda tier: 0.0

    def __call__(self, tier: str, held_tokens: int, usable_tokens: int, request: TraceRequest, now_s: float) -> int:
        """See ``LoadRule``."""
        if tier not in self._costs.tiers:
            return usable_tokens - held_tokens
        size_bytes = (usable_tokens - held_tokens) * self._costs.token_bytes + self._costs.state_bytes
        facts = LoadFacts(
            now_s, tier, held_tokens, usable_tokens, request.tokens, size_bytes, self._page_tokens, self.wait_s(tier)
        )
        return self._policy.tokens(facts)


def load_rule(policy: str, costs: ModelCosts, page_tokens: int) -> LoadRule | None:
    """None where everything is loaded: nobody need be asked."""
    return None if policy == "always" else ReadRule(policy, costs, page_tokens)


def groups_needed(trace: Trace, costs: ModelCosts) -> int:
    """GPU groups that would compute every prompt in full at ``UTILISATION``, at the speed of the trace."""
    span_s = trace.requests[-1].at_s - trace.requests[0].at_s
    if span_s <= 0:
        return 1
    fixed_s = costs.prefill.fixed_s
    busy_s = sum(fixed_s + costs.prefill_s(0, request.tokens) for request in trace.requests)
    return max(1, -int(-busy_s // (span_s * UTILISATION)))


def timed_replay(
    trace: Trace,
    specs: Sequence[TierSpec],
    costs: ModelCosts,
    how: Queueing,
    load: Load,
    *,
    read: str = "always",
    warm_share: float = 0.0,
) -> dict[str, Any]:
    """Serve the requests of a trace one after another as groups of GPUs get free; without ``specs`` all are computed.

    What a request brings into the tiers is there for those that a group takes after it. Returns figures for JSON.
    """
    rule = load_rule(read, costs, trace.block_tokens)
    replayer = Replayer(trace.block_tokens, specs, load=rule, costs=costs) if specs else None
    usable = 0
    first_scored = int(len(trace.requests) * warm_share)

    def decide(number: int, now_s: float, wait_s: WaitS) -> Reads:
        nonlocal usable
        if replayer is None:
            return Reads()
        if isinstance(rule, ReadRule):
            rule.wait_s = wait_s
        request = trace.requests[number]
        served = replayer.serve(request, now_s)
        usable += served.usable_tokens if number >= first_scored else 0
        return _reads(served, specs, request, trace.block_tokens, costs)

    result = run_queueing(_arrivals(trace, load), decide, costs, _loaded(how, load))
    tokens = sum(request.tokens for request in trace.requests[first_scored:])
    figures = {"load": load.name, "gpu_groups": how.gpu_groups, "token_hit_share": usable / max(1, tokens)}
    return figures | result.to_dict(first_scored=first_scored)


def _loaded(how: Queueing, load: Load) -> Queueing:
    if load.saturated:
        return replace(how, sessions=SATURATING_CLIENTS * how.gpu_groups)
    return replace(how, sessions=load.clients, speedup=load.speedup)


def _arrivals(trace: Trace, load: Load) -> list[Arrival]:
    """Saturating clients do not think, and take requests in the order of the trace."""
    if load.saturated:
        return [Arrival(request.at_s, request.tokens, request.output_tokens) for request in trace.requests]
    return [
        Arrival(request.at_s, request.tokens, request.output_tokens, request.think_s or 0.0, request.session)
        for request in trace.requests
    ]


def _reads(
    served: Served, specs: Sequence[TierSpec], request: TraceRequest, block_tokens: int, costs: ModelCosts
) -> Reads:
    held, loads, writes = 0, list[tuple[str, int]](), list[tuple[str, int]]()
    for spec, (start, end), pages in zip(specs, served.taken, served.written, strict=True):
        tokens = min(end * block_tokens, request.tokens) - min(start * block_tokens, request.tokens)
        if spec.name not in costs.tiers:
            held += tokens
            continue
        if tokens:
            loads.append((spec.name, tokens))
        if pages:
            writes.append((spec.name, pages * block_tokens * costs.token_bytes))
    return Reads(held, tuple(loads), tuple(writes))
