"""What vLLM's own steps take decides whether it reads L3 or computes."""

from __future__ import annotations

from collections.abc import Callable

from hicache.backends.faulty import Fault, FaultKind
from tests.daemon.conftest import ThreadedDaemon
from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.lives import RESTORED_TOKENS, answered, check
from tests.engines.vllm.rig import hicache


def test_what_a_slow_store_has_is_computed_once_steps_and_fetches_have_been_timed(
    engine: StartEngine, start_thread: Callable[..., ThreadedDaemon]
) -> None:
    daemon = start_thread()
    target = daemon.target.replace("unix:", "unix://")
    process = engine()
    asked = answered(process, "llama", count=4)
    storing = process.start("llama", hicache(target))
    check(asked, [storing.ask(each.prompt) for each in asked])
    storing.flush()
    storing.stop()

    loading = process.start("llama", hicache(target, read_policy="latency"))
    assert loading.run("prefill_s", start=0, end=RESTORED_TOKENS) is None
    fault = daemon.backend.arm("get_into", Fault(FaultKind.DELAY, delay_s=2.0))
    outputs = check(asked, [loading.ask(each.prompt) for each in asked])
    assert fault.entered.is_set(), "nothing is known at first, so it is read"
    assert outputs[-1].external == 0
    assert 0 < loading.run("prefill_s", start=0, end=RESTORED_TOKENS) < 2.0
    daemon.backend.disarm()
    loading.stop()

    always = process.start("llama", hicache(target))
    assert [output.external for output in check(asked, [always.ask(each.prompt) for each in asked])] == [
        RESTORED_TOKENS
    ] * len(asked)
    process.end()
