"""The error tree: what can be wrong (expected outcomes, such as a miss, are values: see outcome.py).

HiCacheError
├── ConfigError          a setting is unknown, malformed or contradicts another: stops start-up
│   └── SpecError        a CacheSpec, group or field describes something that cannot exist
├── UsageError           the engine called the API in a way that would corrupt: refused before anything changed
│   ├── HandleError      a released, stale or foreign handle was used
│   └── StateNotCommitted  a snapshot was asked for where the state is not at a committed boundary
├── AdminRefused         hicached did not do what it was asked for over its admin API, and says why
├── DaemonUnreachable    no hicached answers at an admin address
├── RankLost             a rank and its leader have lost each other: the replica has to be started again
└── BackendError         a backend cannot be opened or can no longer be used at all
    ├── StorageInUse     another live process owns the directory or the socket
    └── ReloadHangs      a reload of hicached was given up: the settings are as before
"""

from __future__ import annotations

from typing import Any


class HiCacheError(Exception):
    """Base of every error that hicache raises on purpose. May be raised in another process than it is caught in."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class ConfigError(HiCacheError):
    """A setting stops start-up. Names the setting, its value, and what would be right."""

    def __init__(self, setting: str, value: object, expected: str) -> None:
        super().__init__(f"{setting} = {value!r}: expected {expected}")
        self.setting = setting
        self.value = value
        self.expected = expected


class SpecError(ConfigError):
    """A cache description is impossible or contradicts itself."""


class UsageError(HiCacheError):
    """A call that would have corrupted something was refused; nothing changed."""


class HandleError(UsageError):
    """A handle was released twice, is stale, or belongs to something else."""


class StateNotCommitted(UsageError):
    """The live state is not at a committed page boundary, so no snapshot of it may exist."""


class AdminRefused(HiCacheError):
    """hicached refused a verb of its admin API, in its own words. ``status`` is that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class DaemonUnreachable(HiCacheError):
    """Nobody answers at the address of an admin API."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"hicached at {address} cannot be asked: {why}")
        self.address = address


class RankLost(HiCacheError):
    """A worker and its leader have lost each other, or the worker was closed: it takes no step any more."""


class BackendError(HiCacheError):
    """A backend cannot be opened, or is broken as a whole."""


class StorageInUse(BackendError):
    """Another live process holds the directory or the socket."""

    def __init__(self, resource: str, holder: str) -> None:
        super().__init__(f"{resource} is in use by {holder}; stop it or choose another one")
        self.resource = resource
        self.holder = holder


class ReloadHangs(BackendError):
    """A reload was given up, since something in it does not answer: all settings are as before."""


def _rebuilt(kind: type[HiCacheError], args: tuple[Any, ...], values: dict[str, Any]) -> HiCacheError:
    """An error as it was, without its constructor, whose arguments are not those of ``Exception``."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(values)
    return error
