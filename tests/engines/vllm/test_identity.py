"""Engines whose bytes differ share nothing, whatever path and name they have in common; others find it all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.rig import EngineProcess, Output, hicache, prompt

TURN = prompt(1, tokens=410)
RESTORED = 384


def asked(process: EngineProcess, connector: dict[str, Any] | None, **settings: object) -> Output:
    """What one engine answers in its short life."""
    answer = process.start("llama", connector, **settings).ask(TURN)
    process.stop()
    return answer


def test_br_062_two_checkpoints_at_one_path_share_nothing(engine: StartEngine, models: Path, target: str) -> None:
    process = engine()
    folders = [Path(process.make_model("llama", seed=seed)) for seed in (0, 1)]
    path = models / "swapped"

    def asked_with(checkpoint: Path, connector: dict[str, Any] | None) -> Output:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(checkpoint, path)
        return asked(process, connector, path=str(path))

    first, second = (asked_with(folder, None) for folder in folders)
    assert first.tokens != second.tokens, "the checkpoints do not differ"
    assert asked_with(folders[0], hicache(target)).external == 0
    other = asked_with(folders[1], hicache(target))
    assert (other.external, other.tokens) == (0, second.tokens)
    again = asked_with(folders[0], hicache(target))
    assert (again.external, again.tokens) == (RESTORED, first.tokens)
    process.close()


def test_what_changes_the_bytes_shares_nothing(engine: StartEngine, target: str) -> None:
    process = engine()
    ropes = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    others: dict[str, dict[str, Any]] = {
        "rope": {"hf_overrides": ropes},
        "dtype": {"dtype": "bfloat16"},
        "block size": {"block_size": 64},
    }
    plain = asked(process, hicache(target))
    assert plain.external == 0
    for name, settings in others.items():
        answer = asked(process, hicache(target), **settings)
        assert answer.external == 0, f"an engine with another {name} was served"
        if name == "rope":
            assert answer.tokens == asked(process, None, **settings).tokens != plain.tokens
    assert asked(process, hicache(target)).external == RESTORED
    process.close()


def test_what_would_make_the_cache_useless_is_refused_at_start_with_the_fix(engine: StartEngine, target: str) -> None:
    process = engine()
    for wrong, fix in (
        ({"settings": {"prefix_caching_hash_algo": "sha256"}}, "--prefix-caching-hash-algo sha256_cbor"),
        ({"settings": {"prefix_caching_hash_algo": "xxhash_cbor"}}, "--prefix-caching-hash-algo sha256_cbor"),
        ({"connector": {"kv_load_failure_policy": "fail"}}, "recompute"),
    ):
        with pytest.raises(AssertionError, match=fix):
            process.start("llama", hicache(target) | wrong.get("connector", {}), **wrong.get("settings", {}))
    process.close()
