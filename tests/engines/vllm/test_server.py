"""Stock vLLM behind HTTP: tenants by cache_salt, a daemon that dies while it is asked, a clean end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.daemon.rig import DaemonProcess, wait_until
from tests.engines.vllm.conftest import StartEngine, StartServer
from tests.engines.vllm.lives import RESTORED_TOKENS, answered, wait_reconnected
from tests.engines.vllm.rig import hicache


def test_br_017_a_server_serves_tenants_survives_its_daemon_and_ends_cleanly(
    engine: StartEngine, server: StartServer, start: Callable[..., DaemonProcess]
) -> None:
    process = engine()
    model = process.make_model("llama")
    asked = answered(process, "llama", count=24)
    process.close()
    turns, answers = [each.prompt for each in asked], [each.answer for each in asked]
    daemon = start()
    connector = hicache(f"unix://{daemon.settings['socket']}", prefetch_mode="timeout", prefetch_base_s=2.0)

    first = server(model, connector)
    assert [first.complete(each) for each in turns] == answers
    assert first.complete(turns[0], salt="bob") == answers[0]
    assert first.external_tokens() == 0
    assert first.stop() in (0, -15)
    wait_until(lambda: not first.processes(), what="all processes of the server have ended")

    second = server(model, connector)
    assert second.complete(turns[0], salt="carol") == answers[0]
    assert second.external_tokens() == 0, "another tenant's pages were served"
    assert second.complete(turns[0]) == answers[0]
    assert second.external_tokens() == RESTORED_TOKENS
    assert second.complete(turns[0], salt="bob") == answers[0]
    assert second.external_tokens() == 2 * RESTORED_TOKENS, "bob has not got his own pages back"

    with ThreadPoolExecutor(4) as clients:
        waiting = [clients.submit(second.complete, turns[number]) for number in range(1, 13)]
        waiting[2].result()
        daemon.kill()
        assert [each.result() for each in waiting] == answers[1:13]
    assert second.is_healthy()
    Path(str(daemon.settings["ready_file"])).unlink(missing_ok=True)
    wait_reconnected(start(), lambda salt: second.complete(turns[0], salt=salt))
    untouched = iter(range(13, len(turns)))

    def is_served_again() -> bool:
        number, before = next(untouched), second.external_tokens()
        assert second.complete(turns[number]) == answers[number]
        return second.external_tokens() == before + RESTORED_TOKENS

    wait_until(is_served_again, what="the server uses the store again")
    mapped = second.shared_memory()
    second.stop()
    wait_until(lambda: not second.processes(), what="all processes of the server have ended")
    assert not [path for path in mapped if path.exists()]
