"""Reading traces: what is in them, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.admission.traces import load_trace
from hicache.errors import ConfigError


def line(**changes: object) -> str:
    fields = {"timestamp": 0, "input_length": 1200, "output_length": 70, "hash_ids": [5, 6, 7]}
    return json.dumps(fields | changes) + "\n"


def written(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_mooncake_lines_are_sorted_by_arrival_and_numbered_by_prefix(tmp_path: Path) -> None:
    text = line(timestamp=2000, hash_ids=[5, 6, 9]) + line(timestamp=500, tenant="a", type="chat", turn=3)
    trace = load_trace(written(tmp_path, text))
    assert [request.at_s for request in trace.requests] == [0.5, 2.0]
    first, second = trace.requests
    assert list(first.blocks[:2]) == list(second.blocks[:2])
    assert first.blocks[2] != second.blocks[2]
    assert (first.tenant, first.kind, first.turn, first.tokens, trace.block_count) == ("a", "chat", 3, 1200, 4)


def test_equal_contents_behind_different_prefixes_are_different_blocks(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, line(hash_ids=["a", "b", "c"]) + line(hash_ids=["x", "b", "c"])))
    assert trace.block_count == 6


def test_decode_blocks_go_on_from_the_prompt_and_chats_are_sessions(tmp_path: Path) -> None:
    text = line(output_hash_ids=[8], chat_id=1, parent_chat_id=-1) + line(
        timestamp=1, input_length=2048, hash_ids=[5, 6, 7, 8], chat_id=2, parent_chat_id=1
    )
    first, second = load_trace(written(tmp_path, text)).requests
    assert first.output_blocks[0] == second.blocks[3]
    assert first.session == second.session == "1"


def test_sessions_of_claude_code_share_nothing_and_start_as_the_seed_draws(tmp_path: Path) -> None:
    calls = [{"t": 0.0, "in": 100, "out": 9, "hash_ids": [1, 2], "input_types": ["text"]}]
    calls += [{"t": 4.0, "agent_id": "a", "requests": [{"t": 1.0, "in": 64, "out": 5, "hash_ids": [7]}]}]
    calls += [{"t": 9.0, "in": 150, "out": 9, "hash_ids": [1, 2, 3], "input_types": ["tool_result"], "think_time": 2.0}]
    text = "".join(json.dumps({"id": name, "block_size": 64, "requests": calls}) + "\n" for name in ("s1", "s2"))
    path = written(tmp_path, text)
    trace = load_trace(path, seed=1)
    assert trace.block_tokens == 64
    assert trace.block_count == 8
    first = [request for request in trace.requests if (request.session or "").startswith("s1")]
    assert [request.at_s for request in first] == [0.0, 5.0, 9.0]
    assert [request.session for request in first] == ["s1", "s1/a", "s1"]
    assert [request.kind for request in first] == ["text", None, "tool_result"]
    assert (first[2].turn, first[2].think_s) == (1, 2.0)
    assert load_trace(path, seed=1) == trace
    assert load_trace(path, seed=2) != trace
    assert len(load_trace(path, limit=1).requests) == 3


def test_azure_has_lengths_alone(tmp_path: Path) -> None:
    rows = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,600,10\n2023-11-16 18:17:04.9799600,9,8\n"
    )
    trace = load_trace(written(tmp_path, rows, "azure.csv.gz"))
    assert [(request.at_s, request.tokens, list(request.blocks)) for request in trace.requests] == [
        (0.0, 600, [0, 1]),
        (1.0, 9, [2]),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "at least one request"),
        ("{}\n", "trace.jsonl:1"),
        (line() + line(hash_ids=[5, 6]), "trace.jsonl:2"),
        (line() + line(block_size=16, hash_ids=list(range(75))), "512"),
        ("time,tokens\n", "TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "trace.jsonl:2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-5,2\n", "trace.jsonl:2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "at least one request"),
        ('{"id": "s", "block_size": 64, "requests": [{"t": "x"}]}\n', "trace.jsonl:1"),
        ('{"id": "s", "block_size": 0, "requests": []}\n', "trace.jsonl:1"),
        ('{"id": "s", "block_size": 64, "requests": []}\n', "at least one request"),
        (line(block_size=0), "trace.jsonl:1"),
        (line(input_length=0, hash_ids=[]), "trace.jsonl:1"),
        (line(input_length=-5, hash_ids=[]), "trace.jsonl:1"),
        (line(output_length=-1), "trace.jsonl:1"),
        (line(timestamp=-1), "trace.jsonl:1"),
        (line(timestamp="soon"), "trace.jsonl:1"),
        (line(hash_ids=[[1], [2], [3]]), "trace.jsonl:1"),
        ("[" * 5000 + "\n", "trace.jsonl:1"),
        ("{" + line(), "trace.jsonl:1"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_trace(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nowhere.jsonl", None),
        ("a.jsonl.zst", b"not packed"),
        ("a.csv.gz", b"not packed"),
        ("a.jsonl", b"\xff\xfe\n"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 10_000, mtime=0)[:30]),
    ],
    ids=["none", "zst", "gz", "text", "cut"],
)
def test_a_file_that_is_not_there_or_not_whole_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        load_trace(tmp_path / name)
