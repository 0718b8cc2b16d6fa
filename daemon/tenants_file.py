"""Changing the tenants file: comments stay, and what hicached could not read is never written."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hicache.daemon.tenants import PARSERS, TENANTS_FILE_CHARS_MAX, Tenants, parse_expiry
from hicache.errors import BackendError, ConfigError

TOKEN_BYTES = 32  # of a new token, before it is written as text
_HASH_MARK = "sha256:"
_EXPIRES = "expires="
_USER_MARKS = ("uid:", "gid:")  # in place of a token

Edit = Callable[[str], str]  # of the content of the file. Raises ConfigError.


class NotWritable(BackendError):
    """The tenants file cannot be changed by this user."""


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a tenant: what comes behind its token are settings."""

    tenant: str
    token: str
    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> _Line | None:
        """None for a comment, a blank line, and what is no line of a tenant."""
        words = text.split()
        if len(words) < 2 or words[0].startswith("#"):
            return None
        return cls(words[0], words[1], tuple(words[2:]))

    def __str__(self) -> str:
        return " ".join((self.tenant, self.token, *self.words))


def add_tenant(name: str, token_sha256: str, settings: Mapping[str, str]) -> Edit:
    """A line for a new tenant, at the end."""

    def edit(text: str) -> str:
        if len(name.split()) != 1 or name.startswith("#"):
            raise ConfigError("tenant", name, "a name of letters, digits, '.', '_' and '-', 64 at most")
        if _lines_of(text, name):
            raise ConfigError(
                "tenant", name, "a new name: it has a line already; rotate its token, or change its quota"
            )
        line = _Line(name, _HASH_MARK + token_sha256, tuple(f"{key}={value}" for key, value in settings.items()))
        start = text if not text or text.endswith("\n") else text + "\n"
        return f"{start}{line}\n"

    return edit


def rotate_token(name: str, token_sha256: str, *, keeps_old_until: str = "", now_s: float) -> Edit:
    """Another token for a tenant. The old ones end now, or at ``keeps_old_until`` (a moment, as ``expires=`` takes it):
    none of them later than it would have ended anyway, and those that have ended go.

    Its settings stay. Lines that let in a user (``uid:``, ``gid:``) are no tokens, and stay too.
    """

    def edit(text: str) -> str:
        _require(text, name)
        until = [f"{_EXPIRES}{keeps_old_until}"] if keeps_old_until else []
        kept_words: list[str] = []
        kept: list[str] = []
        place = len(text.splitlines())
        for raw in text.splitlines():
            line = _Line.of(raw)
            if line is None or line.tenant != name or line.token.startswith(_USER_MARKS):
                kept.append(raw)
                continue
            ends = [word for word in line.words if word.startswith(_EXPIRES)]
            settings = [word for word in line.words if not word.startswith(_EXPIRES)]
            end = min((*ends, *until), key=_end_s, default="")
            if until and _end_s(end) > now_s:
                kept.append(str(_Line(name, line.token, (*settings, end))))
            else:
                place = min(place, len(kept))
                kept_words += settings
        kept.insert(min(place, len(kept)), str(_Line(name, _HASH_MARK + token_sha256, tuple(kept_words))))
        return "\n".join(kept) + "\n"

    return edit


def change_settings(name: str, settings: Mapping[str, str]) -> Edit:
    """Other limits for a tenant; an empty value removes its own, so that the default holds."""

    def edit(text: str) -> str:
        _require(text, name)
        lines = text.splitlines()
        wanted = [f"{key}={value}" for key, value in settings.items() if value]
        for at, raw in enumerate(lines):
            line = _Line.of(raw)
            if line is not None and line.tenant == name:
                kept = [word for word in line.words if word.partition("=")[0] not in settings]
                lines[at] = str(_Line(name, line.token, (*kept, *wanted)))
                wanted = []
        return "\n".join(lines) + "\n"

    return edit


def remove_tenant(name: str) -> Edit:
    """No line of the tenant is left."""

    def edit(text: str) -> str:
        _require(text, name)
        kept = [raw for raw in text.splitlines() if (line := _Line.of(raw)) is None or line.tenant != name]
        return "\n".join(kept) + "\n"

    return edit


def _end_s(word: str) -> float:
    return parse_expiry("tenant", word)


def _lines_of(text: str, name: str) -> list[_Line]:
    return [line for raw in text.splitlines() if (line := _Line.of(raw)) is not None and line.tenant == name]


def _require(text: str, name: str) -> None:
    if not _lines_of(text, name):
        known = sorted({line.tenant for raw in text.splitlines() if (line := _Line.of(raw)) is not None})
        raise ConfigError("tenant", name, f"a tenant of the file: {', '.join(known[:10]) or 'it has none'}")


def token_counts(text: str) -> dict[str, int]:
    """How many lines each tenant has."""
    counts: dict[str, int] = {}
    for raw in text.splitlines():
        if (line := _Line.of(raw)) is not None:
            counts[line.tenant] = counts.get(line.tenant, 0) + 1
    return counts


def check_settings(settings: Mapping[str, str]) -> None:
    """Raises ConfigError for a limit that tenants do not have, or a value that it does not take."""
    for name, value in settings.items():
        if name not in PARSERS:
            raise ConfigError(name, value, f"one of the limits of a tenant: {', '.join(PARSERS)}")
        if value:
            PARSERS[name](name, value)


def read_file(path: str) -> str:
    """The content; empty where there is no file yet. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8-sig") as source:
            text = source.read(TENANTS_FILE_CHARS_MAX + 1)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("tenants_file", path, f"a readable text file ({error})") from error
    if len(text) > TENANTS_FILE_CHARS_MAX:
        raise ConfigError("tenants_file", path, f"a file of at most {TENANTS_FILE_CHARS_MAX} characters")
    return text


def change_file(path: str, edit: Edit, *, is_new: bool = False) -> str:
    """Changes the file in one step, checked before; returns what it had. Blocking.

    Its owner, group and mode stay. A new one is for its owner, and for the group of a folder that is open to that and
    nobody else: what root makes in /etc/hicached, hicached has to read. Raises ConfigError, and NotWritable where this
    user may not write there; then the file is as it was.
    """
    real = os.path.realpath(path)
    before = read_file(real)
    if not before and not is_new and not os.path.exists(real):
        raise ConfigError("tenants_file", path, "a file that exists")
    write_file(real, edit(before), check=True)
    return before


def write_file(path: str, text: str, *, check: bool) -> None:
    """Replaces the content in one step; with ``check``, only by what a daemon can read."""
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as target:
                target.write(text)
                target.flush()
                _copy_ownership(path, target.fileno())
                os.fsync(target.fileno())
            if check and text.strip():
                _check(temporary, path)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise NotWritable(f"tenants_file {path} cannot be written by this user ({error.strerror})") from error


def _check(temporary: str, path: str) -> None:
    """Errors name the file that is meant."""
    try:
        Tenants.load(temporary)
    except ConfigError as error:
        raise ConfigError(error.setting.replace(temporary, path), error.value, error.expected) from error


def _copy_ownership(path: str, fd: int) -> None:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        folder = os.stat(os.path.dirname(path) or ".")
        if folder.st_mode & 0o057 == 0o050:
            os.fchown(fd, -1, folder.st_gid)
            os.fchmod(fd, 0o640)
        return
    if (stat.st_uid, stat.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(fd, stat.st_uid, stat.st_gid)
    os.fchmod(fd, stat.st_mode & 0o777)
