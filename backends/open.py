"""The one place that chooses a backend."""

from __future__ import annotations

from pathlib import Path

from hicache.backends.base import Backend
from hicache.errors import ConfigError

BACKEND_SCHEMES = ("lmdb", "file")


def open_backend(url: str, *, capacity_bytes: int) -> Backend:
    """Open ``lmdb:///path`` or ``file:///path``, making the store when there is none.

    Raises ConfigError for anything that stops start-up (unknown scheme, foreign directory, no room), StorageInUse when
    another process, or this one, has it open, BackendError when the store cannot be read.
    """
    scheme, separator, path = url.partition("://")
    if not separator or scheme not in BACKEND_SCHEMES:
        expected = " or ".join(f"{name}:///absolute/path" for name in BACKEND_SCHEMES)
        raise ConfigError("backend", url, expected)
    if not path.startswith("/") or "?" in path or "#" in path:
        raise ConfigError("backend", url, f"{scheme}:// followed by an absolute path without ? and #")
    try:
        return _open(scheme, Path(path), capacity_bytes)
    except OSError as error:
        raise ConfigError("path", path, f"a directory that can be written ({error})") from error


def _open(scheme: str, directory: Path, capacity_bytes: int) -> Backend:
    if scheme == "lmdb":
        from hicache.backends.lmdb_store import LmdbBackend

        return LmdbBackend.open(directory, capacity_bytes=capacity_bytes)
    from hicache.backends.file_store import FileBackend

    return FileBackend.open(directory, capacity_bytes=capacity_bytes)
