"""How one setting is read: from TOML or from a flag, into a checked value, or into an error that says what is right."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hicache.backends.mooncake_settings import split_address
from hicache.errors import ConfigError

Parser: TypeAlias = Callable[[str, object], object]

CREDENTIAL = "credential:"

UNIX_PATH_BYTES_MAX = 100  # the kernel takes 107; the memory socket's name is a little longer than the main one

_UNITS = {"": 1, "B": 1}
_UNITS |= {prefix + "iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_UNITS |= {prefix + "B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T", "P"), start=1)}
_UNITS["KB"] = 1000
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_MAX_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class HostPort:
    """A TCP address. ``host`` is a literal IP address; port 0 asks the kernel for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Address: TypeAlias = HostPort | str | None  # a TCP address, the path of a Unix socket, or off


def text(name: str, value: object) -> str:
    """Any string without NUL."""
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(name, value, "a string")
    return value


def choice(*allowed: str) -> Parser:
    """One of a few words."""

    def parse(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ConfigError(name, value, f"one of {', '.join(allowed)}")
        return value

    return parse


def flag(name: str, value: object) -> bool:
    """Yes or no: a boolean, or ``true`` and ``false`` as text."""
    known = {True: True, False: False, "true": True, "false": False}
    if not isinstance(value, bool | str) or value not in known:
        raise ConfigError(name, value, "true or false")
    return known[value]


def file_path(name: str, value: object) -> str:
    """A path, made absolute; empty stays empty."""
    path = text(name, value)
    return os.path.abspath(path) if path else ""


def secret_file(name: str, value: object) -> str:
    """A path as ``file_path``, or ``credential:NAME``: what the service manager passed under that name.

    That is a file in the folder that $CREDENTIALS_DIRECTORY names (LoadCredential=, LoadCredentialEncrypted=).
    """
    given = text(name, value)
    credential = given.removeprefix(CREDENTIAL)
    if credential == given:
        return file_path(name, value)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", credential):
        raise ConfigError(name, value, f"a path, or {CREDENTIAL} and the name in LoadCredential=, such as tenants")
    return given


def find_credential(name: str, value: str, environment: Mapping[str, str]) -> str:
    """The path of the file that a setting of ``secret_file`` means. Raises ConfigError where nothing was passed."""
    credential = value.removeprefix(CREDENTIAL)
    if credential == value:
        return value
    folder = environment.get("CREDENTIALS_DIRECTORY", "")
    path = os.path.join(folder, credential)
    if not folder or not os.path.isfile(path):
        had = ", ".join(sorted(os.listdir(folder))) if os.path.isdir(folder) else "none"
        expected = f"LoadCredential={credential}:/path/of/the/file in the unit; the credentials are: {had}"
        raise ConfigError(name, value, expected)
    return path


def required_path(name: str, value: object) -> str:
    """A path that must be given, made absolute."""
    path = file_path(name, value)
    if not path:
        raise ConfigError(name, value, "a path")
    return path


def socket_path(name: str, value: object) -> str:
    """The path of a Unix socket, short enough for the kernel."""
    path = required_path(name, value)
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(name, value, f"a path of at most {UNIX_PATH_BYTES_MAX} bytes, as Unix sockets need")
    return path


def count(minimum: int, maximum: int) -> Parser:
    """A whole number within bounds."""

    def parse(name: str, value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise ConfigError(name, value, f"a whole number from {minimum} to {maximum}")
        return value

    return parse


def size(minimum: int, maximum: int = _MAX_BYTES) -> Parser:
    """Bytes: a whole number, or text such as ``10GiB``, ``1.5 MiB`` or ``500MB``."""

    def parse(name: str, value: object) -> int:
        parsed = _parse_size(value)
        if parsed is None or not minimum <= parsed <= maximum:
            span = f"from {minimum} to {maximum}" if maximum < _MAX_BYTES else f"of at least {minimum}"
            raise ConfigError(name, value, f"a size {span} bytes, such as 10GiB")
        return parsed

    return parse


def _parse_size(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if not isinstance(value, str):
        return None
    match = _SIZE.fullmatch(value.strip())
    if match is None or match[2] not in _UNITS or len(match[1]) > 20:
        return None
    number, unit = match[1], _UNITS[match[2]]
    return int(float(number) * unit) if "." in number else int(number) * unit


def number(minimum: float, maximum: float) -> Parser:
    """A finite number within bounds."""

    def parse(name: str, value: object) -> float:
        try:
            parsed = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except ValueError:
            parsed = math.nan
        if not minimum <= parsed <= maximum:
            raise ConfigError(name, value, f"a number from {minimum:g} to {maximum:g}")
        return parsed

    return parse


def file_mode(name: str, value: object) -> str:
    """Permission bits in octal, such as ``0600``."""
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise ConfigError(name, value, 'permission bits in octal as a string, such as "0600"')
    return value.rjust(4, "0")


def tcp_address(name: str, value: object) -> str:
    """``host:port`` or empty for off; the host is an IP address or localhost, so what is bound is no guess."""
    parse_tcp(name, value)
    return text(name, value)


def remote_address(name: str, value: object) -> str:
    """``host:port`` of somebody else, by name or address, or empty for none."""
    address = text(name, value)
    if address:
        split_address(name, address)
    return address


def tcp_or_unix_address(name: str, value: object) -> str:
    """``host:port``, the absolute path of a Unix socket, or empty for off."""
    if isinstance(value, str) and value.startswith("/"):
        return socket_path(name, value)
    return tcp_address(name, value)


def parse_tcp(name: str, value: object) -> HostPort | None:
    """The address behind ``host:port``, None for an empty string. Raises ConfigError for anything else."""
    if value == "":
        return None
    expected = 'an IP address or localhost with a port, such as "127.0.0.1:9470" or "[::1]:9470", or "" for off'
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+):([0-9]{1,5})", value) if isinstance(value, str) else None
    if match is None or int(match[2]) > 65535:
        raise ConfigError(name, value, expected)
    host = "127.0.0.1" if match[1] == "localhost" else match[1].strip("[]")
    try:
        return HostPort(str(ipaddress.ip_address(host)), int(match[2]))
    except ValueError as error:
        raise ConfigError(name, value, expected) from error


def parse_address(name: str, value: str) -> Address:
    """What ``tcp_or_unix_address`` accepted: a TCP address, a path, or None for off."""
    return value if value.startswith("/") else parse_tcp(name, value)
