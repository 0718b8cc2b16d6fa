"""hicached below the CPU tier of a real vLLM: what comes back is what was computed, or it is computed again."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.rig import DaemonProcess, scrape, wait_until
from tests.engines.vllm.models import MODELS, folder_of
from tests.engines.vllm.rig import EngineProcess, Output, prompt

StartDaemon = Callable[..., DaemonProcess]
StartEngine = Callable[..., EngineProcess]

ENGINE_ID = "engine-of-the-leak-test"
ROPE = {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}}
PATIENT = {"lookup_timeout_s": 20, "load_timeout_s": 20, "store_timeout_s": 20}  # a busy machine is no fault


def tiered(daemon: DaemonProcess, *, mutant: str | None = None, **settings: object) -> dict[str, Any]:
    """vLLM's own connector and CPU tier, with HiCacheTier below, or one of tier_mutants.py."""
    tier = {
        "type": mutant or "HiCacheTier",
        "module_path": "tests.engines.vllm.tier_mutants" if mutant else "hicache.connectors.vllm_tier",
        "l3": f"unix://{daemon.settings['socket']}",
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.vllm.cpu_tier",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier | PATIENT | settings],
        },
    }


def prompts(model: str) -> list[list[int]]:
    page = MODELS[model].page_tokens
    return [prompt(1, tokens=3 * page + 7), prompt(2, tokens=2 * page + 3)]


def plain(engine: EngineProcess, model: str, *asked: list[int]) -> list[Output]:
    """What an engine without any cache says."""
    engine.start(model)
    answers = engine.generate(*asked)
    engine.stop()
    return answers


def stored(daemon: DaemonProcess) -> float:
    return scrape(daemon.ready["http"]).get('hicache_store_finished_objects_total{operation="put",outcome="ok"}', 0)


def tokens(outputs: list[Output]) -> list[tuple[int, ...]]:
    return [output.tokens for output in outputs]


@pytest.fixture
def own_process() -> Iterator[Callable[[EngineProcess], EngineProcess]]:
    """Closes processes that a test has made itself."""
    with ExitStack() as stack:
        yield lambda process: stack.enter_context(closing(process))


@pytest.mark.parametrize("model", ["llama", "gemma3", "qwen3-next"])
def test_a_new_engine_finds_what_an_old_one_stored(start: StartDaemon, engine: StartEngine, model: str) -> None:
    daemon = start()
    process = engine()
    asked = prompts(model)
    expected = tokens(plain(process, model, *asked))
    process.start(model, tiered(daemon))
    first = process.generate(*asked)
    salted = process.ask(asked[0], salt="of a tenant")
    process.stop()
    if model == "llama":
        process.close()  # names are the same in another process
        process = engine()
    process.start(model, tiered(daemon))
    again = process.generate(*asked)
    stranger = process.ask(asked[0], salt="of another")
    owner = process.ask(asked[0], salt="of a tenant")
    process.stop()
    assert tokens(first) == tokens(again) == expected
    assert salted.tokens == stranger.tokens == owner.tokens == expected[0]
    page = MODELS[model].page_tokens
    assert first[0].external == salted.external == stranger.external == 0
    assert owner.external == 3 * page
    assert again[0].external == 5 * page


def test_br_062_other_weights_or_another_rope_at_the_same_path_are_misses(
    start: StartDaemon, tmp_path: Path, own_process: Callable[[EngineProcess], EngineProcess]
) -> None:
    daemon = start()
    models = tmp_path / "models"
    models.mkdir()
    mine = folder_of("llama", models, seed=0)
    other = folder_of("llama", models, seed=1)
    process = own_process(EngineProcess(tmp_path, models))
    asked = prompts("llama")[0]
    [expected_rope] = plain_with(process, asked, **ROPE)
    process.start("llama", tiered(daemon))
    assert process.ask(asked).external == 0
    process.stop()
    process.start("llama", tiered(daemon), **ROPE)
    scaled = process.ask(asked)
    process.stop()
    shutil.move(mine, tmp_path / "before")
    shutil.move(other, mine)
    [expected_other] = plain_with(process, asked)
    process.start("llama", tiered(daemon))
    swapped = process.ask(asked)
    process.stop()
    shutil.rmtree(mine)
    shutil.copytree(tmp_path / "before", mine)
    process.start("llama", tiered(daemon))
    control = process.ask(asked)
    process.stop()
    assert (scaled.tokens, scaled.external) == (expected_rope.tokens, 0)
    assert (swapped.tokens, swapped.external) == (expected_other.tokens, 0)
    assert control.external == 96


def plain_with(process: EngineProcess, asked: list[int], **settings: object) -> list[Output]:
    process.start("llama", **settings)
    answers = process.generate(asked)
    process.stop()
    return answers


@pytest.mark.parametrize(
    ("mutant", "model", "second"),
    [
        ("NoNamespace", "llama", ROPE),
        ("WrongRow", "llama", {}),
        ("NoLoad", "llama", {}),
        ("WrongRow", "qwen3-next", {}),
        ("NoGroup", "qwen3-next", {}),
    ],
)
def test_these_checks_tell_a_tier_with_a_fault(
    start: StartDaemon, engine: StartEngine, mutant: str, model: str, second: dict[str, Any]
) -> None:
    daemon = start()
    process = engine()
    asked = prompt(1, tokens=3 * MODELS[model].page_tokens + 7)
    process.start(model, **second)
    expected = process.ask(asked)
    process.stop()
    process.start(model, tiered(daemon, mutant=mutant))
    process.ask(asked)
    process.stop()
    process.start(model, tiered(daemon, mutant=mutant), **second)
    wrong = process.ask(asked)
    process.stop()
    assert wrong.external > 0
    assert wrong.tokens != expected.tokens


def test_two_ranks_each_get_their_own_part_of_a_row(start: StartDaemon, engine: StartEngine) -> None:
    daemon = start()
    process = engine(in_process=False)
    asked = prompts("llama")
    process.start("llama", tiered(daemon), tensor_parallel_size=2)
    first = process.generate(*asked)
    wait_until(
        lambda: stored(daemon) == 5,
        what="its rows are stored: vLLM ends a scheduler in a process without waiting",
        within_s=120,
    )
    process.stop()
    process.start("llama", tiered(daemon), tensor_parallel_size=2)
    again = process.generate(*asked)
    process.stop()
    process.start("llama", tiered(daemon))
    alone = process.generate(*asked)
    process.stop()
    assert tokens(again) == tokens(first)
    assert (first[0].external, again[0].external, alone[0].external) == (0, 5 * 32, 0)


def test_a_full_hicached_goes_on_serving(start: StartDaemon, engine: StartEngine) -> None:
    """It has room for about half of what is stored, and evicts; vLLM is told nothing but misses."""
    daemon = start(capacity_bytes="1MiB")
    process = engine()
    asked = [prompt(seed, tokens=103) for seed in range(20)]
    expected = tokens(plain(process, "llama", *asked))
    for _ in range(2):
        process.start("llama", tiered(daemon))
        outputs = process.generate(*asked)
        process.stop()
        assert tokens(outputs) == expected
    assert daemon.process.poll() is None
    assert outputs[0].external < 20 * 96


def test_an_engine_survives_a_hicached_that_dies_hangs_and_comes_back(start: StartDaemon, engine: StartEngine) -> None:
    daemon = start()
    process = engine()
    asked = [prompt(seed, tokens=103) for seed in range(6)]
    expected = tokens(plain(process, "llama", *asked))
    quick = {"lookup_timeout_s": 0.2, "load_timeout_s": 0.5, "store_timeout_s": 0.5}
    process.start("llama", tiered(daemon))
    assert tokens(process.generate(*asked[:2])) == expected[:2]
    process.stop()
    process.start("llama", tiered(daemon, **quick))
    daemon.process.send_signal(signal.SIGSTOP)
    hung = process.generate(*asked[:3])
    daemon.process.send_signal(signal.SIGCONT)
    daemon.kill()
    dead = process.generate(*asked[2:5])
    process.stop()
    daemon = start()
    process.start("llama", tiered(daemon))
    back = process.generate(*asked)
    process.stop()
    assert tokens(hung) == expected[:3]
    assert tokens(dead) == expected[2:5]
    assert tokens(back) == expected
    assert hung[0].external == dead[0].external == 0
    assert back[0].external >= 2 * 96


def test_changed_bytes_in_the_store_are_computed_again(start: StartDaemon, engine: StartEngine) -> None:
    daemon = start(backend="file")
    process = engine()
    asked = prompts("llama")
    expected = tokens(plain(process, "llama", *asked))
    process.start("llama", tiered(daemon))
    process.generate(*asked)
    process.stop()
    store = Path(str(daemon.settings["path"]))
    files = [path for path in store.rglob("*") if path.is_file() and path.stat().st_size > 16_000]
    assert len(files) == 5
    for path in files:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\xa5" * 2000)
    process.start("llama", tiered(daemon))
    again = process.generate(*asked)
    stored_again = process.generate(*asked)
    process.stop()
    process.start("llama", tiered(daemon))
    control = process.generate(*asked)
    process.stop()
    assert tokens(again) == tokens(stored_again) == tokens(control) == expected
    assert again[0].external == 0
    assert control[0].external == 5 * 32


def test_a_hash_that_is_not_deterministic_is_refused_at_start_up(start: StartDaemon, engine: StartEngine) -> None:
    process = engine()
    with pytest.raises(AssertionError, match="--prefix-caching-hash-algo sha256_cbor"):
        process.start("llama", tiered(start()), prefix_caching_hash_algo="sha256")


def test_nothing_of_an_engine_is_left_behind(start: StartDaemon, engine: StartEngine) -> None:
    daemon = start()
    process = engine()
    asked = prompts("llama")
    held = []
    for _ in range(3):
        process.start("llama", tiered(daemon) | {"engine_id": ENGINE_ID})
        process.generate(*asked)
        in_use = process.run("holdings")["shared_memory"]
        process.stop()
        held.append(process.run("holdings"))
    assert any(ENGINE_ID in name for name in in_use)
    assert not any(ENGINE_ID in name for name in held[2]["shared_memory"])
    for name in ("descriptors", "memfds", "sockets", "threads"):
        assert held[1][name] == held[2][name]
