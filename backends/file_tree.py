"""The folders that a file store keeps its objects in: where each is, and which there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice

from hicache.backends.base import SCAN_OBJECTS_MAX, WALK_OBJECTS_MAX, StoredBatch, WalkedObject
from hicache.backends.file_layout import key_of_name, object_path
from hicache.backends.file_objects import payload_bytes_of
from hicache.backends.progress import tell_progress


class FileTree:
    """Files below ``root``, one for each object. Names that are none of ours are left alone."""

    def __init__(self, root: str) -> None:
        self.root = root

    def path_of(self, key: bytes) -> str:
        """The name of an object's file."""
        return object_path(self.root, key)

    def folders(self) -> list[str]:
        """Those that hold objects; none where somebody has removed all of them."""
        try:
            with os.scandir(self.root) as entries:
                return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def in_folder(self, folder: str, *, prefix: bytes = b"") -> Iterator[tuple[bytes, os.stat_result]]:
        """Key and stat of the file of every object in one of them whose key begins with ``prefix``. One stat for each,
        and none is opened."""
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            with os.scandir(fd) as entries:  # of a descriptor: names are looked up there and not from the root on
                found = list(entries)
            for entry in found:
                key = key_of_name(entry.name)
                if key is None or not key.startswith(prefix):
                    continue
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield key, stat
        finally:
            os.close(fd)

    def scan(self) -> Iterator[StoredBatch]:
        """Every object, by names and sizes only; takes seconds for a million."""
        for folder in self.folders():
            rows = ((key, payload_bytes_of(stat.st_size), stat.st_mtime) for key, stat in self.in_folder(folder))
            while some := list(islice(rows, SCAN_OBJECTS_MAX)):
                tell_progress(len(some))
                yield StoredBatch.of(some)

    def walk(
        self, *, after: bytes, tenant: bytes, tag_of: Callable[[str, bytes], int | None]
    ) -> Iterator[list[WalkedObject]]:
        """As ``Backend.walk``, in the order of folders and names. ``tag_of`` opens the file of a path and a
        key and tells the object's namespace; None: it has gone."""
        start = self.path_of(after) if after else ""
        for folder in self.folders():
            if folder < os.path.dirname(start):
                continue
            found = sorted((self.path_of(key), key, stat) for key, stat in self.in_folder(folder, prefix=tenant))
            ahead = (entry for entry in found if entry[0] > start)
            while some := list(islice(ahead, WALK_OBJECTS_MAX)):
                yield [
                    WalkedObject(key, payload_bytes_of(stat.st_size), stat.st_mtime, tag)
                    for path, key, stat in some
                    if (tag := tag_of(path, key)) is not None
                ]
