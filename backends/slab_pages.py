"""Pages of a mapped file are asked for before they are touched: a bad one would end the process that touches it."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicache.backends.lmdb_layout import CHUNK_BYTES, ChunkIdArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Since Linux 5.14, and not in `mmap`: madvise(2). They fail where touching the pages would be a SIGBUS.
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
EHWPOISON = 133  # not in `errno`
_madvise = ctypes.CDLL(None, use_errno=True).madvise  # `mmap.madvise` keeps the GIL while the medium is waited for
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SlabPages:
    """Each chunk of a mapping is asked for once, before it is first read or written. Thread-safe.

    What has been brought is in memory, or could be brought once: a sector that goes bad after that ends the process
    that touches it, and is an error to the one that is started next.
    """

    def __init__(self, path: Path, mapped: NDArray[np.uint8]) -> None:
        """``mapped``: [chunks, CHUNK_BYTES], of the file ``path``."""
        self._path = path
        self.mapped = mapped  # kept, so that the address stays good
        self._address = mapped.ctypes.data
        self._is_brought: NDArray[np.bool_] = np.zeros(len(mapped), dtype=np.bool_)
        self._is_dead = np.zeros_like(self._is_brought)

    def usable(self, chunk_ids: ChunkIdArray) -> ChunkIdArray:
        """Those that are not known to be dead, for good: nothing can be written there."""
        return chunk_ids[~self._is_dead.take(chunk_ids, mode="clip")] if self._is_dead.any() else chunk_ids

    def bring(self, chunk_ids: ChunkIdArray, *, to_write: bool = False) -> None:
        """Raises OSError where the medium cannot bring a page of these chunks. Ids that are none count as the last one.

        With ``to_write``, what such a chunk held is of no account: it is zeroed past the mapping, so that the medium
        puts another sector in the place of a bad one, and fails only if that cannot be written either.
        """
        is_brought = self._is_brought.take(chunk_ids, mode="clip")
        if is_brought.all():
            return
        for chunk_id in np.minimum(chunk_ids[~is_brought], len(self._is_brought) - 1).tolist():
            if not self._populate(chunk_id, MADV_POPULATE_WRITE if to_write else MADV_POPULATE_READ):
                self._is_dead[chunk_id] = to_write and not self._is_revived(chunk_id)
                if not to_write or self._is_dead[chunk_id]:
                    raise OSError(errno.EIO, f"the medium cannot bring chunk {chunk_id}", str(self._path))
            self._is_brought[chunk_id] = True

    def _is_revived(self, chunk_id: int) -> bool:
        try:
            self._zero(chunk_id)
        except OSError:
            return False
        return self._populate(chunk_id, MADV_POPULATE_WRITE)

    def _populate(self, chunk_id: int, advice: int) -> bool:
        """Whether its pages can be touched. An older kernel cannot say, and then they are."""
        failed = _madvise(self._address + chunk_id * CHUNK_BYTES, CHUNK_BYTES, advice)
        return not failed or ctypes.get_errno() not in (errno.EFAULT, EHWPOISON)

    def _zero(self, chunk_id: int) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, bytes(CHUNK_BYTES), chunk_id * CHUNK_BYTES)
            os.fdatasync(fd)
        finally:
            os.close(fd)
