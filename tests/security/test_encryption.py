"""Encryption at rest: what is on the medium says nothing, what was changed there is a miss, and a key that is dropped
takes its tenant's objects along."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.backends.base import Backend, GetItem, PutItem
from hicache.backends.file_layout import HEADER_BYTES, object_path
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_layout import CHUNK_BYTES
from hicache.backends.lmdb_slab import SLAB_NAME
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.lock import LOCK_NAME
from hicache.backends.marker import MARKER_NAME
from hicache.backends.open import open_store
from hicache.backends.store import ObjectStore
from hicache.backends.tenant_keys import TenantKeys
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from hicache.tenancy import physical_key
from tests.backends import test_file_contract, test_lmdb_contract
from tests.backends.contract import BackendContract
from tests.backends.payloads import key, payload
from tests.backends.payloads import put as put_plain
from tests.backends.tampering import files_under, overwrite_everywhere
from tests.backends.test_lmdb_contract import open_raw, record_of
from tests.security.master_keys import ALICE, BOB, disk_full, masters, random_masters

PlainLmdb, PlainFiles = test_lmdb_contract.TestLmdbBackend, test_file_contract.TestFileBackend

MIB = 1 << 20
MARK = b"what nobody may read on the medium ."
PAYLOAD = MARK * 5000
Open = Callable[..., ObjectStore]


class SealedContract(BackendContract):
    """The contract of backends, with damage done where the bytes lie: nothing on the medium looks like them."""

    # The keys of the contract have no tenant in common, and each new tenant costs two syncs: churn would measure those.
    test_churn_at_the_brim_neither_leaks_nor_wedges = None

    def overwrite(self, directory: Path, name: bytes, content: bytes, *, at: int, count: int) -> None:
        for position in range(at, at + count):
            path, offset = self.place(directory, name, position)
            with path.open("r+b") as file:
                file.seek(offset)
                found = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([found ^ 0x10 if count == 1 else 0]))

    def place(self, directory: Path, name: bytes, at: int) -> tuple[Path, int]:
        """File and offset of a byte of a payload."""
        raise NotImplementedError

    def test_payloads_are_readable_by_their_owner_only(self, reopen: Callable[..., Backend], directory: Path) -> None:
        put_plain(reopen(), (key(1), payload(1, 1000)))
        readable = {path.name for path in files_under(directory) if path.stat().st_mode & 0o077}
        assert readable <= {MARKER_NAME, LOCK_NAME, "lock.mdb"}, "these have no payload, and no key"


class TestSealedLmdb(SealedContract, PlainLmdb):
    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        return LmdbBackend.open(directory, capacity_bytes=capacity_bytes, encryption_keys=contract_masters(directory))

    def place(self, directory: Path, name: bytes, at: int) -> tuple[Path, int]:
        return place_in_lmdb(directory, name, at)


class TestSealedFiles(SealedContract, PlainFiles):
    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        return FileBackend.open(directory, capacity_bytes=capacity_bytes, encryption_keys=contract_masters(directory))

    def place(self, directory: Path, name: bytes, at: int) -> tuple[Path, int]:
        return place_in_files(directory, name, at)


def contract_masters(directory: Path) -> str:
    """The same file for one store as often as it is opened."""
    return masters(directory.parent, "master")


def place_in_lmdb(directory: Path, name: bytes, at: int) -> tuple[Path, int]:
    with open_raw(directory) as env, env.begin() as txn:
        record = record_of(txn, env.open_db(b"index", txn=txn), name)
    return directory / SLAB_NAME, int(record.chunk_ids[at // CHUNK_BYTES]) * CHUNK_BYTES + at % CHUNK_BYTES


def place_in_files(directory: Path, name: bytes, at: int) -> tuple[Path, int]:
    return Path(object_path(str(directory / "objects"), name)), HEADER_BYTES + at


class TestBackends:
    """Both backends, over one store after another."""

    @pytest.fixture(params=["lmdb", "file"])
    def scheme(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "store"

    @pytest.fixture
    def open_it(self, scheme: str, directory: Path, tmp_path: Path) -> Iterator[Open]:
        """Opens the store, after closing the one before."""
        opened: list[ObjectStore] = []
        default = random_masters(tmp_path)

        def open_again(keys: str | None = None) -> ObjectStore:
            while opened:
                opened.pop().close()
            store = open_store(
                f"{scheme}://{directory}",
                capacity_bytes=16 * MIB,
                object_bytes_max=4 * MIB,
                free_space_floor_bytes=0,
                encryption_keys=default if keys is None else keys,
            )
            assert isinstance(store, ObjectStore)
            opened.append(store)
            return store

        yield open_again
        for store in opened:
            store.close()

    def test_what_comes_back_is_what_was_stored_and_nothing_of_it_is_on_the_medium(
        self, open_it: Open, directory: Path
    ) -> None:
        store = open_it()
        for size_bytes in (1, 15, 16, 4096, 65_535, 65_536, 65_537, 3 * MIB + 5):
            stored = (MARK * (size_bytes // len(MARK) + 1))[:size_bytes]
            assert put(store, ALICE, stored, number=size_bytes) == Outcome.OK
        open_it().close()
        store = open_it()
        for size_bytes in (1, 15, 16, 4096, 65_535, 65_536, 65_537, 3 * MIB + 5):
            assert (
                get(store, ALICE, size_bytes, number=size_bytes) == (MARK * (size_bytes // len(MARK) + 1))[:size_bytes]
            )
        open_it().close()
        assert overwrite_everywhere(directory, MARK[:16], b"!" * 16) == 0, "and a control:"
        (directory / "control").write_bytes(b"..." + MARK)
        assert overwrite_everywhere(directory, MARK[:16], b"!" * 16) == 1

    def test_a_flipped_bit_anywhere_in_a_payload_is_a_corrupt_miss_and_the_object_is_gone(
        self, open_it: Open, directory: Path, scheme: str
    ) -> None:
        for at in (0, 1, 70_000, len(PAYLOAD) - 1):
            store = open_it()
            store.delete([physical_key(ALICE, b"1"), physical_key(ALICE, b"2")])
            assert put(store, ALICE, PAYLOAD) == Outcome.OK
            assert put(store, ALICE, PAYLOAD, number=2) == Outcome.OK, "the control"
            store.close()
            place = place_in_lmdb if scheme == "lmdb" else place_in_files
            path, offset = place(directory, physical_key(ALICE, b"1"), at)
            with path.open("r+b") as file:
                file.seek(offset)
                found = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([found ^ 1]))
            store = open_it()
            assert get(store, ALICE, len(PAYLOAD)) == Outcome.CORRUPT
            assert get(store, ALICE, len(PAYLOAD)) == Outcome.ABSENT
            assert get(store, ALICE, len(PAYLOAD), number=2) == PAYLOAD
            assert store.stats().corrupt_dropped == 1

    def test_a_dropped_key_takes_its_tenants_objects_and_no_others(self, open_it: Open) -> None:
        store = open_it()
        assert put(store, ALICE, PAYLOAD) == put(store, BOB, PAYLOAD) == Outcome.OK
        assert store.forget_tenant(ALICE)
        assert not store.forget_tenant(ALICE)
        assert get(store, ALICE, len(PAYLOAD)) == Outcome.CORRUPT
        assert get(store, BOB, len(PAYLOAD)) == PAYLOAD
        assert put(store, ALICE, PAYLOAD) == Outcome.OK, "with a new key"
        store = open_it()
        assert get(store, ALICE, len(PAYLOAD)) == PAYLOAD

    def test_what_a_copy_of_the_medium_has_is_of_no_use_once_the_key_is_gone(
        self, open_it: Open, directory: Path, tmp_path: Path
    ) -> None:
        """As after a kill between the key and the objects: the objects are all there still."""
        store = open_it()
        assert put(store, ALICE, PAYLOAD) == Outcome.OK
        store.forget_tenant(ALICE)
        store = open_it()
        assert store.lookup([physical_key(ALICE, b"1")])[0] == [Outcome.OK], "the object itself was not touched"
        assert get(store, ALICE, len(PAYLOAD)) == Outcome.CORRUPT
        assert get(store, ALICE, len(PAYLOAD)) == Outcome.ABSENT

    def test_a_kill_at_any_step_of_dropping_leaves_all_or_nothing(self, open_it: Open, directory: Path) -> None:
        store = open_it()
        assert put(store, ALICE, PAYLOAD) == put(store, BOB, PAYLOAD) == Outcome.OK
        store.close()
        [file] = (directory / "keys").glob(f"{ALICE.hex()}*")
        dropped = file.with_suffix(".dropped")
        file.rename(dropped)  # killed behind the rename
        dropped.write_bytes(bytes(100))  # or in the middle of what follows it
        (directory / "keys" / "half.new").write_bytes(b"{")  # and another one while a key was made
        store = open_it()
        assert get(store, ALICE, len(PAYLOAD)) == Outcome.CORRUPT
        assert get(store, BOB, len(PAYLOAD)) == PAYLOAD
        assert sorted(path.name for path in (directory / "keys").iterdir()) == [f"{BOB.hex()}.key"]

    @pytest.mark.parametrize("call", ["rename", "fsync", "unlink"])
    def test_a_drop_that_the_medium_refused_is_done_again_and_then_holds(
        self, open_it: Open, directory: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        store = open_it()
        assert put(store, ALICE, PAYLOAD) == put(store, BOB, PAYLOAD) == Outcome.OK

        def refuse(*_: object) -> None:
            raise OSError(errno.EIO, "refused")

        with monkeypatch.context() as broken:
            broken.setattr(*((os, call) if call == "fsync" else (Path, call)), refuse)
            with pytest.raises(OSError, match="refused"):
                store.forget_tenant(ALICE)
        assert store.verify([GetItem(physical_key(ALICE, b"1"), memoryview(bytearray(len(PAYLOAD))))]) == [
            Outcome.CORRUPT
        ], "from the first attempt on"
        assert store.forget_tenant(ALICE), "the second one finds what the first one left"
        assert not store.forget_tenant(ALICE)
        assert sorted(path.name for path in (directory / "keys").iterdir()) == [f"{BOB.hex()}.key"]
        store = open_it()
        assert get(store, ALICE, len(PAYLOAD)) == Outcome.ABSENT
        assert get(store, BOB, len(PAYLOAD)) == PAYLOAD

    def test_a_key_that_does_not_fit_on_the_medium_encrypts_nothing(
        self, open_it: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_it()
        with monkeypatch.context() as full:
            full.setattr("hicache.backends.tenant_keys.os.write", lambda fd, content: len(content) - 1)
            assert put(store, ALICE, PAYLOAD) in (Outcome.IO_ERROR, Outcome.NO_SPACE)
        assert put(store, ALICE, PAYLOAD) == Outcome.OK
        assert get(open_it(), ALICE, len(PAYLOAD)) == PAYLOAD

    def test_master_keys_rotate_and_former_ones_can_go(self, open_it: Open, tmp_path: Path) -> None:
        old, both = masters(tmp_path, "old"), masters(tmp_path, "new", "old", file="both")
        new = masters(tmp_path, "new", file="new")
        assert put(open_it(old), ALICE, PAYLOAD) == Outcome.OK
        assert get(open_it(both), ALICE, len(PAYLOAD)) == PAYLOAD
        assert get(open_it(new), ALICE, len(PAYLOAD)) == PAYLOAD
        with pytest.raises(ConfigError, match="master key 'new'"):
            open_it(old)

    @pytest.mark.parametrize("case", ["none", "another", "same name"])
    def test_without_the_right_master_key_nothing_starts_and_nothing_is_lost(
        self, open_it: Open, tmp_path: Path, case: str
    ) -> None:
        right = masters(tmp_path, "right")
        assert put(open_it(right), ALICE, PAYLOAD) == Outcome.OK
        (tmp_path / "forged").write_text(f"right {secrets.token_hex(32)}\n")
        (tmp_path / "forged").chmod(0o600)
        wrong = {"none": "", "another": masters(tmp_path, "wrong", file="w"), "same name": str(tmp_path / "forged")}
        with pytest.raises(ConfigError, match="encryption_keys"):
            open_it(wrong[case])
        assert get(open_it(right), ALICE, len(PAYLOAD)) == PAYLOAD

    def test_a_store_with_plain_objects_is_not_mixed(self, open_it: Open) -> None:
        assert put(open_it(""), ALICE, PAYLOAD) == Outcome.OK
        with pytest.raises(ConfigError, match="is not encrypted"):
            open_it()
        assert get(open_it(""), ALICE, len(PAYLOAD)) == PAYLOAD

    def test_a_target_and_a_source_that_change_meanwhile_cost_nobody_an_object(self, open_it: Open) -> None:
        store = open_it()
        shared, stop = bytearray(PAYLOAD * 4), threading.Event()

        def scribble() -> None:
            while not stop.is_set():
                for at in range(0, len(shared), 4096):
                    shared[at] ^= 0xFF

        scribbling = threading.Thread(target=scribble)
        scribbling.start()
        try:
            for number in range(10):
                key = physical_key(ALICE, b"%d" % number)
                assert store.put([PutItem(key, memoryview(shared))]) == [Outcome.OK]
                assert store.get_into([GetItem(key, memoryview(shared))]) == [Outcome.OK]
                own = bytearray(len(shared))
                assert store.get_into([GetItem(key, memoryview(own))]) == [Outcome.OK]
                store.delete([key])
        finally:
            stop.set()
            scribbling.join()

    def test_where_the_key_of_a_new_tenant_cannot_be_kept_its_put_fails_and_others_go_on(
        self, open_it: Open, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_it()
        assert put(store, BOB, PAYLOAD) == Outcome.OK
        monkeypatch.setattr(TenantKeys, "_write", disk_full)
        assert put(store, ALICE, PAYLOAD) in (Outcome.IO_ERROR, Outcome.NO_SPACE)
        assert put(store, BOB, PAYLOAD, number=2) == Outcome.OK
        monkeypatch.undo()
        assert put(store, ALICE, PAYLOAD) == Outcome.OK


def put(store: ObjectStore, tenant: bytes, payload: bytes, *, number: int = 1) -> Outcome:
    return store.put([PutItem(physical_key(tenant, b"%d" % number), memoryview(payload))])[0]


def get(store: ObjectStore, tenant: bytes, size_bytes: int, *, number: int = 1) -> bytes | Outcome:
    target = bytearray(size_bytes)
    [outcome] = store.get_into([GetItem(physical_key(tenant, b"%d" % number), memoryview(target))])
    return bytes(target) if outcome is Outcome.OK else outcome
