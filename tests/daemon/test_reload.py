"""A reload takes what changed in the settings and the tenants file, all of it or nothing, while the daemon serves."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from hicache.admin.client import Admin
from hicache.admin.verbs import RELOAD
from hicache.backends.attempt import Abandoned
from hicache.backends.faulty import Fault, FaultKind
from hicache.daemon.config import DaemonConfig
from hicache.daemon.reload import Reloader
from hicache.daemon.service_manager import ServiceManager
from hicache.errors import AdminRefused, ConfigError, ReloadHangs
from hicache.outcome import Outcome
from tests.daemon.client import DESCRIPTOR, Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key, payload_of
from tests.daemon.rig import DaemonProcess, wait_until

MIB = 1 << 20
KEYS = [object_key(number) for number in range(40)]
Start = Callable[..., DaemonProcess]
StartThread = Callable[..., ThreadedDaemon]


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_a_changed_capacity_is_taken_at_sighup_and_a_wrong_one_is_not(start: Start, folder: Path, backend: str) -> None:
    settings = folder / "hicached.toml"
    settings.write_text('capacity_bytes = "24MiB"\nobject_bytes_max = "2MiB"\n')
    daemon = start(config=str(settings), capacity_bytes=None, backend=backend)

    def resize(text: str, expected_mib: int) -> None:
        settings.write_text(f'capacity_bytes = "{text}"\nobject_bytes_max = "2MiB"\n')
        hang_up(daemon)
        assert client.stats().capacity_bytes == expected_mib * MIB

    with Client(daemon.target) as client:
        payloads = [payload_of(number, MIB) for number in range(40)]
        client.put_stream(KEYS[:16], payloads[:16])
        resize("48MiB", 48)
        assert client.put_stream(KEYS[16:], payloads[16:]) == [Outcome.OK] * 24
        assert client.get_stream(KEYS, [MIB] * 40) == payloads
        resize("12MiB", 12)
        found = client.get_stream(KEYS, [MIB] * 40)
        kept = [number for number, content in enumerate(found) if content is not Outcome.ABSENT]
        assert len(kept) in (9, 10), "down to the low watermark"
        assert client.get_stream([KEYS[number] for number in kept], [MIB] * len(kept)) == [
            payloads[number] for number in kept
        ]
        resize("1MiB", 12)
        assert "expected" in daemon.log
        resize("1000000TiB" if backend == "file" else "100TiB", 12)
    assert daemon.process.poll() is None


def hang_up(daemon: DaemonProcess) -> None:
    """SIGHUP, and wait until the log says what came of it."""
    lines = daemon.log.count("reloaded")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: daemon.log.count("reloaded") > lines, what="SIGHUP is answered in the log")


def test_a_signal_that_finds_no_thread_or_ends_in_a_mistake_leaves_the_next_one_heard(
    daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ["hicached-reload-0"]
    start = threading.Thread.start

    def start_unless_missing(thread: threading.Thread) -> None:
        if thread.name in missing:
            missing.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_missing)
    tries = 0

    def reread() -> DaemonConfig:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("nobody thought of this")
        return DaemonConfig(capacity_bytes=96 * MIB)

    async def signal_until_it_is_done() -> None:
        asked = asyncio.Event()
        reloader = Reloader(daemon.config, reread, [], store=daemon.store, manager=ServiceManager({}))
        reloading = asyncio.create_task(reloader.reload_when_asked(asked))
        while daemon.store.usage().capacity_bytes != 96 * MIB:
            asked.set()
            await asyncio.wait({reloading}, timeout=0.01)
            assert not reloading.done()
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)

    asyncio.run(signal_until_it_is_done())


def test_many_who_ask_at_a_time_share_the_next_reload_which_goes_on_without_them(daemon: ThreadedDaemon) -> None:
    reading, go_on = threading.Event(), threading.Event()
    reads = 0

    def reread() -> DaemonConfig:
        nonlocal reads
        reads += 1
        reading.set()
        assert go_on.wait(10)
        return dataclasses.replace(
            daemon.config, capacity_bytes=96 * MIB if reads == 2 else daemon.config.capacity_bytes
        )

    async def steps() -> None:
        reloader = Reloader(daemon.config, reread, [], store=daemon.store, manager=ServiceManager({}))
        first = asyncio.create_task(reloader.reload())
        assert await asyncio.to_thread(reading.wait, 10)
        later = [asyncio.create_task(reloader.reload()) for _ in range(100)]
        await asyncio.sleep(0)
        gone = later.pop()
        gone.cancel()
        first.cancel()
        go_on.set()
        answers = await asyncio.gather(*later)
        assert {tuple(answer.changed) for answer in answers} == {("capacity_bytes",)}, "what they asked for"
        assert reads == 2, "the first one goes on, and one is for all others"
        assert reloader.config.capacity_bytes == daemon.store.usage().capacity_bytes == 96 * MIB

    asyncio.run(steps())


class TestNeverAnswers:
    """A reload whose store, or whose file, does not answer is given up, and leaves everything as it was."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hicache.daemon.reload.RELOAD_S_MAX", 1.0)

    @pytest.mark.parametrize("mib", [24, 96])
    def test_a_store_that_never_answers(
        self, start_thread: StartThread, folder: Path, monkeypatch: pytest.MonkeyPatch, mib: int
    ) -> None:
        tenants = write_tenants(folder, f"alice {TOKENS['alice']}")
        daemon = start_thread(tenants_file=tenants, object_bytes_max=2 * MIB)
        stuck, over, sizes = threading.Event(), threading.Event(), []
        resize = daemon.backend.resize

        def never(capacity_bytes: int, *, floor_bytes: int) -> None:
            sizes.append(capacity_bytes)
            assert stuck.wait(30)
            resize(capacity_bytes, floor_bytes=floor_bytes)
            if len(sizes) == 2:
                over.set()

        monkeypatch.setattr(daemon.backend, "resize", never)
        daemon.next_config = dataclasses.replace(daemon.config, capacity_bytes=mib * MIB, drain_s=9.0)
        write_tenants(folder, f"bob {TOKENS['bob']}")
        with pytest.raises(ReloadHangs, match="so all settings are as before"):
            daemon.reload()
        assert daemon.daemon.reloader.config == daemon.config
        assert daemon.store._capacity_bytes == 64 * MIB, "what is stored meanwhile has the room that it had"
        with Client(daemon.target, token=TOKENS["alice"]) as client:
            assert client.put_stream(KEYS[:1], [b"served"]) == [Outcome.OK]
            with pytest.raises(ReloadHangs, match="an earlier reload still hangs"):
                daemon.reload()
            assert sizes == [mib * MIB], "one at a time"
            stuck.set()
            assert over.wait(10), "what came after all is undone"
            wait_until(daemon.daemon.reloader._hanging.done, what="the thread has ended")
            assert sizes == [mib * MIB, 64 * MIB]
            assert daemon.store._capacity_bytes == daemon.store.usage().capacity_bytes == 64 * MIB
            monkeypatch.undo()
            daemon.reload()
            assert daemon.store.usage().capacity_bytes == mib * MIB
            assert ends_with(client) == "BAD_TOKEN"

    def test_a_file_that_never_answers(self, daemon: ThreadedDaemon) -> None:
        stuck = threading.Event()

        def reread() -> DaemonConfig:
            assert stuck.wait(30)
            return dataclasses.replace(daemon.config, capacity_bytes=96 * MIB)

        async def steps() -> None:
            reloader = Reloader(daemon.config, reread, [], store=daemon.store, manager=ServiceManager({}))
            with pytest.raises(ReloadHangs):
                await reloader.reload()
            stuck.set()
            assert reloader._hanging is not None
            with pytest.raises(Abandoned):
                await asyncio.wrap_future(reloader._hanging)
            assert daemon.store.usage().capacity_bytes == 64 * MIB, "too late"

        asyncio.run(steps())

    def test_deletes_that_never_end_while_a_smaller_store_makes_room(
        self, start_thread: StartThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        daemon = start_thread(object_bytes_max=2 * MIB)
        with Client(daemon.target) as client:
            client.put_stream(KEYS, [payload_of(number, MIB) for number in range(40)])
        hanging = daemon.backend.arm("delete", Fault(FaultKind.LATE))
        daemon.next_config = dataclasses.replace(daemon.config, capacity_bytes=24 * MIB)
        with pytest.raises(ReloadHangs):
            daemon.reload()
        hanging.release()
        wait_until(daemon.daemon.reloader._hanging.done, what="the thread has ended")
        assert daemon.store._capacity_bytes == daemon.store.usage().capacity_bytes == 64 * MIB
        kept = daemon.store.usage().objects
        assert 22 < kept < 40, "one step at a time"
        monkeypatch.setattr("hicache.daemon.reload.RELOAD_S_MAX", 30)
        daemon.reload()
        assert daemon.store.usage().capacity_bytes == 24 * MIB
        assert daemon.store.usage().objects <= 22


TOKENS = {name: f"token-of-{name}-0123456789" for name in ("alice", "bob", "carol", "alice-new")}


def write_tenants(folder: Path, *lines: str) -> str:
    file = folder / "tenants"
    file.write_text("".join(f"{line}\n" for line in lines))
    return str(file)


def ends_with(client: Client) -> str:
    """Why the daemon ends a session."""
    with pytest.raises(grpc.RpcError) as caught:
        next(client.stream)
    return refusal_code(caught.value)


class TestTenants:
    def test_who_comes_may_and_who_goes_must(self, start_thread: StartThread, folder: Path) -> None:
        alice, bob = f"alice {TOKENS['alice']}", f"bob {TOKENS['bob']}"
        daemon = start_thread(tenants_file=write_tenants(folder, alice, bob))
        with (
            Client(daemon.target, token=TOKENS["alice"]) as staying,
            Client(daemon.target, token=TOKENS["bob"]) as going,
        ):
            staying.put_stream(KEYS[:1], [b"of alice"])
            going.put_stream(KEYS[:1], [b"of bob"])
            write_tenants(folder, alice, f"carol {TOKENS['carol']}")
            daemon.reload()
            assert ends_with(going) == "BAD_TOKEN"
            assert staying.get_stream(KEYS[:1], [8]) == [b"of alice"]
            with Client(daemon.target, token=TOKENS["carol"]) as newcomer:
                assert newcomer.present(KEYS[:1]) == [False]
            with pytest.raises(grpc.RpcError) as caught:
                Client(daemon.target, token=TOKENS["bob"])
            assert refusal_code(caught.value) == "BAD_TOKEN"
            assert daemon.metric("hicache_tenant_objects", tenant="carol") == 0
        write_tenants(folder, alice, bob)
        daemon.reload()
        with Client(daemon.target, token=TOKENS["bob"]) as back:
            assert back.get_stream(KEYS[:1], [6]) == [b"of bob"], "what he had is his"

    def test_a_rotated_token_ends_the_sessions_of_the_old_one_alone(
        self, start_thread: StartThread, folder: Path
    ) -> None:
        bob = f"bob {TOKENS['bob']}"
        old, new = f"alice {TOKENS['alice']}", f"alice {TOKENS['alice-new']}"
        daemon = start_thread(tenants_file=write_tenants(folder, old, bob))
        with (
            Client(daemon.target, token=TOKENS["alice"]) as before,
            Client(daemon.target, token=TOKENS["bob"]) as other,
        ):
            write_tenants(folder, old, new, bob)
            daemon.reload()
            with Client(daemon.target, token=TOKENS["alice-new"]) as after:
                assert before.present(KEYS[:1]) == [False], "both hold while both are in the file"
                write_tenants(folder, new, bob)
                daemon.reload()
                assert ends_with(before) == "BAD_TOKEN"
                assert after.present(KEYS[:1]) == other.present(KEYS[:1]) == [False]

    def test_limits_hold_from_the_next_call_on(self, start_thread: StartThread, folder: Path) -> None:
        alice, bob = f"alice {TOKENS['alice']}", f"bob {TOKENS['bob']}"
        daemon = start_thread(tenants_file=write_tenants(folder, alice, bob))
        with Client(daemon.target, token=TOKENS["alice"]) as client:
            client.put_stream(KEYS[:8], [payload_of(number, 1000) for number in range(8)])
            assert client.stats().objects == 8
            write_tenants(folder, f"{alice} quota_objects=3", bob)
            daemon.reload()
            client.put_stream(KEYS[8:9], [b"one more"])
            assert client.stats().objects == 3
            write_tenants(folder, f"{alice} calls_per_s_max=0.001", bob)
            daemon.reload()
            client.present(KEYS[:1])
            with pytest.raises(grpc.RpcError) as caught:
                client.present(KEYS[:1])
            assert refusal_code(caught.value) == "RATE_LIMITED"
            write_tenants(folder, alice, bob)
            daemon.reload()
            assert client.put_stream(KEYS[10:20], [b"many"] * 10) == [Outcome.OK] * 10

    def test_with_a_second_tenant_everybody_says_hello_again_and_has_his_share(
        self, start_thread: StartThread, folder: Path
    ) -> None:
        alice, bob = f"alice {TOKENS['alice']}", f"bob {TOKENS['bob']}"
        daemon = start_thread(tenants_file=write_tenants(folder, alice), sessions_max=4)
        forgeable = DESCRIPTOR | {"key_hash": "xxh3_128"}
        with Client(daemon.target, token=TOKENS["alice"], descriptor=forgeable) as client:
            write_tenants(folder, alice, bob)
            daemon.reload()
            assert ends_with(client) == "UNKNOWN_SESSION"
        with pytest.raises(grpc.RpcError) as caught:
            Client(daemon.target, token=TOKENS["alice"], descriptor=forgeable)
        assert refusal_code(caught.value) == "KEY_HASH_NOT_ALLOWED"
        with ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(Client(daemon.target, token=TOKENS["alice"]))
            with pytest.raises(grpc.RpcError) as caught:
                Client(daemon.target, token=TOKENS["alice"])
            assert refusal_code(caught.value) == "TOO_MANY_SESSIONS"
            payload = payload_of(1, 1 << 20)
            client = stack.enter_context(Client(daemon.target, token=TOKENS["bob"]))
            assert client.put_stream(KEYS[:1], [payload]) == [Outcome.OK]
            assert client.get_stream(KEYS[:1], [len(payload)]) == [payload]

    @pytest.mark.parametrize("wrong", ["alice short", "alice", "", "alice token-of-alice-0123456789 quota_objects=x"])
    def test_a_wrong_file_changes_nothing_at_all(self, start_thread: StartThread, folder: Path, wrong: str) -> None:
        daemon = start_thread(tenants_file=write_tenants(folder, f"alice {TOKENS['alice']}"))
        daemon.next_config = dataclasses.replace(daemon.config, capacity_bytes=96 * MIB)
        with Client(daemon.target, token=TOKENS["alice"]) as client:
            write_tenants(folder, wrong)
            with pytest.raises(ConfigError, match="tenants"):
                daemon.reload()
            assert client.present(KEYS[:1]) == [False]
            assert daemon.store.usage().capacity_bytes == 64 * MIB

    def test_a_capacity_that_cannot_be_had_leaves_the_tenants_as_they_were(
        self, start_thread: StartThread, folder: Path
    ) -> None:
        daemon = start_thread(tenants_file=write_tenants(folder, f"alice {TOKENS['alice']}"))
        daemon.next_config = dataclasses.replace(daemon.config, capacity_bytes=MIB)
        write_tenants(folder, f"bob {TOKENS['bob']}")
        with pytest.raises(ConfigError, match="capacity_bytes"):
            daemon.reload()
        Client(daemon.target, token=TOKENS["alice"]).close()


def test_the_verb_says_what_was_taken_and_what_waits_and_a_wrong_file_is_400(start: Start, folder: Path) -> None:
    settings = folder / "hicached.toml"
    settings.write_text('capacity_bytes = "24MiB"\nobject_bytes_max = "2MiB"\n')
    daemon = start(config=str(settings), capacity_bytes=None)
    admin = Admin(f"{daemon.settings['socket']}.admin")
    settings.write_text('capacity_bytes = "32MiB"\nobject_bytes_max = "2MiB"\nlog_level = "debug"\nsessions_max = 9\n')
    answer = admin.ask(RELOAD)
    assert (answer.changed, answer.needs_restart) == (["capacity_bytes", "log_level"], ["sessions_max"])
    with pytest.raises(grpc.RpcError):
        Client(daemon.target, token="nobody gave me that")
    wait_until(lambda: "call refused" in daemon.log, what="debug lines are written")
    settings.write_text('capacity_bytes = "32MiB"\nobject_bytes_max = "2MiB"\nlog_level = "loud"\n')
    with pytest.raises(AdminRefused, match="log_level = 'loud'") as caught:
        admin.ask(RELOAD)
    assert caught.value.status == 400
