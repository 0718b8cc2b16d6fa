"""A store that is slow, wrong, full, silent or gone: every answer is the one of an engine without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.backends.faulty import Fault, FaultKind
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import DaemonProcess, wait_until
from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.lives import RESTORED_TOKENS, answered, check, wait_reconnected
from tests.engines.vllm.rig import hicache

StartThread = Callable[..., ThreadedDaemon]
GETS = (FaultKind.DELAY, FaultKind.SHORT, FaultKind.EIO, FaultKind.WRONG_BYTES, FaultKind.NEVER, FaultKind.LATE)
PUTS = (FaultKind.EIO, FaultKind.ENOSPC, FaultKind.NEVER, FaultKind.DELAY)  # a disk that is full costs older objects
GROUPS_MAX = 4
PATIENCE = {"prefetch_mode": "timeout", "prefetch_base_s": 0.5, "prefetch_per_ki_token_s": 0.0}


@pytest.mark.parametrize("model", ["llama", "qwen3-next"])
def test_br_001_whatever_a_get_meets_the_answer_is_right_and_the_store_is_used_again(
    engine: StartEngine, start_thread: StartThread, model: str
) -> None:
    daemon = start_thread()
    target = address(daemon)
    process = engine()
    asked = answered(process, model, count=len(GETS))
    storing = process.start(model, hicache(target))
    check(asked, [storing.ask(each.prompt) for each in asked])
    storing.flush()
    storing.stop()

    loading = process.start(model, hicache(target, **PATIENCE))
    for kind, each in zip(GETS, asked, strict=True):
        fault = daemon.backend.arm("get_into", Fault(kind, delay_s=2.0))
        output = loading.ask(each.prompt)
        assert fault.entered.is_set(), f"{kind}: the store was not asked"
        daemon.backend.disarm()
        check([each], [output])
        assert output.external < RESTORED_TOKENS, kind
    loading.stop()

    again = process.start(model, hicache(target))
    outputs = check(asked, [again.ask(each.prompt) for each in asked])
    assert [output.external for output in outputs] == [RESTORED_TOKENS] * len(asked)
    process.end()


def test_whatever_a_put_meets_the_answer_is_right_and_nothing_half_stored_is_served(
    engine: StartEngine, start_thread: StartThread
) -> None:
    daemon = start_thread()
    target = address(daemon)
    model = "qwen3-next"
    process = engine()
    asked = answered(process, model, count=len(PUTS) + 1)
    for kind, each in zip(PUTS, asked, strict=False):
        storing = process.start(model, hicache(target))
        fault = daemon.backend.arm("put", Fault(kind, delay_s=0.2))
        check([each], [storing.ask(each.prompt)])
        wait_until(fault.entered.is_set, what=f"{kind}: the store was asked")
        if kind is FaultKind.DELAY:
            storing.flush()
        daemon.backend.disarm()
        storing.stop()

    loading = process.start(model, hicache(target))
    outputs = check(asked, [loading.ask(each.prompt) for each in asked])
    assert outputs[PUTS.index(FaultKind.DELAY)].external == RESTORED_TOKENS
    assert outputs[-1].external == 0  # it was never asked before
    process.end()


def test_br_038_a_daemon_that_is_killed_and_comes_back_costs_no_answer_and_no_restart(
    engine: StartEngine, start: Callable[..., DaemonProcess]
) -> None:
    daemon = start()
    target = f"unix://{daemon.settings['socket']}"
    process = engine()
    asked = answered(process, "llama", count=24)
    storing = process.start("llama", hicache(target))
    check(asked, [storing.ask(each.prompt) for each in asked])
    storing.flush()
    storing.stop()

    loading = process.start("llama", hicache(target, **PATIENCE))
    [first] = check(asked[:1], [loading.ask(asked[0].prompt)])
    assert first.external == RESTORED_TOKENS
    daemon.kill()
    check(asked[1:4], [loading.ask(each.prompt) for each in asked[1:4]])
    Path(str(daemon.settings["ready_file"])).unlink(missing_ok=True)
    wait_reconnected(start(), lambda salt: loading.ask(asked[0].prompt, salt=salt))
    untouched = iter(asked[4:])

    def is_served_again() -> bool:
        each = next(untouched)
        [output] = check([each], [loading.ask(each.prompt)])
        return output.external == RESTORED_TOKENS

    wait_until(is_served_again, what="the engine uses the store again")
    process.end()


def test_a_store_and_an_l2_far_too_small_only_cost_hits(engine: StartEngine, start_thread: StartThread) -> None:
    daemon = start_thread(capacity_bytes="2MiB")
    process = engine()
    asked = answered(process, "llama", count=6)
    small = process.start("llama", hicache(address(daemon), l2_bytes=1 << 20, **PATIENCE))
    for _ in range(3):
        small.reset()
        check(asked, small.generate(*(each.prompt for each in asked)))
    process.end()


def test_br_049_a_load_that_always_fails_ends_in_computing_at_once_and_is_not_tried_for_ever(
    engine: StartEngine, target: str
) -> None:
    process = engine()
    for model in ("llama", "qwen3-next"):
        [each] = answered(process, model, count=1)
        failing = process.start(model, hicache(target, name="FailsLoads", module="tests.engines.vllm.mutants"))
        check([each], [failing.ask(each.prompt)])
        failing.reset()
        output = check([each], [failing.ask(each.prompt)])[0]  # it is in L2: a load begins, and fails
        assert output.cached == 0
        assert 1 <= failing.run("failed_loads") <= GROUPS_MAX, model  # one load, of all groups
        process.stop()
    process.close()


def address(daemon: ThreadedDaemon) -> str:
    return daemon.target.replace("unix:", "unix://")
