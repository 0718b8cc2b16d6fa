"""The file that holds the payloads of an LMDB store: equal chunks, mapped, with all its blocks allocated."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hicache.backends.lmdb_layout import CHUNK_BYTES, ChunkIdArray
from hicache.backends.slab_pages import SlabPages
from hicache.backends.space import take_space
from hicache.checksum import payload_hasher
from hicache.errors import BackendError

if TYPE_CHECKING:
    from hicache.backends.sealing import Opener, Sealer

SLAB_NAME = "chunks.slab"
# Copied in one call without the GIL, and hashed in the core's cache: larger ones leave it, smaller ones cost calls.
WRITE_PIECE_CHUNKS = 16
READ_PIECE_CHUNKS = 8
FREE_COPY_BYTES = 512  # numpy keeps the interpreter while it copies less, also while a page comes from the disk

Bytes: TypeAlias = NDArray[np.uint8]


class Slab:
    """Moves payloads between memory and chunks. Thread-safe; who may touch which chunk is the caller's to know.

    A slab that was resized is mapped anew, and what runs meanwhile keeps the mapping that it began with.
    """

    def __init__(self, path: Path, *, chunks: int, capacity_bytes: int) -> None:
        """Opens or makes the file with at least so many chunks.

        Raises ConfigError when there is no room, BackendError when it cannot be mapped.
        """
        self.path = path
        before_bytes = path.stat().st_size if path.exists() else 0
        path.touch(mode=0o600)
        self.chunks = max(chunks, before_bytes // CHUNK_BYTES)
        take_space(path, self.chunks * CHUNK_BYTES, capacity_bytes=capacity_bytes, restore_bytes=before_bytes)
        self._pages = SlabPages(path, _map(path, self.chunks))

    def write(self, key: bytes, payload: memoryview, chunk_ids: ChunkIdArray) -> int:
        """Store a payload in these chunks; returns its checksum. Raises OSError where the medium is bad."""
        pages, hasher = self._pages, payload_hasher(key)
        pages.bring(chunk_ids, to_write=True)
        mapped = pages.mapped
        source: Bytes = np.frombuffer(payload, dtype=np.uint8)
        for start in range(0, len(chunk_ids), WRITE_PIECE_CHUNKS):
            piece = source[start * CHUNK_BYTES : (start + WRITE_PIECE_CHUNKS) * CHUNK_BYTES]
            hasher.update(piece.data)
            whole, tail_bytes = divmod(len(piece), CHUNK_BYTES)
            ids = chunk_ids[start : start + WRITE_PIECE_CHUNKS]
            if whole == 1:  # without a list of ids, which costs a small object a tenth of its copy
                mapped[ids[0]] = piece[:CHUNK_BYTES]
            elif whole:
                mapped[ids[:whole]] = piece[: whole * CHUNK_BYTES].reshape(whole, CHUNK_BYTES)
            if tail_bytes:
                mapped[ids[whole], :tail_bytes] = piece[whole * CHUNK_BYTES :]
        return hasher.intdigest()

    def read(self, key: bytes, target: memoryview, chunk_ids: ChunkIdArray) -> int:
        """Fill ``target`` from these chunks; returns the checksum of what is there then. Ids that are none read others:
        only a payload that verifies is one. Raises BackendError after ``close``, OSError where the medium is bad."""
        pages, hasher = self._pages, payload_hasher(key)
        mapped = pages.mapped
        if not len(mapped):
            raise BackendError("the backend is closed")
        pages.bring(chunk_ids)
        filled: Bytes = np.frombuffer(target, dtype=np.uint8)
        for start in range(0, len(chunk_ids), READ_PIECE_CHUNKS):
            piece = filled[start * CHUNK_BYTES : (start + READ_PIECE_CHUNKS) * CHUNK_BYTES]
            whole, tail_bytes = divmod(len(piece), CHUNK_BYTES)
            ids = chunk_ids[start : start + READ_PIECE_CHUNKS]
            if whole == 1:
                piece[:CHUNK_BYTES] = mapped[min(ids[0], len(mapped) - 1)]
            elif whole:  # mode clip, since raise copies twice
                out = piece[: whole * CHUNK_BYTES].reshape(whole, CHUNK_BYTES)
                np.take(mapped, ids[:whole], axis=0, out=out, mode="clip")
            if tail_bytes:
                tail = mapped[min(ids[whole], len(mapped) - 1), : max(tail_bytes, FREE_COPY_BYTES)].copy()
                piece[whole * CHUNK_BYTES :] = tail[:tail_bytes]
            hasher.update(piece.data)
        return hasher.intdigest()

    def write_sealed(self, payload: memoryview, chunk_ids: ChunkIdArray, sealer: Sealer) -> None:
        """Store a payload in these chunks, encrypted on its way. Raises as ``write``."""
        pages, source = self._pages, payload.cast("B")
        pages.bring(chunk_ids, to_write=True)
        for number, chunk_id in enumerate(chunk_ids.tolist()):
            piece = source[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            sealer.encrypt_into(piece, pages.mapped[chunk_id].data[: len(piece)])

    def read_sealed(self, target: memoryview, chunk_ids: ChunkIdArray, opener: Opener) -> None:
        """Fill ``target`` from these chunks, decrypted on the way. As ``read`` otherwise."""
        pages, filled = self._pages, target.cast("B")
        mapped = pages.mapped
        if not len(mapped):
            raise BackendError("the backend is closed")
        pages.bring(chunk_ids)
        for number, chunk_id in enumerate(chunk_ids.tolist()):
            piece = filled[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            opener.decrypt_into(mapped[min(chunk_id, len(mapped) - 1)].data[: len(piece)], piece)

    def usable(self, chunk_ids: ChunkIdArray) -> ChunkIdArray:
        """Those that are worth another write: a write has failed in the others, whose medium is bad."""
        return self._pages.usable(chunk_ids)

    def move(self, chunk_ids: ChunkIdArray, to_ids: ChunkIdArray) -> None:
        """Copy chunks to others. Raises OSError where the medium is bad."""
        pages = self._pages
        pages.bring(chunk_ids)
        pages.bring(to_ids, to_write=True)
        mapped = pages.mapped
        for start in range(0, len(chunk_ids), WRITE_PIECE_CHUNKS):
            piece = slice(start, start + WRITE_PIECE_CHUNKS)
            mapped[to_ids[piece]] = mapped[chunk_ids[piece]]

    def grow(self, chunks: int, *, capacity_bytes: int) -> None:
        """More chunks. Raises as when it was opened, and changes nothing then."""
        size_bytes = chunks * CHUNK_BYTES
        before_bytes = self.chunks * CHUNK_BYTES
        take_space(self.path, size_bytes, capacity_bytes=capacity_bytes, restore_bytes=before_bytes)
        try:
            self._pages = SlabPages(self.path, _map(self.path, chunks))
        except BackendError:
            os.truncate(self.path, before_bytes)
            raise
        self.chunks = chunks

    def cut(self, chunks: int) -> None:
        """Give the space of the last chunks back. Nobody may touch them from here on."""
        self._pages = SlabPages(self.path, _map(self.path, chunks))
        self.chunks = chunks
        os.truncate(self.path, chunks * CHUNK_BYTES)

    def close(self) -> None:
        """Unmap. Nobody may be inside."""
        self._pages = SlabPages(self.path, np.empty((0, CHUNK_BYTES), dtype=np.uint8))


def _map(path: Path, chunks: int) -> Bytes:
    size_bytes = chunks * CHUNK_BYTES
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(fd, size_bytes)
    except OSError as error:
        advice = f"it needs {size_bytes} bytes of address space (ulimit -v, LimitAS); nothing stored was touched"
        raise BackendError(f"{path} cannot be mapped: {error}; {advice}") from error
    finally:
        os.close(fd)
    return np.frombuffer(mapping, dtype=np.uint8).reshape(chunks, CHUNK_BYTES)  # keeps the mapping open as it is used
