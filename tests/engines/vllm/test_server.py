"""Stock vLLM behind HTTP: tenants by cache_salt, a daemon that dies while it is asked, a clean end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.daemon.rig import DaemonProcess, wait_until
from tests.engines.vllm.conftest import StartEngine, StartServer
from tests.engines.vllm.rig import hicache, prompt

RESTORED = 384


def test_a_server_serves_tenants_survives_its_daemon_and_ends_cleanly(
    engine: StartEngine, server: StartServer, start: Callable[..., DaemonProcess]
) -> None:
    prompts = [prompt(seed, tokens=410) for seed in range(24)]
    process = engine()
    model = process.make_model("llama")
    alone = process.start("llama")
    answers = [alone.ask(each).tokens for each in prompts]
    process.end()
    daemon = start()
    connector = hicache(f"unix://{daemon.settings['socket']}", prefetch_mode="timeout", prefetch_base_s=2.0)
    segments = sorted(Path("/dev/shm").iterdir())

    first = server(model, connector)
    assert [first.complete(each) for each in prompts] == answers
    assert first.complete(prompts[0], salt="bob") == answers[0]
    assert first.external_tokens() == 0
    assert first.stop() in (0, -15)
    wait_until(lambda: not first.processes(), what="all processes of the server have ended")

    second = server(model, connector)
    assert second.complete(prompts[0], salt="carol") == answers[0]
    assert second.external_tokens() == 0, "another tenant's pages were served"
    assert second.complete(prompts[0]) == answers[0]
    assert second.external_tokens() == RESTORED
    assert second.complete(prompts[0], salt="bob") == answers[0]
    assert second.external_tokens() == 2 * RESTORED, "bob has not got his own pages back"

    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(second.complete, prompts[number]) for number in range(1, 13)]
        asked[2].result()
        daemon.kill()
        assert [each.result() for each in asked] == answers[1:13]
    assert second.is_healthy()
    Path(str(daemon.settings["ready_file"])).unlink(missing_ok=True)
    start()
    untouched = iter(range(13, len(prompts)))

    def is_served_again() -> bool:
        number, before = next(untouched), second.external_tokens()
        assert second.complete(prompts[number]) == answers[number]
        return second.external_tokens() == before + RESTORED

    wait_until(is_served_again, what="the server uses the store again")
    second.stop()
    wait_until(lambda: not second.processes(), what="all processes of the server have ended")
    assert sorted(Path("/dev/shm").iterdir()) == segments
