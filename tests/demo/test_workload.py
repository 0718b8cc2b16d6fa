"""Traces and workloads: equal prefixes stay equal, and bad input is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from bench.demo.workload import TENANTS, TraceScale, built_in_workload, trace_workload
from bench.traces import prompt_of
from hicache.errors import ConfigError
from hicache.traces import TraceRequest, read_mooncake_trace

SHARED_TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_trace.jsonl.zst"


def line(**changes: object) -> str:
    fields = {"timestamp": 0, "input_length": 1200, "output_length": 70, "hash_ids": [5, 6, 7]}
    return json.dumps(fields | changes) + "\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_trace(text: str) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text(text)
        return path

    return write_trace


def test_equal_blocks_give_equal_tokens_and_unequal_ones_do_not() -> None:
    left = prompt_of(TraceRequest(0, 1536, 1, (5, 6, 7)), scale=32, vocab=512, tokens_max=1000)
    right = prompt_of(TraceRequest(9, 1536, 1, (5, 6, 8)), scale=32, vocab=512, tokens_max=1000)
    assert len(left) == len(right) == 48
    assert left[:32] == right[:32]
    assert left[32:] != right[32:]


def test_a_partial_last_block_is_cut_not_dropped() -> None:
    whole = prompt_of(TraceRequest(0, 1536, 1, (5, 6, 7)), scale=32, vocab=512, tokens_max=1000)
    partial = prompt_of(TraceRequest(0, 1100, 1, (5, 6, 7)), scale=32, vocab=512, tokens_max=1000)
    assert partial == whole[:34]


def test_a_compressed_trace_reads_like_a_plain_one(write: Callable[[str], Path], tmp_path: Path) -> None:
    text = line() + line(timestamp=4, hash_ids=[9], input_length=3)
    packed = tmp_path / "trace.jsonl.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    assert list(read_mooncake_trace(packed)) == list(read_mooncake_trace(write(text)))


@pytest.mark.parametrize(
    "bad",
    ["not json\n", line(hash_ids=[]), line(input_length=0), line(hash_ids="no"), '{"timestamp": 1}\n', "[]\n"],
)
def test_a_line_that_is_no_request_is_named_by_its_number(write: Callable[[str], Path], bad: str) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2"):
        list(read_mooncake_trace(write(line() + bad)))


def test_a_missing_and_an_empty_trace_are_refused(write: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file"):
        trace_workload(tmp_path / "nowhere", limit=3, scale=TraceScale(), vocab=512)
    with pytest.raises(ConfigError, match="at least 16 requests"):
        trace_workload(write(""), limit=3, scale=TraceScale(), vocab=512)


@pytest.mark.parametrize("divisor", [0, -1, 3, 1024])
def test_a_scale_that_would_cut_blocks_apart_is_refused(divisor: int) -> None:
    with pytest.raises(ConfigError, match="a divisor of 512"):
        TraceScale(divisor=divisor)


def test_the_built_in_workload_is_the_same_for_the_same_seed_and_has_both_tenants() -> None:
    turns = built_in_workload(conversations=4, turns=3, vocab=512, seed=1)
    assert turns == built_in_workload(conversations=4, turns=3, vocab=512, seed=1)
    assert turns != built_in_workload(conversations=4, turns=3, vocab=512, seed=2)
    assert {turn.tenant for turn in turns} == set(TENANTS)
    assert [turn.conversation for turn in turns] == [0, 1, 2, 3] * 3


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason=f"{SHARED_TRACE.name} is not here")
def test_the_public_conversation_trace_fits() -> None:
    turns = trace_workload(SHARED_TRACE, limit=400, scale=TraceScale(), vocab=512)
    assert len(turns) == 400
    assert all(1 <= len(turn.new_tokens) <= 768 and 1 <= turn.output_tokens <= 8 for turn in turns)
    assert {turn.tenant for turn in turns} == set(TENANTS)
