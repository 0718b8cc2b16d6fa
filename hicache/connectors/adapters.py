"""LoRA adapters by what is in their files, for engines that know them by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hicache.connectors.checkpoint import fingerprint_adapter


class AdapterIdentities:
    """LoRA adapters by content. Thread-safe; ``close`` ends its one thread.

    vLLM chains the adapter's name and path into its hashes, not what it loaded from there. So the content is hashed in
    the background when an adapter is first seen, and stands as long as its files do not change: from then on nobody can
    say which of the two contents the engine holds, and the adapter is not cached until it has a new ``lora_int_id``.
    """

    def __init__(self, *, read: Callable[[Path], bytes] = fingerprint_adapter) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hicache-adapters")
        self._seen: dict[tuple[int, str, str], tuple[object, Future[bytes]]] = {}

    def identity(self, lora_request: Any) -> bytes | None:
        """32 bytes to mix into the keys of the request; None when it must neither load nor store.

        Stats the adapter's files, reads none of them, and takes no longer than that.
        """
        if lora_request.load_inplace:
            return None  # the content behind this id changes while it is in use
        folder = Path(lora_request.lora_path)
        files = _files_signature(folder)
        if files is None:
            return None  # a name on the hub: what vLLM loaded for it cannot be told here
        key = (lora_request.lora_int_id, lora_request.lora_name, lora_request.lora_path)
        with self._lock:
            if key not in self._seen:
                self._seen[key] = (files, self._pool.submit(self._read, folder))
            first_files, content = self._seen[key]
        if files != first_files or not content.done() or content.cancelled() or content.exception() is not None:
            return None
        return content.result() if _files_signature(folder) == first_files else None

    def close(self) -> None:
        """Read no further adapters; does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _files_signature(folder: Path) -> tuple[tuple[str | int, ...], ...] | None:
    try:
        with os.scandir(folder) as entries:
            stats = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
    except OSError:
        return None
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)
