"""Removes a store: all files in its directory that are a store's, and no others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from hicache.backends.file_layout import FAN_OUT, key_of_name
from hicache.backends.file_writer import remove_dead_writers
from hicache.backends.lmdb_env import DATA_NAME
from hicache.backends.lmdb_env import LOCK_NAME as LMDB_LOCK_NAME
from hicache.backends.lmdb_slab import SLAB_NAME
from hicache.backends.lock import DirectoryLock
from hicache.backends.marker import MARKER_NAME, has_content, new_marker, read_any_marker, write_marker
from hicache.backends.namespaces import NAMES_FILE
from hicache.backends.progress import tell_progress
from hicache.backends.store_keys import KEYS_NAME

PROGRESS_FILES = 4096
_KEY_SUFFIXES = frozenset({".key", ".new", ".dropped"})
_FOLDERS = frozenset(f"{number:02x}" for number in range(FAN_OUT))


def wipe_store(directory: Path) -> bool:
    """Removes the store in ``directory``, whatever its kind. False: there is none.

    Only names that a store makes are removed, and the marker last: a wipe that was cut off is gone on with by the next
    one. The directory and its lock stay, and where there are files of others a marker of an empty store, which says
    that a store may be made beside them. Raises ConfigError for a directory without a store that is not empty,
    StorageInUse where somebody has the store open, OSError where a file cannot be removed.
    """
    if not directory.is_dir():
        return False
    lock = DirectoryLock(directory)
    try:
        marker = read_any_marker(directory)
        if marker is None:
            return False
        for name in (DATA_NAME, SLAB_NAME, LMDB_LOCK_NAME, NAMES_FILE, NAMES_FILE + ".tmp"):
            (directory / name).unlink(missing_ok=True)
        _remove_objects(directory / "objects")
        _remove_writers(directory / "unfinished")
        _remove_files(directory / KEYS_NAME, lambda name: Path(name).suffix in _KEY_SUFFIXES)
        if has_content(directory):
            write_marker(directory, new_marker(marker.kind, marker.version))
        else:
            (directory / MARKER_NAME).unlink()
        return True
    finally:
        lock.release()


def _remove_objects(objects: Path) -> None:
    if objects.is_dir():
        for name in sorted(_FOLDERS & set(os.listdir(objects))):
            _remove_files(objects / name, lambda file: key_of_name(file) is not None)
        _remove_if_empty(objects)


def _remove_writers(unfinished: Path) -> None:
    if unfinished.is_dir():
        remove_dead_writers(unfinished)
        _remove_if_empty(unfinished)


def _remove_files(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Those of ``folder`` that are ours, and then the folder when nothing is left in it."""
    if not folder.is_dir():
        return
    removed = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_ours(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
                removed += 1
                if removed % PROGRESS_FILES == 0:
                    tell_progress(PROGRESS_FILES)
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
