"""What a file store is opened with, and the url that says it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from hicache.errors import ConfigError

DIRECT_READS = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Written as ``file:///path?shared=1&fsync=1&direct=on``; what has its default is left out."""

    shared: bool = False  # several processes, on one machine or more, use the directory at a time
    fsync: bool = False  # an object is acknowledged when it is on the medium, not when the kernel has it
    direct: str = "auto"  # one of DIRECT_READS: whether objects that no cache holds are read past the page cache

    def __post_init__(self) -> None:
        if self.direct not in DIRECT_READS:
            raise ConfigError("file_direct", self.direct, f"one of {', '.join(DIRECT_READS)}")

    def url(self, path: str) -> str:
        """The address that ``parse_query`` reads back."""
        chosen = {name: "1" for name in _FLAGS if getattr(self, name)}
        if self.direct != "auto":
            chosen["direct"] = self.direct
        return f"file://{path}" + (f"?{urlencode(chosen)}" if chosen else "")


_FLAGS = ("shared", "fsync")


def parse_query(query: str) -> FileSettings:
    """The settings behind the ``?`` of a url. Raises ConfigError with what would be right."""
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        flags = {name: {"0": False, "1": True}[given.pop(name)] for name in _FLAGS if name in given}
    except (KeyError, ValueError) as error:
        raise _unknown(query) from error
    direct = given.pop("direct", "auto")
    if given:
        raise _unknown(query)
    return FileSettings(**flags, direct=direct)


def _unknown(query: str) -> ConfigError:
    return ConfigError("backend", f"?{query}", "file:///path, then ?shared=1, ?fsync=1, ?direct=on or off, joined by &")
