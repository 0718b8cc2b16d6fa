"""`hicache tenants`: the file is changed in one step and taken at once, and an erase leaves nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import grpc
import pytest

from hicache.admin.client import Admin
from hicache.admin.verbs import TENANT_ERASE
from hicache.backends.store import ObjectStore
from hicache.daemon import tenants_file
from hicache.daemon.recovery import open_store
from hicache.daemon.tenants import Tenants
from hicache.daemon.tenants_file import change_file, rotate_token
from hicache.errors import AdminRefused, ConfigError
from hicache.outcome import Outcome
from hicache.tenancy import TENANT_BYTES, tenant_digest
from tests.cli.conftest import Ran, run, store
from tests.daemon.client import Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import ALICE, BOB, DaemonThread


@contextmanager
def stopping(daemon: DaemonThread) -> Iterator[DaemonThread]:
    try:
        yield daemon
    finally:
        daemon.stop()


@pytest.fixture
def served(start_thread: Callable[..., ThreadedDaemon], two_tenants: str) -> ThreadedDaemon:
    Path(two_tenants).write_text(f"# who may come in\n\nalice {ALICE} weight=2\nbob {BOB}\n")
    return start_thread(tenants_file=two_tenants)


def token_of(ran: Ran) -> str:
    """The line that is nothing but a token."""
    [token] = [line for line in ran.out.splitlines() if len(line) == 43 and " " not in line]
    return token


def refused(daemon: ThreadedDaemon, token: str) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        Client(daemon.target, token=token).close()
    return refusal_code(caught.value)


def test_a_new_tenant_comes_in_at_once_with_a_token_that_only_he_has(
    served: ThreadedDaemon, two_tenants: str, admin: str
) -> None:
    ran = run("tenants", "add", "carol", "--set", "quota_bytes=1MiB", "--admin", admin)
    assert ran.code == 0, ran.err
    token = token_of(ran)
    text = Path(two_tenants).read_text()
    assert text.startswith("# who may come in\n\nalice ")
    assert token not in text
    assert Path(two_tenants).stat().st_mode & 0o777 == 0o600
    with Client(served.target, token=token) as client:
        store(client, range(3))
        rows = {row["name"]: row for row in run("tenants", "list", "--admin", admin, "--json", "-").json["tenants"]}
    assert list(rows) == ["alice", "bob", "carol"]
    assert (rows["carol"]["objects"], rows["carol"]["sessions"]) == (3, 1)
    assert (rows["carol"]["limits"]["quota_bytes"], rows["alice"]["limits"]["weight"]) == (1 << 20, 2)
    assert "carol" in run("tenants", "list", "--admin", admin).out


def test_a_rotated_token_ends_the_old_one_and_keeps_the_limits(
    served: ThreadedDaemon, two_tenants: str, admin: str, folder: Path
) -> None:
    out = folder / "token"
    ran = run("tenants", "rotate", "alice", "--token-out", out, "--admin", admin)
    assert ran.code == 0, ran.err
    token = out.read_text().strip()
    assert out.stat().st_mode & 0o777 == 0o600
    assert token not in ran.out + ran.err
    assert refused(served, ALICE) == "BAD_TOKEN"
    with Client(served.target, token=token):
        pass
    assert "weight=2" in Path(two_tenants).read_text()
    with Client(served.target, token=BOB):
        pass


def test_limits_hold_at_once_and_an_empty_one_is_the_default_again(
    served: ThreadedDaemon, two_tenants: str, admin: str
) -> None:
    def quota() -> float:
        rows = run("tenants", "list", "--admin", admin, "--json", "-").json["tenants"]
        return next(float(row["limits"]["quota_bytes"]) for row in rows if row["name"] == "bob")

    assert run("tenants", "quota", "bob", "quota_bytes=128KiB", "ttl_s=60", "--admin", admin).code == 0
    assert quota() == 128 << 10
    with Client(served.target, token=BOB) as client:
        store(client, range(5))
    assert served.store.usage().objects == 2, "of 64 KiB each"
    assert run("tenants", "quota", "bob", "quota_bytes=", "--admin", admin).code == 0
    assert quota() == 0
    assert Path(two_tenants).read_text().splitlines()[3] == f"bob {BOB} ttl_s=60"


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_an_erase_deletes_everything_of_one_tenant_and_nothing_else(
    backend: str, start_thread: Callable[..., ThreadedDaemon], two_tenants: str, admin: str
) -> None:
    daemon = start_thread(tenants_file=two_tenants, backend=backend)
    with Client(daemon.target, token=ALICE) as client:
        store(client, range(300), 2000)
    with Client(daemon.target, token=BOB) as client:
        kept = store(client, range(300, 304))
        assert run("tenants", "erase", "alice", "--admin", admin, given="n\n").code == 1
        assert daemon.store.usage().objects == 304
        ran = run("tenants", "erase", "alice", "--remove", "--yes", "--admin", admin, "--json", "-")
        assert (ran.code, ran.json["objects"], ran.json["failed"], ran.json["removed"]) == (0, 300, 0, True), ran
    with Client(daemon.target, token=BOB) as client:
        assert client.present(kept) == [True] * 4
    assert daemon.store.usage().objects == 4
    assert refused(daemon, ALICE) == "BAD_TOKEN"
    owners = {found.key[:TENANT_BYTES] for batch in daemon.store.walk() for found in batch}
    assert owners == {tenant_digest("bob")}
    again = run("tenants", "erase", "alice", "--yes", "--admin", admin)
    assert (again.code, "no tenant 'alice'" in again.err) == (1, True)


def test_a_tenant_is_erased_and_taken_out_of_a_file_that_the_daemon_may_not_write(
    served: ThreadedDaemon, two_tenants: str, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(served.target, token=ALICE) as client:
        store(client, range(3))
    with monkeypatch.context() as read_only:
        read_only.setattr("hicache.daemon.admin_tenants.change_file", _refuse_to_write)
        refused_there = run("tenants", "erase", "alice", "--remove", "--yes", "--admin", admin)
        assert (refused_there.code, "--file" in refused_there.err) == (1, True), refused_there
        assert served.store.usage().objects == 3
        here = ["--remove", "--yes", "--file", two_tenants, "--admin", admin, "--json", "-"]
        assert run("tenants", "erase", "alice", *here).json["objects"] == 3
        assert run("tenants", "add", "carol", *here[2:6]).code == 0
        assert run("tenants", "erase", "carol", *here).json["objects"] == 0, "one who has stored nothing"
        assert run("tenants", "erase", "carol", *here).code == 2, "and nobody"
    assert refused(served, ALICE) == "BAD_TOKEN"
    assert served.store.usage().objects == 0
    assert run("tenants", "erase", "bob", *here[1:]).code == 2, "--file without --remove"


def test_a_file_that_is_too_long_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tenants"
    file.write_text(text := f"alice {ALICE}\nbob {BOB}\n")
    monkeypatch.setattr(tenants_file, "TENANTS_FILE_CHARS_MAX", len(text) - 1)
    ran = run("tenants", "add", "carol", "--file", file, "--admin", tmp_path / "none")
    assert (ran.code, "of at most" in ran.err, file.read_text() == text) == (2, True, True), ran


def _refuse_to_write(file: str, edit: object) -> str:
    raise tenants_file.NotWritable(f"tenants_file {file} cannot be written by this user")


@pytest.mark.parametrize(("mode", "is_shared"), [(0o750, True), (0o755, False), (0o700, False)])
def test_a_new_file_is_for_the_group_of_a_folder_that_is_open_to_that_alone(
    tmp_path: Path, mode: int, is_shared: bool
) -> None:
    folder = tmp_path / "hicached"
    folder.mkdir()
    group = 4242 if os.geteuid() == 0 else os.getegid()
    os.chown(folder, -1, group)
    folder.chmod(mode)
    assert run("tenants", "add", "alice", "--file", folder / "tenants", "--admin", tmp_path / "none").code == 0
    stat = (folder / "tenants").stat()
    assert stat.st_mode & 0o777 == (0o640 if is_shared else 0o600)
    assert not is_shared or stat.st_gid == group


@pytest.mark.parametrize("step", ["before", "fails"])
def test_an_erase_drops_the_key_before_it_deletes_anything(
    step: str,
    two_tenants: str,
    admin: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = folder / "masters"
    keys.write_text(f"k1 {sha256(b'k1').hexdigest()}\n")
    keys.chmod(0o600)
    key_file = folder / "store" / "keys" / f"{tenant_digest('alice').hex()}.key"
    there: list[bool] = []
    delete, rename = ObjectStore.delete, Path.rename

    def note(one: ObjectStore, doomed: Sequence[bytes]) -> list[Outcome]:
        there.append(key_file.exists())
        return delete(one, doomed)

    def refuse(path: Path, target: Path) -> Path:
        if path == key_file:
            raise OSError(errno.EROFS, "refused")
        return rename(path, target)

    monkeypatch.setattr(ObjectStore, "delete", note)
    with stopping(DaemonThread(folder, open_store, tenants_file=two_tenants, encryption_keys=str(keys))) as daemon:
        with Client(daemon.target, token=ALICE) as client:
            store(client, range(3))
        assert key_file.exists()
        if step == "fails":
            with monkeypatch.context() as broken:
                broken.setattr(Path, "rename", refuse)
                failed = run("tenants", "erase", "alice", "--yes", "--admin", admin)
            assert (failed.code, "erase it again" in failed.err, there) == (1, True, []), failed
        erased = run("tenants", "erase", "alice", "--yes", "--admin", admin, "--json", "-")
        assert (erased.code, erased.json["objects"], set(there)) == (0, 3, {False}), erased
        with Client(daemon.target, token=ALICE) as client:
            kept = store(client, range(3))
            assert client.present(kept) == [True] * 3, "what comes after has another key"


def test_what_the_daemon_cannot_take_leaves_file_and_daemon_as_they_were(
    served: ThreadedDaemon, two_tenants: str, admin: str
) -> None:
    before = Path(two_tenants).read_text()
    cases = [
        (["add", "alice"], 2, "a new name: it has a line already"),
        (["add", "no name"], 2, "tenant = 'no name': expected a name of letters"),
        (["add", "dave", "--set", "quota_bytes=lots"], 2, "quota_bytes = 'lots'"),
        (["add", "dave", "--set", "colour=red"], 2, "colour = 'red': expected one of the limits of a tenant"),
        (["add", "dave", "--set", "weight"], 2, "limit = 'weight': expected LIMIT=VALUE"),
        (["rotate", "carol"], 2, "tenant = 'carol': expected a tenant of the file: alice, bob"),
        (["rotate", "alice", "--keep-old", "long"], 2, "keep-old = 'long'"),
        (["rotate", "alice", "--keep-old", "99999999999999d"], 2, "at most 36500d"),
        (["quota", "alice", "weight=0"], 2, "weight = '0'"),
        (["erase", "nobody", "--yes"], 1, "there is no tenant 'nobody'"),
    ]
    for arguments, code, says in cases:
        ran = run("tenants", *arguments, "--admin", admin)
        assert (ran.code, says in ran.err) == (code, True), (arguments, ran)
    assert Path(two_tenants).read_text() == before
    assert sorted(path.name for path in Path(two_tenants).parent.glob("tenants*")) == ["tenants"], (
        "and nothing beside it"
    )
    with Client(served.target, token=ALICE), Client(served.target, token=BOB):
        pass


def test_a_reload_that_fails_puts_the_file_back(
    served: ThreadedDaemon, two_tenants: str, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Path(two_tenants).read_text()

    async def fail() -> None:
        raise ConfigError("log_level", "loud", "one of debug, info")

    monkeypatch.setattr(served.daemon.reloader, "reload", fail)
    ran = run("tenants", "add", "carol", "--admin", admin)
    assert (ran.code, "nothing was changed, since hicached cannot take it: log_level" in ran.err) == (1, True), ran
    assert Path(two_tenants).read_text() == before


def test_a_file_is_made_and_changed_without_a_daemon(folder: Path) -> None:
    file, nobody = folder / "tenants", folder / "nobody.admin"
    first = run("tenants", "add", "alice", "--file", file, "--admin", nobody)
    assert (first.code, "it holds from its start" in first.err) == (0, True), first
    assert file.stat().st_mode & 0o777 == 0o600
    assert Tenants.load(str(file)).authenticate(token_of(first)).name == "alice"
    second = token_of(run("tenants", "rotate", "alice", "--file", file, "--admin", nobody))
    assert Tenants.load(str(file)).authenticate(second).name == "alice"
    assert run("tenants", "quota", "alice", "weight=3", "--file", file, "--admin", nobody).code == 0
    [settings] = Tenants.load(str(file)).settings.values()
    assert settings.weight == 3
    missing = run("tenants", "rotate", "alice", "--file", folder / "none", "--admin", nobody)
    assert (missing.code, "expected a file that exists" in missing.err) == (2, True)


def test_a_daemon_without_tenants_says_what_is_missing(daemon: ThreadedDaemon, admin: str) -> None:
    ran = run("tenants", "add", "alice", "--admin", admin)
    assert (ran.code, "this hicached has no tenants_file" in ran.err) == (1, True)
    rows = run("tenants", "list", "--admin", admin, "--json", "-").json
    assert ([row["name"] for row in rows["tenants"]], rows["file"]) == (["default"], "")


def test_a_directory_that_cannot_be_written_is_named_with_the_way_out(
    served: ThreadedDaemon, two_tenants: str, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = tenants_file.os.open

    def read_only(path: str, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(".tmp"):
            raise OSError(30, "Read-only file system")
        return real_open(path, flags, mode)

    monkeypatch.setattr(tenants_file.os, "open", read_only)
    ran = run("tenants", "add", "carol", "--admin", admin)
    assert ran.code == 1
    assert f"--file {two_tenants}`, which reloads then" in ran.err


def test_several_tokens_of_a_tenant_become_one_with_all_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    file.write_text(f"# first\nalice {ALICE} weight=2\nbob {BOB}\nalice another-token-of-alice ttl_s=60\n# last")
    before = change_file(str(file), rotate_token("alice", "ab" * 32, now_s=0))
    assert file.read_text() == f"# first\nalice sha256:{'ab' * 32} weight=2 ttl_s=60\nbob {BOB}\n# last\n"
    assert before.endswith("# last")


def test_a_rotation_lets_no_old_token_live_longer_and_takes_those_that_have_ended(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    ends = {"a": "2030-01-01T00:00:00Z", "b": "2030-03-01T01:00:00+01:00", "c": "2029-01-01T00:00:00Z"}
    file.write_text("".join(f"alice token-{name}-of-alice weight=2 expires={end}\n" for name, end in ends.items()))
    file.write_text(file.read_text().replace("weight=2 ", "", 2) + f"alice {ALICE}\n")
    until, now_s = "2030-02-01T00:00:00Z", 1_893_000_000.0  # the end of 2029
    change_file(str(file), rotate_token("alice", "ab" * 32, keeps_old_until=until, now_s=now_s))
    assert file.read_text().splitlines() == [
        f"alice token-a-of-alice expires={ends['a']}",
        f"alice token-b-of-alice expires={until}",
        f"alice sha256:{'ab' * 32} weight=2",
        f"alice {ALICE} expires={until}",
    ]


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_an_erase_drops_the_key_before_the_first_object(
    backend: str, start_thread: Callable[..., ThreadedDaemon], two_tenants: str, admin: str, folder: Path
) -> None:
    """So that what a kill in the middle leaves is read by nobody."""
    pytest.importorskip("cryptography")
    masters = folder / "masters"
    masters.write_text(f"k1 {bytes(range(32)).hex()}\n")
    masters.chmod(0o600)
    daemon = start_thread(tenants_file=two_tenants, backend=backend, encryption_keys=str(masters))
    for token, numbers in ((ALICE, range(5)), (BOB, range(5, 9))):
        with Client(daemon.target, token=token) as client:
            store(client, numbers)
    keys = folder / "store" / "keys"
    assert len(list(keys.iterdir())) == 2
    seen: list[int] = []
    delete = daemon.store.delete

    def note(some: list[bytes]) -> list[Outcome]:
        seen.append(len(list(keys.iterdir())))
        return delete(some)

    daemon.store.delete = note  # type: ignore[method-assign]
    assert run("tenants", "erase", "alice", "--yes", "--admin", admin).code == 0
    assert seen
    assert set(seen) == {1}
    assert [file.name for file in keys.iterdir()] == [f"{tenant_digest('bob').hex()}.key"]
    assert run("verify", "--admin", admin, "--json", "-").json["payload_bytes"] == 4 * 5000


def test_a_tenant_erases_what_it_has_and_is_not_taken_out_of_the_file_by_itself(
    served: ThreadedDaemon, two_tenants: str, admin: str
) -> None:
    with Client(served.target, token=ALICE) as client:
        store(client, range(3))
    before = Path(two_tenants).read_text()
    alice = Admin(admin, token=ALICE)
    with (
        pytest.raises(AdminRefused, match="ask as an operator"),
        alice.open(TENANT_ERASE, names={"tenant": "alice", "remove": "1"}),
    ):
        pass
    assert served.store.usage().objects == 3
    with alice.open(TENANT_ERASE, names={"tenant": "alice"}) as parts:
        list(parts)
    assert served.store.usage().objects == 0
    assert Path(two_tenants).read_text() == before
