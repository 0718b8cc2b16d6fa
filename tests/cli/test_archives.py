"""Exports go from any store into any other one, running or not; what is damaged is told and never stored."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest

from hicache.backends.archive import ArchiveReader
from hicache.outcome import Outcome
from hicache.spec import namespace_digest
from tests.backends.payloads import payload
from tests.backends.tampering import overwrite_everywhere
from tests.cli.conftest import model, run, store
from tests.daemon.client import DESCRIPTOR, Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import ALICE, BOB

DIGEST = namespace_digest(DESCRIPTOR).hex()
NUMBERS = range(12)
SIZE = 70_000


@pytest.fixture
def exported(start_thread: Callable[..., ThreadedDaemon], folder: Path, admin: str) -> Path:
    """An export of NUMBERS out of a daemon that has stopped, with its store in folder/store."""
    daemon = start_thread()
    with Client(daemon.target, descriptor=model("other")) as client:
        store(client, range(50, 53))
    with Client(daemon.target) as client:
        store(client, NUMBERS, SIZE)
    file = folder / "export.hicache"
    ran = run("export", DIGEST[:8], "--out", file, "--admin", admin, "--json", "-")
    assert (ran.code, ran.json["objects"], ran.json["payload_bytes"]) == (0, len(NUMBERS), len(NUMBERS) * SIZE), ran
    daemon.stop()
    return file


def check(daemon: ThreadedDaemon, token: str = "") -> None:
    with Client(daemon.target, token=token) as client:
        found = client.get_stream([object_key(number) for number in NUMBERS], [SIZE] * len(NUMBERS))
        assert found == [payload(number, SIZE) for number in NUMBERS]
        assert client.present([object_key(50)]) == [False], "of another namespace"


@pytest.mark.parametrize(("backend", "is_running"), list(product(["lmdb", "file"], [True, False])))
def test_an_export_is_imported_into_any_store(
    backend: str,
    is_running: bool,
    exported: Path,
    start_thread: Callable[..., ThreadedDaemon],
    folder: Path,
    admin: str,
) -> None:
    assert exported.stat().st_mode & 0o077 == 0, "nobody else reads it"
    other = folder / "other"
    if is_running:
        daemon = start_thread(backend=backend, path=str(other))
        ran = run("import", exported, "--admin", admin, "--json", "-")
        again = run("import", exported, "--admin", admin, "--json", "-")
    else:
        arguments = ("--path", other, "--backend", backend, "--capacity", "32MiB", "--json", "-")
        ran, again = run("import", exported, *arguments), run("import", exported, *arguments)
        daemon = start_thread(backend=backend, path=str(other))
    assert (ran.code, ran.json["stored"], ran.json["existing"]) == (0, 12, 0), ran
    assert (again.code, again.json["stored"], again.json["existing"]) == (0, 0, 12), again
    check(daemon)
    [row] = run("namespaces", "list", "--admin", admin, "--json", "-").json["namespaces"]
    assert (row["namespace"], row["model"], row["objects"]) == (DIGEST, "tiny", 12)


def test_a_directory_is_exported_as_the_daemon_would(exported: Path, folder: Path) -> None:
    file = folder / "offline"
    assert run("export", DIGEST, "--out", file, "--path", folder / "store").code == 0
    with file.open("rb") as mine, exported.open("rb") as other:
        first, second = ArchiveReader(mine), ArchiveReader(other)
        assert [(found.key, bytes(found.payload or b"")) for found in first] == [
            (found.key, bytes(found.payload or b"")) for found in second
        ]
        assert first.header.descriptor == second.header.descriptor
        assert first.header.source == second.header.source


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_an_encrypted_directory_is_imported_into_verified_and_exported_with_its_master_keys_alone(
    backend: str, exported: Path, folder: Path
) -> None:
    masters, wrong = folder / "masters", folder / "wrong"
    for file in (masters, wrong):
        file.write_text(f"k1 {sha256(file.name.encode()).hexdigest()}\n")
        file.chmod(0o600)
    sealed = ["--path", folder / "sealed", "--encryption-keys"]
    made = ["--backend", backend, "--capacity", "32MiB"]
    assert run("import", exported, *sealed, masters, *made).code == 0
    assert overwrite_everywhere(folder / "sealed", payload(0, SIZE)[:64], b"!" * 64) == 0, "nothing is plaintext"
    found = run("verify", *sealed, masters, "--json", "-")
    assert (found.code, found.json["objects"], found.json["corrupt"]) == (0, len(NUMBERS), 0), found
    for keys in ("", wrong):
        for verb in (["verify"], ["export", DIGEST, "--out", folder / "none"], ["import", exported]):
            refused = run(*verb, *sealed, keys)
            assert (refused.code, "encryption_keys" in refused.err) == (2, True), refused
    again = folder / "again"
    assert run("export", DIGEST, "--out", again, *sealed, masters).code == 0
    with again.open("rb") as mine:
        contents = {bytes(found.payload or b"") for found in ArchiveReader(mine)}
    assert contents == {payload(number, SIZE) for number in NUMBERS}


def test_the_owner_of_an_import_is_who_it_says(
    exported: Path, start_thread: Callable[..., ThreadedDaemon], two_tenants: str, folder: Path, admin: str
) -> None:
    daemon = start_thread(tenants_file=two_tenants, path=str(folder / "other"))
    assert run("import", exported, "--tenant", "bob", "--admin", admin).code == 0
    check(daemon, BOB)
    with Client(daemon.target, token=ALICE) as client:
        assert client.present([object_key(0)]) == [False]
    unknown = run("import", exported, "--tenant", "carol", "--admin", admin)
    assert (unknown.code, "no tenant 'carol'; hicached knows alice, bob" in unknown.err) == (1, True), unknown


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_an_export_that_broke_off_is_continued(
    backend: str, exported: Path, folder: Path, start_thread: Callable[..., ThreadedDaemon], admin: str
) -> None:
    start_thread(backend=backend, path=str(folder / "other"))
    assert run("import", exported, "--admin", admin).code == 0
    whole, out = folder / "whole", folder / "again"
    assert run("export", DIGEST, "--out", whole, "--admin", admin).code == 0
    raw = whole.read_bytes()
    for length in (5, 5 * SIZE + 60, len(raw) - 10):
        (folder / "again.part").write_bytes(raw[:length])
        ran = run("export", DIGEST, "--out", out, "--admin", admin, "--json", "-")
        assert (ran.code, ran.json["objects"]) == (0, 12), ran
        assert (ran.json["continued"] > 0) == (length > SIZE * 2)
        assert out.read_bytes() == raw
        assert not (folder / "again.part").exists()


def test_a_part_of_something_else_is_not_continued(
    exported: Path, start_thread: Callable[..., ThreadedDaemon], folder: Path, admin: str
) -> None:
    start_thread(path=str(folder / "other"))
    assert run("import", exported, "--admin", admin).code == 0
    part = folder / "x.part"
    part.write_bytes(exported.read_bytes()[: 3 * SIZE])
    ran = run("export", DIGEST, "--out", folder / "x", "--admin", admin)
    assert (ran.code, "remove it to begin anew" in ran.err) == (2, True), "from another store, in another order"
    part.write_bytes(b"my novel")
    ran = run("export", DIGEST, "--out", folder / "x", "--admin", admin)
    assert (ran.code, part.read_bytes()) == (2, b"my novel"), ran


@pytest.mark.parametrize("is_running", [True, False])
def test_a_damaged_export_is_told_and_only_whole_objects_are_stored(
    is_running: bool, exported: Path, start_thread: Callable[..., ThreadedDaemon], folder: Path, admin: str
) -> None:
    raw = bytearray(exported.read_bytes())
    raw[raw.index(payload(4, SIZE)) + 1000] ^= 1  # one payload
    file = folder / "damaged"
    file.write_bytes(raw)
    arguments = ["--admin", admin] if is_running else ["--path", folder / "other", "--capacity", "32MiB"]
    daemon = start_thread(path=str(folder / "other")) if is_running else None
    ran = run("import", file, *arguments, "--json", "-")
    assert (ran.code, ran.json["stored"], ran.json["damaged"]) == (1, 11, 1), ran
    file.write_bytes(exported.read_bytes()[: 6 * SIZE])
    cut = run("import", file, *arguments)
    assert (cut.code, "cut short" in cut.err) == (1, True), cut
    file.write_bytes(b"not an export at all, but long enough to look like one")
    none = run("import", file, *arguments)
    assert (none.code, "expected b'HICACHEX'" in none.err) == (1, True), none
    if daemon is not None:
        assert daemon.store.usage().objects == 11
        assert daemon.store.stats().puts[Outcome.OK] == 11


def test_bad_input_is_named(
    exported: Path, start_thread: Callable[..., ThreadedDaemon], folder: Path, admin: str
) -> None:
    start_thread(path=str(folder / "other"))
    cases: list[tuple[list[object], int, str]] = [
        (["export", "12", "--out", folder / "o", "--admin", admin], 2, "namespace = '12': expected the first 8"),
        (["export", "12345678", "--out", folder / "o", "--admin", admin], 1, "no object of namespace 12345678"),
        (["export", DIGEST, "--out", "/nowhere/o", "--admin", admin], 2, "out = '/nowhere/o.part'"),
        (["export", DIGEST, "--out", "-", "--admin", admin], 2, "out = '-': expected the name of a file"),
        (["export", DIGEST, "--out", folder / "o", "--admin", "127.0.0.1:1"], 3, "127.0.0.1:1"),
        (["import", "/nowhere"], 2, "file = '/nowhere': expected a readable file"),
        (["import", exported, "--path", folder / "none"], 2, "give the new one a --capacity"),
        (["import", exported, "--path", folder / "none", "--capacity", "big"], 2, "capacity = 'big'"),
    ]
    for arguments, code, says in cases:
        ran = run(*arguments)
        assert (ran.code, says in ran.err) == (code, True), ran
    assert not (folder / "o.part").exists()
