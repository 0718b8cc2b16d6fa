"""A store that no daemon has open, opened as it lies there: for verifying, exporting and importing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hicache.backends.lmdb_layout import CHUNK_BYTES
from hicache.backends.lmdb_slab import SLAB_NAME
from hicache.backends.marker import MARKER_NAME, StoreMarker
from hicache.backends.open import open_store
from hicache.backends.space import total_bytes
from hicache.backends.store import ObjectStore
from hicache.errors import ConfigError

OBJECT_BYTES_MAX = 4 << 30


def open_offline(directory: Path, *, encryption_keys: str = "") -> ObjectStore:
    """The store in ``directory``, with the capacity that it has; ``encryption_keys`` is the file of its master keys.

    Raises ConfigError where there is none, where its master keys are others, or where a daemon would start it empty;
    StorageInUse names the process that has it open.
    """
    marker = _marker(directory)
    if marker.kind == "lmdb" and not marker.survived():
        expected = "a store that was closed: the machine went down while it was open, so that hicached starts it empty"
        raise ConfigError("path", str(directory), expected)
    capacity_bytes = total_bytes(directory)
    if marker.kind == "lmdb":
        capacity_bytes = max(CHUNK_BYTES, (directory / SLAB_NAME).stat().st_size)
    return _open(marker.kind, directory, capacity_bytes, encryption_keys)


def make_offline(directory: Path, kind: str, *, capacity_bytes: int, encryption_keys: str = "") -> ObjectStore:
    """The store in ``directory``, made where there is none. Raises as ``open_offline``."""
    if (directory / MARKER_NAME).exists():
        return open_offline(directory, encryption_keys=encryption_keys)
    return _open(kind, directory, capacity_bytes, encryption_keys)


def _open(kind: str, directory: Path, capacity_bytes: int, encryption_keys: str) -> ObjectStore:
    store = open_store(
        f"{kind}://{directory.resolve()}",
        capacity_bytes=capacity_bytes,
        object_bytes_max=OBJECT_BYTES_MAX,
        free_space_floor_bytes=0,
        encryption_keys=encryption_keys,
    )
    assert isinstance(store, ObjectStore), "these kinds lie in a directory of one owner"
    return store


def _marker(directory: Path) -> StoreMarker:
    try:
        return msgspec.json.decode((directory / MARKER_NAME).read_bytes(), type=StoreMarker)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            "path", str(directory), f"the directory of a store, with its {MARKER_NAME} ({error})"
        ) from error
