"""The file that says that a directory is a store of ours, of which kind, and whether it was left in order."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from pathlib import Path

import msgspec

from hicache.backends.lock import LOCK_NAME, OPENING_NAME
from hicache.errors import ConfigError

MARKER_NAME = "hicache.store"
MARKER_BYTES = 512
STORE_ID_BYTES = 16
_NOT_CONTENT = frozenset({LOCK_NAME, OPENING_NAME, MARKER_NAME, MARKER_NAME + ".tmp", "lost+found"})
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StoreMarker(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``<directory>/hicache.store``."""

    kind: str  # "lmdb" or "file"
    version: int  # of the layout on the medium
    store_id: str  # hexadecimal; a store that was emptied has another one
    boot_id: str  # of the boot during which it was last opened all the way
    is_clean: bool  # closed, with everything on the medium

    def survived(self) -> bool:
        """Whether all that was written is there: flushed by a clean close, or still in this boot's page cache."""
        return self.is_clean or (self.boot_id != "" and self.boot_id == current_boot_id())


def new_marker(kind: str, version: int) -> StoreMarker:
    """A marker for a store that starts empty."""
    store_id = secrets.token_hex(STORE_ID_BYTES)
    return StoreMarker(kind=kind, version=version, store_id=store_id, boot_id=current_boot_id(), is_clean=False)


def read_marker(directory: Path, *, kind: str, versions: Collection[int]) -> StoreMarker | None:
    """The marker of a directory; None for one that is empty. ``versions`` are those that can be read as they are.

    Raises ConfigError for a directory that holds something else, so that nothing foreign is ever touched.
    """
    marker = read_any_marker(directory)
    if marker is None:
        return None
    if marker.kind != kind or marker.version not in versions:
        wanted = f"a store of kind {kind} version {' or '.join(map(str, versions))}"
        found = f"but it is {marker.kind} version {marker.version}"
        raise ConfigError("path", str(directory), f"{wanted}, {found}; {_way_out(marker, kind, max(versions))}")
    return marker


def read_any_marker(directory: Path) -> StoreMarker | None:
    """As ``read_marker``, of a store of any kind and version."""
    try:
        raw = (directory / MARKER_NAME).read_bytes()
    except FileNotFoundError:
        _require_empty(directory)
        return None
    try:
        marker = msgspec.json.decode(raw, type=StoreMarker)
        bytes.fromhex(marker.store_id)
    except (msgspec.DecodeError, ValueError) as error:
        expected = f"a directory whose {MARKER_NAME} can be read ({error}); empty the directory to start afresh"
        raise ConfigError("path", str(directory), expected) from error
    return marker


def _way_out(marker: StoreMarker, kind: str, newest: int) -> str:
    if marker.kind != kind:
        return f"set backend = {marker.kind!r}, or choose another directory, or empty this one"
    if marker.version > newest:
        return "it was written by a newer hicache: run that one, or choose another directory, or empty this one"
    return "no hicache that can still be run reads it: choose another directory, or empty this one"


def write_marker(directory: Path, marker: StoreMarker) -> None:
    """Replace the marker; it is on the medium when this returns.

    Written over in place, within one sector: that needs no space, so it works on a full disk, and it cannot tear.
    """
    raw = msgspec.json.encode(marker).ljust(MARKER_BYTES - 1) + b"\n"
    assert len(raw) == MARKER_BYTES
    path = directory / MARKER_NAME
    if not path.exists():
        _create(path, raw)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, raw, 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _create(path: Path, raw: bytes) -> None:
    """Make the marker appear whole."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, raw)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)


def current_boot_id() -> str:
    """What the kernel calls this boot; empty when it does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def has_content(directory: Path) -> bool:
    """Whether there is anything in it but locks and a marker."""
    return bool(_content(directory))


def _content(directory: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(directory) if entry.name not in _NOT_CONTENT)


def _require_empty(directory: Path) -> None:
    if foreign := _content(directory):
        expected = (
            f"an empty directory, or one made by hicache (this one holds {', '.join(foreign[:3])}, no {MARKER_NAME})"
        )
        raise ConfigError("path", str(directory), expected)
