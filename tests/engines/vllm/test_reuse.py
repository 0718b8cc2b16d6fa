"""What one engine stored another one loads: the same tokens as without a cache, and the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.daemon.rig import DaemonProcess
from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.rig import hicache, prompt

StartDaemon = Callable[..., DaemonProcess]
MODELS = ("llama", "llama-mha", "gemma3", "qwen3-next", "nemotron-h")


@pytest.mark.parametrize("model", MODELS)
def test_dev(engine: StartEngine, start: StartDaemon, model: str) -> None:
    target = f"unix://{start().settings['socket']}"
    first = engine()
    ask = prompt(1, tokens=400)
    alone = first.start(model).ask(ask)
    first.stop()
    first.start(model, hicache(target))
    a = first.ask(ask)
    b1 = first.run("bytes_of", prompt=ask, tokens=384)
    first.end()
    second = engine().start(model, hicache(target))
    b2 = second.run("bytes_of", prompt=ask, tokens=384)
    print(model, a, alone, second.reset(), second.ask(ask))
    print([[x[:6] for x in g] for g in b1], b1 == b2)
    print(second.run("holdings"))
    second.end()
