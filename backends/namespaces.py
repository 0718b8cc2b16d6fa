"""Namespaces of stored objects: the tag that each object carries, and the names that were met for the tags."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from hicache.backends.base import UNKNOWN_TAG
from hicache.errors import ConfigError

TAG_BYTES = 4
NAMES_FILE = "hicache.namespaces"
NAMES_MAX = 1024  # those that were used last
NAMES_BYTES_MAX = 64 << 20
DIGEST_BYTES = 32


def namespace_tag(digest: bytes) -> int:
    """What an object keeps of the digest of its namespace: the first TAG_BYTES, as its hexadecimal form begins."""
    return int.from_bytes(digest[:TAG_BYTES], "big")


def tag_text(tag: int) -> str:
    """A tag as the beginning of the digest that people see."""
    return "unknown" if tag == UNKNOWN_TAG else f"{tag:08x}"


def parse_namespace(text: str) -> int:
    """The tag of a digest in hexadecimal, of which the first 8 digits are enough. Raises ConfigError."""
    if text == "unknown":
        return UNKNOWN_TAG
    lowered = text.lower()
    if not 2 * TAG_BYTES <= len(lowered) <= 2 * DIGEST_BYTES or set(lowered) - set("0123456789abcdef"):
        expected = f"the first {2 * TAG_BYTES} or more hexadecimal digits of a namespace's digest, or `unknown`"
        raise ConfigError("namespace", text, f"{expected}: `hicache namespaces list` shows them")
    return int(lowered[: 2 * TAG_BYTES], 16)


class NamespaceName(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a namespace beside its tag: who uses it, what engines say of it, and when one did last."""

    tenant: bytes  # its digest
    digest: bytes
    descriptor: bytes  # msgpack, as the client sent it
    session_at_s: float


class NamespaceNames:
    """The names of the last NAMES_MAX namespaces, also after a restart. Thread-safe.

    Without a name a namespace can be listed, dropped and verified all the same, by its tag; so what is written here
    need not survive a power loss, and a file that cannot be read or written is no error.
    """

    def __init__(self, directory: Path | None, *, on_failure: Callable[[str], None] = lambda _: None) -> None:
        """``directory`` of the store; None: nothing is kept. ``on_failure`` is told why something is not kept."""
        self._path = None if directory is None else directory / NAMES_FILE
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._names: dict[tuple[bytes, int], NamespaceName] = {}
        self._is_changed = False
        for name in self._read():
            self._names[name.tenant, namespace_tag(name.digest)] = name

    def meet(self, tenant: bytes, digest: bytes, descriptor: bytes, *, now_s: float) -> None:
        """An engine has said hello. Written with the next ``write``."""
        key = (tenant, namespace_tag(digest))
        with self._lock:
            self._names.pop(key, None)
            self._names[key] = NamespaceName(tenant=tenant, digest=digest, descriptor=descriptor, session_at_s=now_s)
            while len(self._names) > NAMES_MAX:
                del self._names[next(iter(self._names))]
            self._is_changed = True

    def get(self, tenant: bytes, tag: int) -> NamespaceName | None:
        """The name behind a tag of this tenant; None: it is not known any more."""
        with self._lock:
            return self._names.get((tenant, tag))

    def forget(self, tenant: bytes) -> None:
        """A tenant is erased."""
        with self._lock:
            for key in [key for key in self._names if key[0] == tenant]:
                del self._names[key]
                self._is_changed = True

    def write(self) -> None:
        """Write what has changed, in one step. Blocking."""
        with self._writing:
            with self._lock:
                if self._path is None or not self._is_changed:
                    return
                raw = msgspec.msgpack.encode(list(self._names.values()))
                self._is_changed = False
            temporary = self._path.with_name(self._path.name + ".tmp")
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb") as target:
                    target.write(raw)
                os.replace(temporary, self._path)
            except OSError as error:
                self._is_changed = True
                self._on_failure(f"{self._path} cannot be written ({error.strerror}): a restart forgets namespaces")

    def _read(self) -> list[NamespaceName]:
        if self._path is None:
            return []
        try:
            with open(self._path, "rb") as source:
                raw = source.read(NAMES_BYTES_MAX + 1)
            if len(raw) > NAMES_BYTES_MAX:
                raise ValueError(f"more than {NAMES_BYTES_MAX} bytes")
            names = msgspec.msgpack.decode(raw, type=list[NamespaceName])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._on_failure(
                f"{self._path} cannot be read ({error}): namespaces have no names until an engine says them"
            )
            return []
        return [name for name in names[-NAMES_MAX:] if len(name.digest) == DIGEST_BYTES]
