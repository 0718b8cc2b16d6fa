"""`hicache verify` finds damage on the medium, in a running daemon and in a directory, and disturbs nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.admin.client import Admin
from hicache.admin.store_messages import VerifyRequest, check_verify_rate
from hicache.admin.verbs import VERIFY
from hicache.backends.store_stats import Operation
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import payload
from tests.cli.conftest import Ran, model, run, store
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import wait_until


def damage(folder: Path, number: int, size_bytes: int = 5000) -> None:
    """Change a byte of an object where it lies."""
    content = payload(number, size_bytes)
    for path in (folder / "store").rglob("*"):
        if path.is_file() and path.name != "data.mdb":
            raw = path.read_bytes()
            if (at := raw.find(content)) >= 0:
                with path.open("r+b") as file:
                    file.seek(at + size_bytes // 2)
                    file.write(bytes([content[size_bytes // 2] ^ 1]))
                return
    raise AssertionError(f"object {number} is not in {folder}")


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_damage_on_the_medium_is_found_while_the_daemon_serves(
    backend: str, start_thread: Callable[..., ThreadedDaemon], folder: Path, admin: str
) -> None:
    daemon = start_thread(backend=backend)
    with Client(daemon.target) as client:
        keys = store(client, range(20))
        good = run("verify", "--admin", admin, "--json", "-")
        assert (good.code, good.json["objects"], good.json["corrupt"]) == (0, 20, 0), good
        assert good.json["payload_bytes"] == 20 * 5000
        damage(folder, 3)
        damage(folder, 11)
        bad = run("verify", "--admin", admin, "--json", "-")
        assert (bad.code, bad.json["corrupt"], bad.json["is_good"]) == (1, 2, False), bad
        assert "2 corrupt (dropped)" in bad.err
        assert client.present(keys) == [number not in (3, 11) for number in range(20)], "dropped, as a get does"
        again = run("verify", "--admin", admin, "--json", "-")
        assert (again.code, again.json["objects"]) == (0, 18)
        assert daemon.store.stats().corrupt_dropped == 2


def test_verify_changes_nothing_about_what_goes_next(start_thread: Callable[..., ThreadedDaemon], admin: str) -> None:
    daemon = start_thread()
    with Client(daemon.target) as client:
        keys = store(client, range(10))
    residents = daemon.store._catalog.residents
    before = [float(residents._used.array[slot]) for slot in residents.slots(keys_in(daemon, keys)).tolist()]
    gets = dict(daemon.store.stats().gets)
    assert run("verify", "--admin", admin).code == 0
    assert [float(residents._used.array[slot]) for slot in residents.slots(keys_in(daemon, keys)).tolist()] == before
    assert dict(daemon.store.stats().gets) == gets
    assert daemon.store.stats().finished[Operation.VERIFY] == {Outcome.OK: 10}


def keys_in(daemon: ThreadedDaemon, keys: list[bytes]) -> list[bytes]:
    found = {found.key[16:]: found.key for batch in daemon.store.walk() for found in batch}
    return [found[key] for key in keys]


def test_verify_takes_one_namespace_and_goes_on_behind_a_key(daemon: ThreadedDaemon, admin: str) -> None:
    with Client(daemon.target) as client:
        store(client, range(6))
    with Client(daemon.target, descriptor=model("other")) as client:
        store(client, range(100, 104))
        digest = next(
            row["namespace"]
            for row in run("namespaces", "list", "--admin", admin, "--json", "-").json["namespaces"]
            if row["model"] == "other"
        )
    only = run("verify", "--admin", admin, "--namespace", digest[:8], "--json", "-").json
    assert (only["objects"], only["payload_bytes"]) == (4, 4 * 5000)
    keys = [found.key for batch in daemon.store.walk() for found in batch]
    rest = run("verify", "--admin", admin, "--after", keys[6].hex(), "--json", "-").json
    assert (rest["objects"], rest["after"]) == (3, keys[-1].hex())


def test_the_rate_bounds_what_is_read(daemon: ThreadedDaemon, admin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pauses that are asked for: as long as the payload takes at the rate, less what has passed."""
    from hicache.daemon.background import Background

    waited: list[float] = []

    async def note(_: Background, delay_s: float, tell: object) -> None:
        waited.append(delay_s)

    monkeypatch.setattr(Background, "_pause", note)
    with Client(daemon.target) as client:
        store(client, range(8), 500_000)
    assert run("verify", "--admin", admin, "--rate", "1MiB/s").code == 0
    assert max(waited) == pytest.approx(8 * 500_000 / (1 << 20), abs=2.0)
    waited.clear()
    assert run("verify", "--admin", admin, "--rate", "100GiB/s").code == 0
    assert max(waited) < 0.1


def test_a_verify_that_nobody_reads_any_more_ends(daemon: ThreadedDaemon, admin: str) -> None:
    """At a rate at which it would take minutes, so that only the end of its reader ends it."""
    with Client(daemon.target) as client:
        store(client, range(8), 2_000_000)
    request = VerifyRequest(bytes_per_s=1 << 16)
    with Admin(admin).open(VERIFY, request, silence_s=30.0) as parts:
        next(parts)
        busy = run("verify", "--admin", admin)
        assert (busy.code, "another one is running" in busy.err) == (1, True), busy
    wait_until(lambda: run("verify", "--admin", admin, "--rate", "10GiB").code == 0, what="the other one has ended")


def test_a_verify_that_would_not_end_is_refused_with_how_long_it_would_take() -> None:
    """The same wherever it runs: a terabyte within 30 days."""
    check_verify_rate(1 << 16, payload_bytes=10**11)
    slowest = -(-(10**12) // (30 * 86_400))
    check_verify_rate(slowest, payload_bytes=10**12)
    for too_slow in (0, 1, slowest - 1):
        with pytest.raises(ConfigError, match=f"at least {slowest} bytes a second: 1000000000000 bytes are stored"):
            check_verify_rate(too_slow, payload_bytes=10**12)
    with pytest.raises(ConfigError, match=r"would take 116 days, and 30 are the most"):
        check_verify_rate(100_000, payload_bytes=10**12)


def test_without_a_daemon_a_rate_has_the_same_limits(start_thread: Callable[..., ThreadedDaemon], folder: Path) -> None:
    daemon = start_thread()
    with Client(daemon.target) as client:
        store(client, range(5))
    daemon.stop()
    for rate in ("1", "0", "2TiB"):
        ran = run("verify", "--path", folder / "store", "--rate", rate)
        assert (ran.code, f"rate = {2 << 40 if rate == '2TiB' else rate}: expected" in ran.err) == (2, True), ran


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_a_directory_is_verified_when_no_daemon_has_it(
    backend: str, start_thread: Callable[..., ThreadedDaemon], folder: Path
) -> None:
    daemon = start_thread(backend=backend)
    with Client(daemon.target) as client:
        store(client, range(5))
    taken = run("verify", "--path", folder / "store")
    assert taken.code == 1
    assert "is in use by pid" in taken.err
    daemon.stop()
    damage(folder, 2)
    found = run("verify", "--path", folder / "store", "--json", "-")
    assert (found.code, found.json["objects"], found.json["corrupt"]) == (1, 5, 1)
    found = run("verify", "--path", folder / "store", "--json", "-")
    assert (found.code, found.json["objects"], found.json["corrupt"]) == (0, 4, 0)
    daemon = start_thread(backend=backend)
    with Client(daemon.target) as client:
        assert client.present([object_key(number) for number in range(5)]) == [True, True, False, True, True]


def test_a_directory_that_a_daemon_would_start_empty_is_left_alone(
    start_thread: Callable[..., ThreadedDaemon], folder: Path
) -> None:
    daemon = start_thread()
    with Client(daemon.target) as client:
        store(client, range(2))
    daemon.stop()
    marker = folder / "store" / "hicache.store"
    raw = marker.read_bytes().replace(b'"is_clean":true', b'"is_clean":false')
    boot = raw[raw.index(b'"boot_id":"') + 11 :][:36]
    marker.write_bytes(raw.replace(boot, b"0" * 36))
    slab = (folder / "store" / "chunks.slab").read_bytes()
    refused = run("verify", "--path", folder / "store")
    assert refused.code == 2
    assert "the machine went down while it was open" in refused.err
    assert (folder / "store" / "chunks.slab").read_bytes() == slab


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--rate", "fast"], 2, "rate = 'fast'"),
        (["--rate", "1"], 2, "rate = 1: expected at least 65536 bytes a second"),
        (["--rate", "2TiB"], 2, "expected at most 1099511627776 bytes a second"),
        (["--namespace", "xyz"], 2, "namespace = 'xyz': expected the first 8"),
        (["--after", "no-key"], 2, "after = 'no-key'"),
        (["--path", "/nowhere"], 2, "path = '/nowhere': expected the directory of a store"),
        (["--token-file", "/nowhere"], 2, "token-file = '/nowhere'"),
    ],
)
def test_bad_input_is_named_with_what_would_be_right(
    arguments: list[str], code: int, says: str, daemon: ThreadedDaemon, admin: str
) -> None:
    ran = run("verify", "--admin", admin, *arguments)
    assert ran.code == code, ran
    assert says in ran.err


def test_a_tenant_that_nobody_knows_is_no_good_store(daemon: ThreadedDaemon, admin: str) -> None:
    for command in (["verify"], ["namespaces", "list"]):
        ran = run(*command, "--tenant", "defualt", "--admin", admin)
        assert (ran.code, "there is no tenant 'defualt'" in ran.err) == (1, True), ran
        assert run(*command, "--tenant", "default", "--admin", admin).code == 0


def test_a_verify_that_the_daemon_ends_says_where_to_go_on(daemon: ThreadedDaemon, admin: str) -> None:
    """It stops in a pause, at a rate at which the whole would take hours."""
    with Client(daemon.target) as client:
        store(client, range(200), 100_000)
    ran: list[Ran] = []
    verify = threading.Thread(target=lambda: ran.append(run("verify", "--rate", "64KiB", "--admin", admin)))
    verify.start()
    wait_until(lambda: bool(daemon.store.stats().finished[Operation.VERIFY]), what="a part is read")
    daemon.stop()
    verify.join()
    [ended] = ran
    assert ended.code in (1, 3), ended
    assert "go on with --after " in ended.err
    assert "verify ended early: hicached is stopping" in str(ended.err)


def test_without_a_daemon_the_exit_code_is_3(folder: Path) -> None:
    ran = run("verify", "--admin", folder / "nobody.admin")
    assert ran.code == 3
    assert "is hicached running" in ran.err
