"""Going through the files of all objects, while they come and go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice

from hicache.backends.base import SCAN_OBJECTS_MAX, StoredBatch
from hicache.backends.file_layout import key_of_name
from hicache.backends.file_objects import payload_bytes_of
from hicache.backends.progress import tell_progress


def walk_objects(root: str) -> Iterator[StoredBatch]:
    """Every object; files that are none of ours are left alone."""
    for folder in object_folders(root):
        rows = ((key, payload_bytes_of(stat.st_size), stat.st_mtime) for key, stat in files_in(folder))
        while some := list(islice(rows, SCAN_OBJECTS_MAX)):
            tell_progress(len(some))
            yield StoredBatch.of(some)


def object_folders(root: str) -> list[str]:
    """Those that hold objects; none where somebody has removed all of them."""
    try:
        with os.scandir(root) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def files_in(folder: str) -> Iterator[tuple[bytes, os.stat_result]]:
    """Key and stat of every object's file in one of them. One stat a file, and none is opened."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        with os.scandir(fd) as entries:  # of a descriptor: names are looked up there and not from the root on
            found = list(entries)
        for entry in found:
            key = key_of_name(entry.name)
            if key is None:
                continue
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield key, stat
    finally:
        os.close(fd)
