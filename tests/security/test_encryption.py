"""Encryption at rest: what is on the medium says nothing, what was changed there is a miss, and a key that is dropped
takes its tenant's objects along."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
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
from hicache.backends.sealing import SEAL_BYTES, Sealing
from hicache.backends.store import ObjectStore
from hicache.backends.tenant_keys import MasterKeys, TenantKeys
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from hicache.tenancy import physical_key, tenant_digest
from tests.backends import test_file_contract, test_lmdb_contract
from tests.backends.contract import BackendContract
from tests.backends.payloads import key, payload
from tests.backends.payloads import put as put_plain
from tests.backends.tampering import files_under, overwrite_everywhere
from tests.backends.test_lmdb_contract import open_raw, record_of

PlainLmdb, PlainFiles = test_lmdb_contract.TestLmdbBackend, test_file_contract.TestFileBackend

MIB = 1 << 20
ALICE, BOB = tenant_digest("alice"), tenant_digest("bob")
MARK = b"what nobody may read on the medium ."
PAYLOAD = MARK * 5000
Open = Callable[..., ObjectStore]


def masters(folder: Path, *names: str, file: str = "masters") -> str:
    """A file of master keys, each always the same for its name."""
    path = folder / file
    path.write_text("".join(f"{name} {sha256(name.encode()).hexdigest()}\n" for name in names))
    path.chmod(0o600)
    return str(path)


def random_masters(folder: Path) -> str:
    path = folder / "random"
    path.write_text(f"k1 {secrets.token_hex(32)}\n")
    path.chmod(0o600)
    return str(path)


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
        monkeypatch.setattr(TenantKeys, "_write", _disk_full)
        assert put(store, ALICE, PAYLOAD) in (Outcome.IO_ERROR, Outcome.NO_SPACE)
        assert put(store, BOB, PAYLOAD, number=2) == Outcome.OK
        monkeypatch.undo()
        assert put(store, ALICE, PAYLOAD) == Outcome.OK


def _disk_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


class TestSealing:
    """The seal itself."""

    @pytest.fixture
    def keys(self, tmp_path: Path) -> TenantKeys:
        return TenantKeys(tmp_path / "keys", MasterKeys.read(random_masters(tmp_path)))

    def sealed(self, keys: TenantKeys, key: bytes, text: bytes) -> tuple[bytes, bytes]:
        sealer = Sealing(keys).sealer(key, len(text))
        stored = bytearray(len(text))
        sealer.encrypt_into(memoryview(text), memoryview(stored))
        return bytes(stored), sealer.seal()

    def opened(self, keys: TenantKeys, key: bytes, size_bytes: int, stored: bytes, seal: bytes) -> bytes | None:
        opener = Sealing(keys).opener(key, size_bytes, seal)
        target = bytearray(len(stored))
        if opener is None:
            return None
        opener.decrypt_into(memoryview(stored), memoryview(target))
        return bytes(target) if opener.is_genuine() else None

    def test_nothing_that_a_seal_is_bound_to_can_be_exchanged(self, keys: TenantKeys) -> None:
        key, other = physical_key(ALICE, b"key"), physical_key(ALICE, b"other")
        stored, seal = self.sealed(keys, key, b"text" * 8)
        keys.find_or_make(BOB)
        assert self.opened(keys, key, 32, stored, seal) == b"text" * 8
        assert self.opened(keys, other, 32, stored, seal) is None
        assert self.opened(keys, physical_key(BOB, b"key"), 32, stored, seal) is None
        assert self.opened(keys, key, 33, stored, seal) is None
        assert self.opened(keys, key, 32, stored, seal[:-1]) is None
        for at in range(SEAL_BYTES):
            assert self.opened(keys, key, 32, stored, seal[:at] + bytes([seal[at] ^ 1]) + seal[at + 1 :]) is None
        for at in range(len(stored)):
            assert self.opened(keys, key, 32, stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :], seal) is None

    def test_the_same_object_never_looks_the_same(self, keys: TenantKeys) -> None:
        seen = {self.sealed(keys, physical_key(ALICE, b"key"), b"text" * 8) for _ in range(1000)}
        assert len({stored for stored, _ in seen}) == len({seal[:24] for _, seal in seen}) == 1000

    def test_a_drop_that_failed_is_done_to_its_end_by_the_next(
        self, keys: TenantKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("rename", "unlink"):
            keys.find_or_make(ALICE)
            monkeypatch.setattr(Path, name, _disk_full)
            with pytest.raises(OSError, match="No space"):
                keys.drop(ALICE)
            assert keys.find(ALICE) is None
            monkeypatch.undo()
            assert keys.drop(ALICE)
            assert list((tmp_path / "keys").iterdir()) == []
        assert not keys.drop(ALICE)

    def test_many_threads_make_one_key(self, keys: TenantKeys) -> None:
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda: found.append(keys.find_or_make(ALICE))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1

    def test_a_damaged_key_file_stops_the_start_with_what_it_costs(self, keys: TenantKeys, tmp_path: Path) -> None:
        keys.find_or_make(ALICE)
        [file] = (tmp_path / "keys").iterdir()
        whole = file.read_bytes()
        for raw in (b"", b"{}", b"\xff" * 40, whole[:-3], whole.replace(b'wrapped":"', b'wrapped":"00'), bytes(600)):
            file.write_bytes(raw)
            with pytest.raises(ConfigError, match="removing the file gives up"):
                TenantKeys(tmp_path / "keys", MasterKeys.read(str(tmp_path / "random")))
        file.write_bytes(whole)
        assert TenantKeys(tmp_path / "keys", MasterKeys.read(str(tmp_path / "random"))).find(ALICE) == keys.find(ALICE)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "k1\n",
            "k1 abc\n",
            "k1 " + "g" * 64,
            "k1 " + "0" * 64,
            "\xff",
            "k 1 " + "ab" * 32,
            ("k1 " + "0123456789abcdef" * 4 + "\n") * 2,
        ],
    )
    def test_master_keys_that_are_none_are_refused_without_being_quoted(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "m"
        file.write_text(text, encoding="latin-1")
        file.chmod(0o600)
        with pytest.raises(ConfigError) as caught:
            MasterKeys.read(str(file))
        assert not [word for word in text.split() if len(word) > 8 and word in str(caught.value)]

    def test_master_keys_that_everybody_can_read_are_refused(self, tmp_path: Path) -> None:
        file = random_masters(tmp_path)
        MasterKeys.read(file)
        os.chmod(file, 0o644)
        with pytest.raises(ConfigError, match="chmod"):
            MasterKeys.read(file)


def put(store: ObjectStore, tenant: bytes, payload: bytes, *, number: int = 1) -> Outcome:
    return store.put([PutItem(physical_key(tenant, b"%d" % number), memoryview(payload))])[0]


def get(store: ObjectStore, tenant: bytes, size_bytes: int, *, number: int = 1) -> bytes | Outcome:
    target = bytearray(size_bytes)
    [outcome] = store.get_into([GetItem(physical_key(tenant, b"%d" % number), memoryview(target))])
    return bytes(target) if outcome is Outcome.OK else outcome
