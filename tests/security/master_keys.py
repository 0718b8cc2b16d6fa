"""Files of master keys, the tenants that have keys below them, and a disk without room for any."""

from __future__ import annotations

import secrets
from hashlib import sha256
from pathlib import Path

from hicache.tenancy import tenant_digest

ALICE, BOB = tenant_digest("alice"), tenant_digest("bob")


def masters(folder: Path, *names: str, file: str = "masters") -> str:
    """A file of master keys, each always the same for its name."""
    path = folder / file
    path.write_text("".join(f"{name} {sha256(name.encode()).hexdigest()}\n" for name in names))
    path.chmod(0o600)
    return str(path)


def random_masters(folder: Path) -> str:
    path = folder / "random"
    path.write_text(f"k1 {secrets.token_hex(32)}\n")
    path.chmod(0o600)
    return str(path)


def disk_full(*_: object) -> None:
    raise OSError(28, "No space left on device")
