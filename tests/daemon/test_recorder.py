"""hicached records what is asked for as a trace that can be replayed, in which nothing of a client can be found."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.admission.traces import load_trace
from hicache.daemon.recorder import QUEUED_MAX, TraceRecorder
from hicache.errors import ConfigError
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key


def test_a_daemon_writes_its_own_trace_which_a_replay_reads(
    start_thread: Callable[..., ThreadedDaemon], folder: Path
) -> None:
    path = folder / "trace.jsonl"
    keys = [object_key(number) for number in range(8)]
    daemon = start_thread(trace_file=str(path), trace_block_tokens=16)
    with Client(daemon.target) as client:
        client.lookup(keys[:5])
        client.lookup(keys)
        client.lookup([*keys[:2], object_key(99)])
    daemon.stop()

    trace = load_trace(path)
    assert [list(request.blocks) for request in trace.requests] == [[0, 1, 2, 3, 4], list(range(8)), [0, 1, 8]]
    assert trace.block_tokens == 16
    assert {request.tenant for request in trace.requests} == {"tenant 0"}
    text = path.read_bytes()
    assert not any(key in text or key.hex().encode() in text for key in keys)
    assert b"default" not in text
    assert path.stat().st_mode & 0o077 == 0, "nobody else reads it"


def test_two_recordings_name_the_same_key_differently(tmp_path: Path) -> None:
    names = []
    for number in range(2):
        recorder = TraceRecorder.open(str(tmp_path / f"{number}"), bytes_max=10_000, block_tokens=16)
        recorder.lookup("a", [b"key"])
        recorder.lookup("b", [b"key"])
        recorder.close()
        lines = [json.loads(line) for line in (tmp_path / f"{number}").read_text().splitlines()]
        assert lines[0]["hash_ids"] == lines[1]["hash_ids"]
        assert [line["tenant"] for line in lines] == ["tenant 0", "tenant 1"]
        names.append(lines[0]["hash_ids"])
    assert names[0] != names[1]


def test_a_trace_that_is_full_ends_and_is_whole(tmp_path: Path) -> None:
    recorder = TraceRecorder.open(str(tmp_path / "trace"), bytes_max=1000, block_tokens=16)
    for number in range(100):
        recorder.lookup("a", [b"%d" % number])
    recorder.close()
    lines = (tmp_path / "trace").read_text().splitlines()
    assert 3 < len(lines) < 12
    assert all(json.loads(line)["hash_ids"] for line in lines)
    assert (tmp_path / "trace").stat().st_size <= 1000


def test_a_medium_that_does_not_answer_makes_nobody_wait(tmp_path: Path) -> None:
    stuck, release = threading.Event(), threading.Event()

    class Stuck(TraceRecorder):
        def _line(self, at_s: float, tenant: str, keys: object) -> bytes:
            stuck.set()
            release.wait(30)
            raise OSError("no space left")

    recorder = Stuck(str(tmp_path / "trace"), bytes_max=1000, block_tokens=16)
    recorder.lookup("a", [b"first"])
    assert stuck.wait(10)
    for number in range(QUEUED_MAX + 7):
        recorder.lookup("a", [b"%d" % number])
    assert recorder.left_out == 7
    release.set()
    recorder.close()
    assert not recorder._thread.is_alive()


def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_file"):
        TraceRecorder.open(str(tmp_path / "none" / "trace"), bytes_max=1000, block_tokens=16)
