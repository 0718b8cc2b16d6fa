"""A store that is slow, wrong, full, silent or gone: every answer is the one of an engine without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.backends.faulty import Fault, FaultKind
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import DaemonProcess, wait_until
from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.rig import hicache, prompt

StartThread = Callable[..., ThreadedDaemon]
GETS = (FaultKind.DELAY, FaultKind.SHORT, FaultKind.EIO, FaultKind.WRONG_BYTES, FaultKind.NEVER, FaultKind.LATE)
PUTS = (FaultKind.DELAY, FaultKind.EIO, FaultKind.ENOSPC, FaultKind.NEVER)
PATIENCE = {"prefetch_mode": "timeout", "prefetch_base_s": 0.5, "prefetch_per_ki_token_s": 0.0}
RESTORED = 384


@pytest.mark.parametrize("model", ["llama", "qwen3-next"])
def test_br_001_whatever_a_get_meets_the_answer_is_right_and_the_store_is_used_again(
    engine: StartEngine, start_thread: StartThread, model: str
) -> None:
    daemon = start_thread()
    target = daemon.target.replace("unix:", "unix://")
    prompts = [prompt(seed, tokens=410) for seed in range(len(GETS))]
    process = engine()
    alone = process.start(model)
    answers = [alone.ask(each).tokens for each in prompts]
    alone.stop()
    storing = process.start(model, hicache(target))
    assert [storing.ask(each).tokens for each in prompts] == answers
    storing.stop()

    loading = process.start(model, hicache(target, **PATIENCE))
    for kind, ask, answer in zip(GETS, prompts, answers, strict=True):
        fault = daemon.backend.arm("get_into", Fault(kind, delay_s=2.0))
        output = loading.ask(ask)
        assert fault.entered.is_set(), f"{kind}: the store was not asked"
        daemon.backend.disarm()
        assert output.tokens == answer, kind
        assert output.finish == "length"
        assert output.external < RESTORED, kind
    loading.stop()

    again = process.start(model, hicache(target))
    outputs = [again.ask(each) for each in prompts]
    assert [output.tokens for output in outputs] == answers
    assert [output.external for output in outputs] == [RESTORED] * len(prompts)
    process.end()


def test_whatever_a_put_meets_the_answer_is_right_and_nothing_half_stored_is_served(
    engine: StartEngine, start_thread: StartThread
) -> None:
    daemon = start_thread()
    target = daemon.target.replace("unix:", "unix://")
    model = "qwen3-next"
    prompts = [prompt(seed, tokens=410) for seed in range(len(PUTS) + 1)]
    process = engine()
    alone = process.start(model)
    answers = [alone.ask(each).tokens for each in prompts]
    alone.stop()
    for kind, ask, answer in zip(PUTS, prompts, answers, strict=False):
        storing = process.start(model, hicache(target))
        fault = daemon.backend.arm("put", Fault(kind, delay_s=0.2))
        assert storing.ask(ask).tokens == answer, kind
        wait_until(fault.entered.is_set, what=f"{kind}: the store was asked")
        daemon.backend.disarm()
        storing.stop()

    loading = process.start(model, hicache(target))
    outputs = [loading.ask(each) for each in prompts]
    assert [output.tokens for output in outputs] == answers
    assert outputs[0].external == RESTORED  # a slow one has been stored
    assert outputs[-1].external == 0
    process.end()


def test_br_038_a_daemon_that_is_killed_and_comes_back_costs_no_answer_and_no_restart(
    engine: StartEngine, start: Callable[..., DaemonProcess]
) -> None:
    daemon = start()
    target = f"unix://{daemon.settings['socket']}"
    process = engine()
    prompts = [prompt(seed, tokens=410) for seed in range(24)]
    alone = process.start("llama")
    answers = [alone.ask(each).tokens for each in prompts]
    alone.stop()
    storing = process.start("llama", hicache(target))
    assert [storing.ask(each).tokens for each in prompts] == answers
    storing.stop()

    loading = process.start("llama", hicache(target, **PATIENCE))
    first = loading.ask(prompts[0])
    assert (first.external, first.tokens) == (RESTORED, answers[0])
    daemon.kill()
    for number in (1, 2, 3):
        assert loading.ask(prompts[number]).tokens == answers[number]
    Path(str(daemon.settings["ready_file"])).unlink(missing_ok=True)
    start()
    untouched = iter(range(4, len(prompts)))

    def is_served_again() -> bool:
        number = next(untouched)
        output = loading.ask(prompts[number])
        assert output.tokens == answers[number]
        return output.external == RESTORED

    wait_until(is_served_again, what="the engine uses the store again")
    process.end()


def test_a_store_and_an_l2_far_too_small_only_cost_hits(engine: StartEngine, start_thread: StartThread) -> None:
    daemon = start_thread(capacity_bytes="2MiB")
    target = daemon.target.replace("unix:", "unix://")
    process = engine()
    prompts = [prompt(seed, tokens=410) for seed in range(6)]
    alone = process.start("llama")
    answers = [alone.ask(each).tokens for each in prompts]
    alone.stop()
    small = process.start("llama", hicache(target, l2_bytes=1 << 20, **PATIENCE))
    for _ in range(3):
        small.reset()
        assert [output.tokens for output in small.generate(*prompts)] == answers
    process.end()
