"""Sizes, rates, ages and times as people write and read them."""

from __future__ import annotations

import re
import time

from hicache.daemon.settings import size
from hicache.errors import ConfigError

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGE_S_MAX = 36_500 * 86_400  # a century: times beyond it are none that a file or a clock takes
_parse_size = size(0)


def parse_rate(name: str, text: str) -> int:
    """Bytes a second of ``200MiB/s``, ``200MiB`` or a number. Raises ConfigError."""
    return parse_size(name, text.removesuffix("/s"))


def parse_size(name: str, text: str) -> int:
    """Bytes. Raises ConfigError."""
    found = _parse_size(name, text)
    assert isinstance(found, int)
    return found


def parse_age(name: str, text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m``, ``12h`` or ``7d``. Raises ConfigError."""
    match = _AGE.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match is not None else _AGE_S_MAX + 1
    if seconds > _AGE_S_MAX:
        raise ConfigError(name, text, "a number with s, m, h or d, such as 10m or 7d, at most 36500d")
    return seconds


def size_text(size_bytes: float) -> str:
    """Three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"


def age_text(at_s: float, now_s: float) -> str:
    """How long ago, in one unit."""
    seconds = max(0.0, now_s - at_s)
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit} ago"
    return f"{seconds:.0f}s ago"


def time_text(at_s: float) -> str:
    """A moment in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
