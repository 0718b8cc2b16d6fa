"""Generated sessions have the marginals that were published of real ones (TraceLab, arXiv 2606.30560)."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean, median

import pytest

from bench.admission.bounds import ceiling
from bench.admission.generator import (
    APPENDED,
    HUMAN_WAIT_S,
    OUTPUT_MEDIAN,
    REQUESTS,
    STEPS_MEAN,
    TOOL_S,
    agent_sessions,
    draw,
)
from bench.admission.traces import Trace
from hicache.errors import ConfigError

DRAWS = 20_000


@pytest.fixture(scope="module")
def trace() -> Trace:
    return agent_sessions(250, seed=1)


def drawn(quantiles: tuple[tuple[float, float], ...]) -> list[float]:
    rng = random.Random(5)
    return [draw(quantiles, rng) for _ in range(DRAWS)]


def share(values: list[float], limit: float) -> float:
    return sum(value <= limit for value in values) / len(values)


def test_users_wait_as_published() -> None:
    waits = drawn(HUMAN_WAIT_S)
    assert median(waits) == pytest.approx(86, rel=0.05)
    assert share(waits, 300) == pytest.approx(0.796, abs=0.01)
    assert share(waits, 3600) == pytest.approx(0.964, abs=0.005)
    assert share(waits, 50_400) == pytest.approx(0.99, abs=0.003)


def test_tools_take_as_long_as_published() -> None:
    times = drawn(TOOL_S)
    long = [value for value in times if value > 60]
    assert median(times) == pytest.approx(0.129, rel=0.05)
    assert mean(times) == pytest.approx(16.8, rel=0.1)
    assert len(long) / DRAWS == pytest.approx(0.0397, abs=0.005)
    assert sum(long) / sum(times) == pytest.approx(0.847, abs=0.03)


def test_sessions_are_as_long_as_published() -> None:
    requests = [round(value) for value in drawn(REQUESTS)]
    assert mean(requests) == pytest.approx(9.2, rel=0.06)
    assert sorted(requests)[int(0.99 * DRAWS)] == pytest.approx(137, rel=0.15)


def test_steps_append_as_published() -> None:
    appended = drawn(APPENDED)
    assert median(appended) == pytest.approx(875, rel=0.03)
    assert share(appended, 1000) > 0.9
    assert sum(value for value in appended if value >= 10_000) / sum(appended) > 0.7


def test_a_trace_has_the_published_prefixes_outputs_and_steps(trace: Trace) -> None:
    users = Counter(request.kind for request in trace.requests)
    assert len(trace.requests) / users["user"] == pytest.approx(STEPS_MEAN, rel=0.1)
    assert median(request.output_tokens for request in trace.requests) == pytest.approx(OUTPUT_MEDIAN, rel=0.06)
    assert median(request.tokens for request in trace.requests) == pytest.approx(119_000, rel=0.1)


def test_nearly_all_of_a_prompt_was_there_before(trace: Trace) -> None:
    """The source has 95.7 % hits with real caches, and 98.6 % with one that keeps all for an hour."""
    assert 0.957 < ceiling(trace).token_share < 0.995


def test_blocks_name_prefixes(trace: Trace) -> None:
    parents: dict[int, int] = {}
    for request in trace.requests[:2000]:
        assert len(request.blocks) == -(-request.tokens // trace.block_tokens)
        for parent, block in zip((-1, *request.blocks), request.blocks, strict=False):
            assert parents.setdefault(block, parent) == parent
            assert 0 <= block < trace.block_count


def test_a_seed_gives_the_same_trace_and_another_one_another() -> None:
    assert agent_sessions(3, seed=2) == agent_sessions(3, seed=2)
    assert agent_sessions(3, seed=2).requests != agent_sessions(3, seed=3).requests


@pytest.mark.parametrize("wrong", [{"sessions": 0}, {"block_tokens": True}, {"tenants": -1}, {"session_gap_s": 0.0}])
def test_what_cannot_be_drawn_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        agent_sessions(**wrong)  # type: ignore[arg-type]
