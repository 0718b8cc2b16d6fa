"""A store whose medium was damaged at random answers with the right bytes or none, and goes on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import lmdb

from hicache.backends.base import GetItem, PutItem
from hicache.backends.lmdb_slab import SLAB_NAME
from hicache.backends.open import open_store
from hicache.backends.store import ObjectStore
from hicache.outcome import Outcome
from hicache.tenancy import physical_key, tenant_digest
from tests.security.fuzz.mutation import mutated
from tests.security.fuzz.parsers import Target

MIB = 1 << 20
SIZES = (100, 70_000, 200_000)
KEYS = [physical_key(tenant_digest("alice"), b"k%d" % number) for number in range(len(SIZES))]
PAYLOADS = [Random(size).randbytes(size) for size in SIZES]
ALLOWED = {Outcome.OK, Outcome.ABSENT, Outcome.CORRUPT, Outcome.SIZE_MISMATCH, Outcome.IO_ERROR}


class Medium:
    """A closed store with three objects, of which each run damages a copy."""

    def __init__(self, scheme: str, folder: Path, *, is_sealed: bool) -> None:
        self._scheme = scheme
        self._folder = folder
        self._keys_file = ""
        if is_sealed:
            self._keys_file = str(folder / "masters")
            Path(self._keys_file).write_text("k1 " + "0123456789abcdef" * 4 + "\n")
            Path(self._keys_file).chmod(0o600)
        store = self._open(folder / "whole")
        assert (
            store.put([PutItem(*pair) for pair in zip(KEYS, map(memoryview, PAYLOADS), strict=True)])
            == [Outcome.OK] * 3
        )
        store.close()

    def _open(self, path: Path) -> ObjectStore:
        store = open_store(
            f"{self._scheme}://{path}",
            capacity_bytes=2 * MIB,
            object_bytes_max=MIB,
            free_space_floor_bytes=0,
            encryption_keys=self._keys_file,
        )
        assert isinstance(store, ObjectStore)
        return store

    def run(self, data: bytes) -> None:
        """The bytes of ``data`` say what is damaged, and how."""
        random = Random(data)
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self._folder / "whole", copy)
        (_damage_lmdb if self._scheme == "lmdb" else _damage_files)(copy, random)
        store = self._open(copy)
        try:
            for key, payload in zip(KEYS, PAYLOADS, strict=True):
                target = bytearray(len(payload))
                [outcome] = store.get_into([GetItem(key, memoryview(target))])
                assert outcome in ALLOWED
                assert outcome is not Outcome.OK or target == payload, "wrong bytes"
            store.delete(KEYS)
            items = [PutItem(*pair) for pair in zip(KEYS, map(memoryview, PAYLOADS), strict=True)]
            assert store.put(items) == [Outcome.OK] * 3, "it goes on"
        finally:
            store.close()


def _damage_lmdb(store: Path, random: Random) -> None:
    """Values of the index, whole as far as LMDB is concerned, and the slab."""
    if random.random() < 0.7:
        size_bytes = (store / "data.mdb").stat().st_size
        with (
            lmdb.open(str(store), map_size=size_bytes, max_dbs=3, writemap=True, sync=False) as env,
            env.begin(write=True) as txn,
        ):
            index = env.open_db(b"index", txn=txn)
            raws = [bytes(txn.get(key, db=index) or b"") for key in KEYS]  # type: ignore[call-overload]  # a private class
            for key in KEYS:
                if random.random() < 0.6:
                    txn.put(key, mutated(random, raws) or b"\0", db=index)
    if random.random() < 0.7:
        _overwrite(store / SLAB_NAME, random, within=8 * 65_536)


def _damage_files(store: Path, random: Random) -> None:
    for file in sorted((store / "objects").rglob("*")):
        if file.is_file() and random.random() < 0.7:
            if random.random() < 0.5:
                raw = file.read_bytes()
                file.write_bytes(mutated(random, [raw[:300]]) + raw[300:])
            else:
                _overwrite(file, random, within=file.stat().st_size)


def _overwrite(file: Path, random: Random, *, within: int) -> None:
    with file.open("r+b") as medium:
        for _ in range(random.randint(1, 20)):
            medium.seek(random.randrange(within))
            medium.write(random.randbytes(random.choice((1, 1, 8, 500))))


@contextmanager
def media() -> Iterator[list[Target]]:
    """A target for each kind of store."""
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:
        made = []
        for scheme in ("lmdb", "file"):
            for is_sealed in (False, True):
                name = f"{'sealed' if is_sealed else 'plain'}_{scheme}"
                (Path(folder) / name).mkdir()
                run: Callable[[bytes], object] = Medium(scheme, Path(folder) / name, is_sealed=is_sealed).run
                made.append(Target(name, run, (b"seed",)))
        yield made
