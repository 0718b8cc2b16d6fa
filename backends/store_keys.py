"""Whether the objects of a store are encrypted, and with what: decided when it is made, and the same ever after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.backends.tenant_keys import TenantKeys

KEYS_NAME = "keys"


def is_sealed(directory: Path) -> bool:
    """Whether what lies in a store is encrypted."""
    return (directory / KEYS_NAME).is_dir()


def open_keys(directory: Path, masters_file: str, *, is_empty: Callable[[], bool]) -> TenantKeys | None:
    """The keys of a store that its owner holds; None for one whose objects are stored as they come.

    Raises ConfigError for a store that is encrypted when it should not be, or the other way round, and for keys that do
    not fit it.
    """
    if not masters_file:
        if is_sealed(directory):
            expected = f"the file with the master keys of {directory}, whose objects are encrypted"
            raise ConfigError("encryption_keys", masters_file, expected)
        return None
    try:
        from hicache.backends.tenant_keys import MasterKeys, TenantKeys
    except ModuleNotFoundError as error:
        raise ConfigError("encryption_keys", masters_file, "`pip install hicache[crypto]` beside it") from error
    if not is_sealed(directory) and not is_empty():
        expected = f'"", or an empty directory: what lies in {directory} is not encrypted, and would stay so'
        raise ConfigError("encryption_keys", masters_file, expected)
    return TenantKeys(directory / KEYS_NAME, MasterKeys.read(masters_file))
