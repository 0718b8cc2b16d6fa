"""Requests that are preempted and given up by the dozen leave nothing behind: not in the engine, not in the daemon."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice

import pytest

from tests.daemon.conftest import ThreadedDaemon
from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.rig import hicache, prompt
from tests.harnesses.storage_faults import BASE_METRICS

BLOCKS = {"llama": 40, "qwen3-next": 14}  # too few for four requests at once
TOKENS = 8


@pytest.mark.parametrize("model", BLOCKS)
def test_storms_of_preemptions_and_aborts_leave_nothing_behind(
    engine: StartEngine, start_thread: Callable[..., ThreadedDaemon], model: str
) -> None:
    daemon = start_thread()
    shared = prompt(1, tokens=256)
    process = engine()
    alone = process.start(model)
    mixed = ([*shared[: 64 * (seed % 5)], *prompt(seed, tokens=380 - 64 * (seed % 5))] for seed in count())
    asked = list(islice(alone.settled(mixed, tokens=TOKENS), 8))
    alone.stop()

    target = daemon.target.replace("unix:", "unix://")
    crowded = process.start(model, hicache(target, l2_bytes=16 << 20), num_gpu_blocks_override=BLOCKS[model])
    prompts = [each.prompt for each in asked]
    preemptions = 0
    held = []
    for seed in range(4):
        done = crowded.run("storm", seed=seed, requests=24, abort_share=0.4, prompts=prompts, tokens=TOKENS)
        assert done["finished"]
        assert [(index, tokens) for index, tokens in done["finished"] if tuple(tokens) != asked[index].answer] == []
        preemptions = done["preemptions"]
        crowded.reset()
        held.append(crowded.run("holdings"))
        del held[-1]["shared_memory"]  # that of engines beside this one, too
    assert preemptions > 0, "nothing was preempted"
    assert held[1:] == held[1:2] * 3  # the first storm starts what is started once
    process.end()
    assert {name: daemon.metric(name) for name in BASE_METRICS} == dict.fromkeys(BASE_METRICS, 0.0)
