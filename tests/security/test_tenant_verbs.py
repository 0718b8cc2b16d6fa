"""What a tenant may ask of the admin API about itself, and how much of the daemon that may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from hicache.admin.client import Admin
from hicache.admin.verbs import NAMESPACES, TENANT_ERASE
from hicache.daemon.admin_api import AdminError
from hicache.daemon.authority import Caller
from hicache.daemon.background import STREAMS_MAX, STREAMS_OF_TENANTS_MAX, Background, write
from hicache.errors import AdminRefused
from hicache.outcome import Outcome
from hicache.tenancy import tenant_digest
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import ALICE, BOB
from tests.harnesses.test_tenants import KEYS, Two, memory, two

__all__ = ["memory", "two"]  # fixtures


def test_whether_a_tenant_goes_on_is_not_its_own_to_say(two: Two) -> None:
    alice = Admin(two.daemon.config.admin_socket, token=ALICE)
    names = {"tenant": "alice", "remove": "1"}
    with pytest.raises(AdminRefused, match="ask as an operator"), alice.open(TENANT_ERASE, names=names) as answer:
        b"".join(answer)
    assert two.alice.present(KEYS) == [True] * 2
    del names["remove"]
    with alice.open(TENANT_ERASE, names=names) as answer:
        b"".join(answer)
    assert two.alice.present(KEYS) == [False] * 2


def test_a_name_that_looks_like_anothers_digest_is_a_name(
    start_thread: Callable[..., ThreadedDaemon], folder: Path
) -> None:
    file = folder / "tenants"
    file.write_text(f"alice {ALICE}\n{tenant_digest('alice').hex()} {BOB}\n")
    daemon = start_thread(tenants_file=str(file))
    with Client(daemon.target, token=ALICE) as client:
        assert client.put_stream(KEYS, [b"hers", b"too"]) == [Outcome.OK] * 2
    double = Admin(daemon.config.admin_socket, token=BOB)
    assert double.ask(NAMESPACES, names={"tenant": tenant_digest("alice").hex()}).namespaces == []
    [own] = Admin(daemon.config.admin_socket, token=ALICE).ask(NAMESPACES, names={"tenant": "alice"}).namespaces
    assert own.objects == 2, "and a control"


def test_long_jobs_of_tenants_leave_room_for_others_and_for_operators() -> None:
    async def fill() -> None:
        background = Background()
        async with AsyncExitStack() as running:

            async def begin(caller: Caller) -> None:
                await running.enter_async_context(background.steps("export", iter([1]), caller=caller))

            alice, bob, carol = (Caller(f"tenant {name}", tenant=name) for name in ("alice", "bob", "carol"))
            operator = Caller("root", is_operator=True)
            await begin(alice)
            with pytest.raises(AdminError, match="one long job at a time"):
                await begin(alice)
            await begin(bob)
            with pytest.raises(AdminError, match="all tenants 2"):
                await begin(carol)
            for _ in range(STREAMS_MAX - STREAMS_OF_TENANTS_MAX):
                await begin(operator)
            with pytest.raises(AdminError, match="4 of 4"):
                await begin(operator)
        async with background.steps("export", iter([1]), caller=alice):
            pass

    asyncio.run(fill())


def test_a_client_that_takes_nothing_ends_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stalled(web.StreamResponse):
        async def write(self, data: object) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("hicache.daemon.background.SILENCE_S", 0.01)
    with pytest.raises(ConnectionAbortedError, match="nobody took anything"):
        asyncio.run(write(Stalled(), b"part"))
