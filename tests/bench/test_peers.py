"""Other systems: what is missing is named, and what comes back wrong is noticed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench.daemon_process import BenchError
from bench.peers import NOT_DRIVEN, OBJECT_BYTES, SLOW_TO_START, PeerProcess, run_peers
from bench.peers_child import PEERS, Rounds
from bench.store_run import Results

OBJECT = 4096


class DictPeer:
    """A peer that is right, until it is told to be wrong."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_wrong = False

    def put(self, keys, parts) -> None:
        self.objects |= {key: bytes(part) for key, part in zip(keys, parts, strict=True)}

    def get(self, keys, parts) -> None:
        for key, part in zip(keys, parts, strict=True):
            part[:] = self.objects[keys[0] if self.is_wrong else key]

    def delete(self, keys) -> None:
        for key in keys:
            del self.objects[key]

    def close(self) -> None:
        pass


def test_rounds_put_new_objects_and_keep_two_rounds():
    peer = DictPeer()
    rounds = Rounds(peer, memoryview(bytearray(8 * OBJECT)), object_bytes=OBJECT, batch=2)
    for _ in range(4):
        answer = rounds.put()
        assert rounds.get()["moved_bytes"] == answer["moved_bytes"] == 8 * OBJECT
        assert len(answer["call_s"]) == 4
    assert len(peer.objects) == 16


def test_a_peer_that_returns_other_bytes_is_caught():
    peer = DictPeer()
    rounds = Rounds(peer, memoryview(bytearray(8 * OBJECT)), object_bytes=OBJECT, batch=2)
    rounds.put()
    rounds.get()
    peer.is_wrong = True
    with pytest.raises(ValueError, match="other bytes"):
        rounds.get()


def has(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode == 0


@pytest.mark.skipif(has("sglang"), reason="sglang is installed here")
def test_a_peer_that_is_not_installed_says_so(tmp_path):
    with pytest.raises(BenchError, match="No module named 'sglang'"):
        PeerProcess("sglang-file", tmp_path / "peer", python=sys.executable, object_bytes=OBJECT)


def short_bench(folder, *, has_time_for_slow_peers, is_late=True):
    """A run that has no time to measure a peer."""
    return SimpleNamespace(
        results=Results(),
        folder=folder,
        plan=SimpleNamespace(repetitions=1, peers_budget_s=0.0, has_time_for_slow_peers=has_time_for_slow_peers),
        extend=lambda seconds: None,
        is_late=is_late,
    )


def test_every_peer_is_measured_or_named(tmp_path):
    bench = short_bench(tmp_path, has_time_for_slow_peers=True)
    run_peers(bench, python=sys.executable, show=lambda _: None)
    assert len(bench.results.skipped) == len(NOT_DRIVEN) + len(PEERS) * len(OBJECT_BYTES)
    for name in (*PEERS, *NOT_DRIVEN):
        assert any(line.startswith(f"peer {name}") for line in bench.results.skipped)


def test_a_hurry_names_the_peers_that_start_slowly_once(tmp_path):
    bench = short_bench(tmp_path, has_time_for_slow_peers=False)
    run_peers(bench, python=sys.executable, show=lambda _: None)
    for name in SLOW_TO_START:
        assert len([line for line in bench.results.skipped if line.startswith(f"peer {name}: takes longer")]) == 1


def test_a_python_that_is_not_there_is_named_too(tmp_path):
    bench = short_bench(tmp_path, has_time_for_slow_peers=True, is_late=False)
    run_peers(bench, python=str(tmp_path / "no-python"), show=lambda _: None)
    assert bench.results.rows == []
    assert len(bench.results.skipped) == len(NOT_DRIVEN) + len(PEERS)
