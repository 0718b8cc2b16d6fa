"""The TTL curve of the conversation trace: usable tokens of a cache that drops what was idle for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.plan.reuse import ReuseCurve
from hicache.plan.workload import read_workload

TRACE = Path(__file__).parents[2] / "bench" / "trace_files" / "mooncake_conversation_trace.jsonl.zst"


def test_the_ttl_curve_of_the_conversation_trace_is_the_surveyed_one() -> None:
    """Mooncake's conversation trace; counted independently, by a replay with expiry."""
    curve = ReuseCurve(read_workload(TRACE))
    for ttl_s, hit_ratio in [(60, 0.1054), (300, 0.2934), (600, 0.3501), (1800, 0.3706)]:
        assert curve.at(ttl_s).hit_ratio == pytest.approx(hit_ratio, abs=0.0002), ttl_s
