"""What an operator sets about hicache in SGLang's ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.errors import ConfigError
from hicache.wire.protocol import DEPLOYMENT_CHARS_MAX

DEADLINE_S_DEFAULT = 2.0
DEADLINE_S_MAX = 60.0

# SGLang's own: the class to load, the host memory to take, and what it takes out before a store sees the rest.
_OF_SGLANG = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "tp_lcm_size",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "file_storage_path",
)
_OF_HICACHE = ("l3", "token", "token_file", "salt", "deadline_s", "deployment", "model_revision", "engine_version")


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """One attachment of hicache to an engine.

    ``salt`` and ``token`` are secrets: they are in no namespace descriptor and no log.
    """

    l3: str  # where hicached listens: unix:///path, tls://host:port?ca=FILE or tcp://host:port
    token: str = ""  # the tenant, as hicached's token file has it
    salt: str = ""  # engines with different salts find nothing of each other's
    deadline_s: float = DEADLINE_S_DEFAULT  # of one call of the engine, which asks for at most 128 pages
    deployment: str = ""  # engines that name the same one are refused where they could not share
    model_revision: str = ""  # which weights these are; empty: by what is in the files of the checkpoint
    engine_version: str = ""  # empty: that of SGLang; set it alike to share between releases
    moves_without_copy: bool = False  # interface_v1: pages are read and written where they lie

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None) -> StorageSettings:
        """Raises ConfigError, with what would be right, for names and values that cannot be."""
        given = dict(extra_config or {})
        for name, value in given.items():
            if name not in _OF_SGLANG and name not in _OF_HICACHE:
                raise ConfigError(name, value, _known_names(name))
        for name in _OF_HICACHE:
            if name != "deadline_s" and not isinstance(given.get(name, ""), str):
                raise ConfigError(name, given[name], "a string")
        if not given.get("l3"):
            expected = (
                'where hicached listens, as in "l3": "unix:///run/hicached/hicached.sock" or "tls://host:port?ca=FILE"'
            )
            raise ConfigError("l3", given.get("l3"), expected)
        return cls(
            l3=given["l3"],
            token=_token(given),
            salt=given.get("salt", ""),
            deadline_s=_seconds(given.get("deadline_s", DEADLINE_S_DEFAULT)),
            deployment=_deployment(given.get("deployment", "")),
            model_revision=given.get("model_revision", ""),
            engine_version=given.get("engine_version", ""),
            moves_without_copy=bool(given.get("interface_v1", False)),
        )


def _known_names(name: str) -> str:
    close = difflib.get_close_matches(name, _OF_HICACHE + _OF_SGLANG, n=1)
    meant = f"{close[0]} (did you mean that?), or " if close else ""
    return f"{meant}one of {', '.join(_OF_HICACHE)}, or a name of SGLang's own"


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= DEADLINE_S_MAX:
        expected = (
            f"seconds above 0 and up to {DEADLINE_S_MAX:g}: the engine's storage thread waits so long for one call"
        )
        raise ConfigError("deadline_s", value, expected)
    return float(value)


def _deployment(name: str) -> str:
    if len(name) > DEPLOYMENT_CHARS_MAX or not name.isprintable():
        raise ConfigError("deployment", name, f"at most {DEPLOYMENT_CHARS_MAX} printable characters")
    return name


def _token(given: Mapping[str, Any]) -> str:
    if "token_file" not in given:
        return str(given.get("token", ""))
    if "token" in given:
        raise ConfigError("token_file", given["token_file"], "either token or token_file, not both")
    try:
        return Path(given["token_file"]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("token_file", given["token_file"], f"a file that can be read ({error})") from error
