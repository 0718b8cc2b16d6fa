"""The one place that chooses a backend, and the layer over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hicache.backends.base import Backend
from hicache.backends.file_settings import FileSettings, parse_query
from hicache.backends.ram_tier import SharedRamTier
from hicache.backends.shared_store import SharedBackend, SharedStore
from hicache.backends.space import require_floor
from hicache.backends.store import FREE_SPACE_FLOOR_BYTES, ObjectStore
from hicache.backends.tenant_limits import StoreLimits
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.backends.file_store import FileBackend
    from hicache.backends.lmdb_store import LmdbBackend

BACKEND_SCHEMES = ("lmdb", "file")  # in a directory of this machine
MOONCAKE_PREFIX = "mooncake://"


def open_store(
    url: str,
    *,
    capacity_bytes: int,
    object_bytes_max: int,
    high_watermark: float = 0.95,
    low_watermark: float = 0.90,
    free_space_floor_bytes: int = FREE_SPACE_FLOOR_BYTES,
    objects_max: int = 0,
    limits: StoreLimits | None = None,
    encryption_keys: str = "",
) -> ObjectStore | SharedStore:
    """Open the backend at ``url`` under what keeps it in bounds: ours, or its own where it is shared and evicts itself.

    ``encryption_keys`` is a file (backends/tenant_keys.py); a store that others share cannot be encrypted.

    Raises what ``open_backend`` raises, and ConfigError for limits that contradict each other.
    """
    shared = _open_shared(
        url,
        capacity_bytes=capacity_bytes,
        floor_bytes=free_space_floor_bytes,
        watermarks=(low_watermark, high_watermark),
    )
    if shared is not None:
        try:
            return SharedStore(shared, object_bytes_max=object_bytes_max)
        except BaseException:
            shared.close()
            raise
    backend = _open_own(url, capacity_bytes, free_space_floor_bytes, encryption_keys)
    try:
        return ObjectStore(
            backend,
            object_bytes_max=object_bytes_max,
            high_watermark=high_watermark,
            low_watermark=low_watermark,
            free_space_floor_bytes=free_space_floor_bytes,
            objects_max=objects_max,
            limits=limits,
            keys=backend.keys,
        )
    except BaseException:
        backend.close()
        raise


def open_backend(
    url: str, *, capacity_bytes: int, free_space_floor_bytes: int = 0, encryption_keys: str = ""
) -> Backend:
    """Open ``lmdb:///path`` or ``file:///path``, making the store when there is none, or join ``mooncake://host:port``.

    A Mooncake store has the capacity of its nodes, and is not encrypted. ``free_space_floor_bytes`` is what taking
    space must leave. Raises ConfigError for anything that stops start-up (unknown scheme, foreign directory, no room),
    StorageInUse when another process, or this one, has it open, BackendError when the store cannot be read.
    """
    shared = _open_shared(url, capacity_bytes=capacity_bytes, floor_bytes=free_space_floor_bytes)
    return shared if shared is not None else _open_own(url, capacity_bytes, free_space_floor_bytes, encryption_keys)


def _open_own(url: str, capacity_bytes: int, floor_bytes: int, encryption_keys: str) -> LmdbBackend | FileBackend:
    scheme, directory, settings = _parse(url)
    try:
        return _open(scheme, directory, settings, capacity_bytes, floor_bytes, encryption_keys)
    except OSError as error:
        raise _not_writable(directory, error) from error


def _parse(url: str) -> tuple[str, Path, FileSettings]:
    """Scheme, directory, and settings for files."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in BACKEND_SCHEMES:
        expected = " or ".join(f"{name}:///absolute/path" for name in BACKEND_SCHEMES)
        raise ConfigError("backend", url, f"{expected} or {MOONCAKE_PREFIX}host:port")
    path, mark, query = rest.partition("?")
    if not path.startswith("/") or "#" in rest or (mark and scheme != "file"):
        raise ConfigError("backend", url, f"{scheme}:// followed by an absolute path without ? and #")
    return scheme, Path(path), parse_query(query)


def _open(
    scheme: str, directory: Path, settings: FileSettings, capacity_bytes: int, floor_bytes: int, encryption_keys: str
) -> LmdbBackend | FileBackend:
    if scheme == "lmdb":
        from hicache.backends.lmdb_store import LmdbBackend

        return LmdbBackend.open(
            directory, capacity_bytes=capacity_bytes, floor_bytes=floor_bytes, encryption_keys=encryption_keys
        )
    from hicache.backends.file_store import FileBackend

    backend = FileBackend.open(
        directory, capacity_bytes=capacity_bytes, settings=settings, encryption_keys=encryption_keys
    )
    try:
        require_floor(directory, floor_bytes)
    except BaseException:
        backend.close()
        raise
    return backend


def _open_shared(
    url: str, *, capacity_bytes: int, floor_bytes: int, watermarks: tuple[float, float] = (0.90, 0.95)
) -> SharedBackend | None:
    """A backend that others use, too: a Mooncake store, or a folder; None for all else."""
    if url.startswith(MOONCAKE_PREFIX):
        return _open_mooncake(url)
    _, directory, settings = _parse(url)
    if not settings.shared:
        return None
    from hicache.backends.file_shared import SharedFileBackend

    try:
        return SharedFileBackend.open(
            directory, capacity_bytes=capacity_bytes, settings=settings, watermarks=watermarks, floor_bytes=floor_bytes
        )
    except OSError as error:
        raise _not_writable(directory, error) from error


def _not_writable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError("path", str(directory), f"a directory that can be written ({error})")


def _open_mooncake(url: str) -> SharedBackend:
    from hicache.backends.mooncake_settings import parse_url
    from hicache.backends.mooncake_store import MooncakeBackend

    settings = parse_url(url)
    store = MooncakeBackend.open(settings)
    if not settings.ram_bytes:
        return store
    try:
        return SharedRamTier(store, capacity_bytes=settings.ram_bytes)
    except (OSError, OverflowError) as error:
        store.close()
        raise ConfigError("mooncake_ram_bytes", settings.ram_bytes, f"less than there is ({error})") from error
