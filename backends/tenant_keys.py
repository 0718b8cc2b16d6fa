"""The keys of tenants, in the folder of their store, wrapped by a master key that is kept elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import threading
from pathlib import Path
from typing import Self

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hicache.backends.sealing import DATA_KEY_BYTES, Sealing
from hicache.errors import ConfigError

MASTERS_MAX = 64
MASTERS_FILE_BYTES_MAX = 64 * 1024
KEY_FILE_BYTES_MAX = 512
MASTER_DISTINCT_MIN = 8

_SUFFIX, _DROPPED, _NEW = ".key", ".dropped", ".new"
_NONCE_BYTES = 12
_MASTER = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})\s+([0-9a-f]{64})")
_PURPOSE = b"hicache.tenant key.1"


class _KeyFile(msgspec.Struct, frozen=True):
    """Content of ``keys/<tenant digest>.key``."""

    master: str  # name of the master key
    wrapped: str  # hexadecimal: nonce, and the key of the tenant under AES-256-GCM, bound to the tenant


class MasterKeys:
    """By name; the first one wraps, the others only unwrap what they wrapped."""

    def __init__(self, by_name: dict[str, bytes]) -> None:
        self._by_name = by_name
        self.current = next(iter(by_name))

    @classmethod
    def read(cls, file: str) -> Self:
        """Lines of a name and 64 hex digits, the current one first. Raises ConfigError, which quotes no key."""
        try:
            with open(file, encoding="ascii") as source:
                mode = os.fstat(source.fileno()).st_mode
                text = source.read(MASTERS_FILE_BYTES_MAX + 1)
        except (OSError, UnicodeDecodeError) as error:
            expected = f"a text file that can be read ({type(error).__name__})"
            raise ConfigError("encryption_keys", file, expected) from error
        if stat.S_ISREG(mode) and mode & stat.S_IRWXO:
            raise ConfigError("encryption_keys", file, f"a file that not everybody can open: chmod o= {file}")
        by_name: dict[str, bytes] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = _MASTER.fullmatch(line.strip())
            if match is None or match[1] in by_name:
                expected = "a name of its own and 64 hex digits, as `openssl rand -hex 32` makes them"
                raise ConfigError(f"encryption_keys {file} line {number}", "(not shown)", expected)
            by_name[match[1]] = bytes.fromhex(match[2])
            if len(set(by_name[match[1]])) < MASTER_DISTINCT_MIN:
                raise ConfigError(f"encryption_keys {file} line {number}", "(not shown)", "a key made at random")
        if not 1 <= len(by_name) <= MASTERS_MAX or len(text) > MASTERS_FILE_BYTES_MAX:
            expected = f"1 to {MASTERS_MAX} lines of a name and a key, {MASTERS_FILE_BYTES_MAX} bytes at most"
            raise ConfigError("encryption_keys", file, expected)
        return cls(by_name)

    def wrap(self, tenant: bytes, data_key: bytes) -> bytes:
        """Content of the file of a tenant's key."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        wrapped = nonce + AESGCM(self._by_name[self.current]).encrypt(nonce, data_key, _PURPOSE + tenant)
        return msgspec.json.encode(_KeyFile(self.current, wrapped.hex()))

    def unwrap(self, tenant: bytes, raw: bytes) -> tuple[bytes, bool]:
        """The key, and whether the current master key has wrapped it.

        Raises KeyError for a master key that is not there, ValueError for what none of them has wrapped.
        """
        try:
            file = msgspec.json.decode(raw, type=_KeyFile)
            wrapped = bytes.fromhex(file.wrapped)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError("it is damaged") from error
        master = AESGCM(self._by_name[file.master])
        try:
            data_key = master.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], _PURPOSE + tenant)
        except InvalidTag as error:
            raise ValueError(
                f"the master key {file.master!r} is another one than the one of that name that wrapped it"
            ) from error
        if len(data_key) != DATA_KEY_BYTES:
            raise ValueError("it has no key")
        return data_key, file.master == self.current


class TenantKeys:
    """Implements ``DataKeys``. Made for a store that its owner holds. Thread-safe.

    ``<digest>.key`` in its folder for each tenant. A key is on the medium before it encrypts anything. When it is
    dropped, its file is renamed first: whatever happens after that, no start takes it again.
    """

    def __init__(self, folder: Path, masters: MasterKeys) -> None:
        """Unwraps all keys, and wraps those of former master keys anew. Raises ConfigError where one does not unwrap:
        with the wrong master key nothing is touched.
        """
        self._folder = folder
        self._masters = masters
        self._lock = threading.Lock()
        self._keys: dict[bytes, bytes] = {}
        try:
            self._load()
        except OSError as error:
            raise ConfigError(
                "path", str(self._folder), f"a folder of keys that can be read and written ({error})"
            ) from error

    def sealing(self) -> Sealing:
        """What encrypts and decrypts with these keys."""
        return Sealing(self)

    def find(self, tenant: bytes) -> bytes | None:
        """See ``DataKeys.find``."""
        return self._keys.get(tenant)

    def find_or_make(self, tenant: bytes) -> bytes:
        """See ``DataKeys.find_or_make``."""
        if (found := self._keys.get(tenant)) is not None:
            return found
        with self._lock:
            if (found := self._keys.get(tenant)) is not None:
                return found
            data_key = secrets.token_bytes(DATA_KEY_BYTES)
            self._write(tenant, data_key)
            self._keys[tenant] = data_key
            return data_key

    def drop(self, tenant: bytes) -> bool:
        """Nobody reads what was stored for this tenant, from here on and after any crash. False: it has no key.

        Raises OSError where that cannot be written down; then it is read by nobody until the end of the process, and
        another drop goes on where this one failed.
        """
        with self._lock:
            was_known = self._keys.pop(tenant, None) is not None
            file = self._file(tenant)
            dropped = file.with_suffix(_DROPPED)
            with contextlib.suppress(FileNotFoundError):
                file.rename(dropped)
            if not dropped.exists():
                return was_known
            self._sync_folder()
            _shred(dropped)
            self._sync_folder()
            return True

    def _load(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        _sync(self._folder.parent)
        for file in sorted(self._folder.iterdir()):
            if file.suffix == _DROPPED:
                _shred(file)
            elif file.suffix == _NEW:
                file.unlink()
            elif file.suffix == _SUFFIX:
                self._take(file)
        self._sync_folder()

    def _take(self, file: Path) -> None:
        try:
            tenant = bytes.fromhex(file.stem)
            with file.open("rb") as source:
                data_key, is_current = self._masters.unwrap(tenant, source.read(KEY_FILE_BYTES_MAX + 1))
        except KeyError as error:
            expected = f"a file with the master key {error.args[0]!r}, which has wrapped {file}"
            raise ConfigError("encryption_keys", self._masters.current, expected) from error
        except ValueError as error:
            expected = f"a key in {file} ({error}); removing the file gives up what its tenant has stored"
            raise ConfigError("encryption_keys", self._masters.current, expected) from error
        if not is_current:
            self._write(tenant, data_key)
        self._keys[tenant] = data_key

    def _write(self, tenant: bytes, data_key: bytes) -> None:
        """Durable when this returns."""
        file = self._file(tenant)
        new = file.with_suffix(_NEW)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, self._masters.wrap(tenant, data_key))
            os.fsync(fd)
        finally:
            os.close(fd)
        new.rename(file)
        self._sync_folder()

    def _file(self, tenant: bytes) -> Path:
        return self._folder / f"{tenant.hex()}{_SUFFIX}"

    def _sync_folder(self) -> None:
        _sync(self._folder)


def _shred(file: Path) -> None:
    """Write over, as far as the file system does that in place, and remove."""
    with contextlib.suppress(OSError):
        fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, bytes(KEY_FILE_BYTES_MAX), 0)
            os.fdatasync(fd)
        finally:
            os.close(fd)
    file.unlink()


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
