"""Every kind of store that hicached can have, over a backend that fails on command and a medium that can be damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hicache.backends.base import Backend
from hicache.backends.faulty import FaultyBackend, FaultySharedBackend
from hicache.backends.file_settings import FileSettings
from hicache.backends.file_shared import SharedFileBackend
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.ram_tier import SharedRamTier
from hicache.backends.shared_store import SharedBackend, SharedStore
from hicache.backends.store import ObjectStore
from hicache.backends.tenant_keys import TenantKeys
from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.config import DaemonConfig
from hicache.daemon.recovery import OpenedStore
from hicache.daemon.store_look import StoreLook
from tests.backends.fake_mooncake import FakeMooncake, open_fake
from tests.security.master_keys import masters

MIB = 1 << 20
STORES = ("lmdb", "lmdb sealed", "file", "file sealed", "file shared", "mooncake", "mooncake with RAM tier")


def process_settings(store: str, folder: Path) -> dict[str, object]:
    """The settings of a daemon process with such a store."""
    settings: dict[str, object] = {"backend": store.split(maxsplit=1)[0]}
    if store.endswith("sealed"):
        settings["encryption_keys"] = masters(folder, "master")
    if store.endswith("shared"):
        settings["file_shared"] = "true"
    return settings


class StoreOpener:
    """Opens one of ``STORES`` for a daemon. ``faults`` has the backend that fails on command."""

    def __init__(self, store: str) -> None:
        self._name = store
        self._fake = FakeMooncake()
        self._folder = Path()
        self._before: dict[Path, bytes] = {}
        self.faults: FaultyBackend

    def __call__(self, config: DaemonConfig, limits: StoreLimits) -> OpenedStore:
        self._folder = Path(config.path)
        store = self._shared_store(config) if self._is_shared else self._own_store(config, limits)
        return OpenedStore(store, store.store_id, StoreLook.at(store))

    @property
    def _is_shared(self) -> bool:
        return self._name in ("file shared", "mooncake", "mooncake with RAM tier")

    def _own_store(self, config: DaemonConfig, limits: StoreLimits) -> ObjectStore:
        keys = masters(self._folder.parent, "master") if self._name.endswith("sealed") else ""
        backend, tenant_keys = self._own_backend(config.capacity_bytes, keys)
        self.faults = FaultyBackend(backend)
        return ObjectStore(
            self.faults,
            object_bytes_max=config.object_bytes_max,
            free_space_floor_bytes=0,
            limits=limits,
            keys=tenant_keys,
        )

    def _own_backend(self, capacity_bytes: int, keys: str) -> tuple[Backend, TenantKeys | None]:
        if self._name.startswith("lmdb"):
            lmdb = LmdbBackend.open(self._folder, capacity_bytes=capacity_bytes, encryption_keys=keys)
            return lmdb, lmdb.keys
        files = FileBackend.open(self._folder, capacity_bytes=capacity_bytes, encryption_keys=keys)
        return files, files.keys

    def _shared_store(self, config: DaemonConfig) -> SharedStore:
        backend: SharedBackend
        if self._name == "file shared":
            settings = FileSettings(shared=True)
            backend = SharedFileBackend.open(
                self._folder,
                capacity_bytes=config.capacity_bytes,
                settings=settings,
                watermarks=(0.9, 0.95),
                floor_bytes=0,
            )
        else:
            backend = open_fake(self._fake)
        faults = FaultySharedBackend(backend)
        self.faults = faults
        tier = SharedRamTier(faults, capacity_bytes=64 * MIB) if self._name.endswith("tier") else faults
        return SharedStore(tier, object_bytes_max=config.object_bytes_max)

    def remember(self) -> None:
        """What lies on the medium before the object that is going to be damaged."""
        self._before = dict(self._fake.values) if self._name.startswith("mooncake") else self._files()  # type: ignore[assignment]  # by name or path

    def flip_bit(self) -> None:
        """Change one bit in the middle of what has come since ``remember``."""
        self._damage(lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 0x10]) + raw[len(raw) // 2 + 1 :])

    def cut(self) -> bool:
        """Take the second half of it away; False for a medium that is one mapped file of fixed size."""
        if self._name.startswith("lmdb"):
            return False
        self._damage(lambda raw: raw[: len(raw) // 2])
        return True

    def _damage(self, change: Callable[[bytes], bytes]) -> None:
        if self._name.startswith("mooncake"):
            [name] = self._fake.values.keys() - self._before.keys()  # type: ignore[operator]  # of the same kind
            self._fake.values[name] = change(self._fake.values[name])
            return
        path, begin, end = self._newest_extent()
        raw = path.read_bytes()
        changed = change(raw[begin:end])
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(changed)
            if len(changed) < end - begin:
                file.truncate()

    def _newest_extent(self) -> tuple[Path, int, int]:
        """Where the most bytes have changed."""
        extents = []
        for path, raw in self._files().items():
            before = self._before.get(path, b"").ljust(len(raw), b"\0")
            begin, end = _differing(before, raw)
            extents.append((end - begin, path, begin, end))
        _, path, begin, end = max(extents)
        return path, begin, end

    def _files(self) -> dict[Path, bytes]:
        return {
            path: path.read_bytes()
            for path in self._folder.rglob("*")
            if path.is_file() and path.suffix != ".mdb" and path.stat().st_size > 4096
        }


def _differing(before: bytes, after: bytes) -> tuple[int, int]:
    """From the first to behind the last byte that differs; by blocks, since most of a slab is equal."""
    block = 4096
    changed = [at for at in range(0, len(after), block) if before[at : at + block] != after[at : at + block]]
    return (changed[0], min(changed[-1] + block, len(after))) if changed else (0, 0)
