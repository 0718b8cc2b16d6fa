"""Stores as earlier releases have left them: they open as they are, or are refused with what to do; never emptied."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from hicache.backends.base import UNKNOWN_TAG, Backend, PutItem
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.marker import MARKER_NAME
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import OTHER_TENANT, get, key, payload

RELEASED = Path(__file__).parent / "released"
SIZES = [1, 100, 65536, 65537, 200_000]
OBJECTS = {key(number): (number, size) for number, size in enumerate(SIZES)} | {key(9, OTHER_TENANT): (9, 3000)}
CAPACITY_BYTES = 4 << 20


def content(number: int, size_bytes: int) -> bytes:
    """What the released versions were given: it repeats, so that their stores are small when packed."""
    return (payload(number, 16) * (size_bytes // 16 + 1))[:size_bytes]


def unpack(name: str, target: Path) -> Path:
    with tarfile.open(RELEASED / name) as packed:
        packed.extractall(target, filter="data")
    return target


def version_of(directory: Path) -> int:
    return int(json.loads((directory / MARKER_NAME).read_bytes())["version"])


def opened(kind: str, directory: Path) -> Backend:
    cls: type[LmdbBackend] | type[FileBackend] = LmdbBackend if kind == "lmdb" else FileBackend
    return cls.open(directory, capacity_bytes=CAPACITY_BYTES)


@pytest.mark.parametrize(("kind", "version_after"), [("lmdb", 3), ("file", 2)])
def test_a_store_of_version_2_opens_with_all_it_has(kind: str, version_after: int, tmp_path: Path) -> None:
    directory = unpack(f"{kind}-2.tar.xz", tmp_path / "store")
    assert version_of(directory) == 2
    for _ in range(2):  # the second time as this version has left it
        backend = opened(kind, directory)
        try:
            for name, (number, size) in OBJECTS.items():
                assert get(backend, name, size) == (Outcome.OK, content(number, size))
            walked = {found.key: found for batch in backend.walk() for found in batch}
            assert {name: found.namespace_tag for name, found in walked.items()} == dict.fromkeys(OBJECTS, UNKNOWN_TAG)
            assert walked[key(0)].used_at_s == pytest.approx(1_700_000_000.0)
            assert backend.usage().objects == len(OBJECTS)
        finally:
            backend.close()
        assert version_of(directory) == version_after


@pytest.mark.parametrize("kind", ["lmdb", "file"])
def test_objects_of_both_versions_lie_side_by_side(kind: str, tmp_path: Path) -> None:
    directory = unpack(f"{kind}-2.tar.xz", tmp_path / "store")
    backend = opened(kind, directory)
    assert backend.put([PutItem(key(20), memoryview(b"new"), 7)]) == [Outcome.OK]
    backend.touch([(key(20), 1_800_000_000.0), (key(1), 1_800_000_000.0)])
    backend.close()
    backend = opened(kind, directory)
    tags = {found.key: found.namespace_tag for batch in backend.walk() for found in batch}
    assert tags == dict.fromkeys(OBJECTS, UNKNOWN_TAG) | {key(20): 7}
    assert get(backend, key(20), 3) == (Outcome.OK, b"new")
    assert get(backend, key(1), 100) == (Outcome.OK, content(1, 100))
    backend.close()


@pytest.mark.parametrize("kind", ["lmdb", "file"])
@pytest.mark.parametrize(
    ("version", "says"), [(1, "no hicache that can still be run reads it"), (9, "a newer hicache")]
)
def test_other_versions_are_refused_and_left_as_they_are(kind: str, version: int, says: str, tmp_path: Path) -> None:
    directory = unpack(f"{kind}-2.tar.xz", tmp_path / "store")
    marker = directory / MARKER_NAME
    marker.write_bytes(marker.read_bytes().replace(b'"version":2', b'"version":%d' % version))
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and "mdb" not in path.name}
    with pytest.raises(ConfigError, match=says):
        opened(kind, directory)
    assert all(path.read_bytes() == raw for path, raw in before.items())
