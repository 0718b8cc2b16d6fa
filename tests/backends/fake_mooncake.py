"""A Mooncake client and its master in memory, with the traps of the real ones, and faults that come when told."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache.backends.mooncake_client import Connection
from hicache.backends.mooncake_master import PoolReading
from hicache.backends.mooncake_settings import MooncakeSettings
from hicache.backends.mooncake_store import MooncakeBackend

MIB = 1 << 20


@dataclass
class Buffer:
    transport_endpoint: str
    size: int


@dataclass
class Replica:
    buffer_descriptor: Buffer

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> Replica:
        return self


@dataclass
class FakeMooncake:
    """Implements ``StoreClient`` and ``Master``. ``before`` is called with the name of each batch call."""

    values: dict[str, bytes] = field(default_factory=dict)
    codes: dict[str, list[int]] = field(default_factory=dict)  # by name: what the next gets of it answer
    put_codes: list[int] = field(default_factory=list)  # what the next puts answer, and then nothing is stored
    before: Callable[[str], None] = lambda call: None
    on_get: Callable[[Sequence[str]], None] = lambda names: None
    nodes: dict[str, str] = field(default_factory=dict)  # by name; "node" otherwise
    is_listening: bool = True
    is_unreachable: bool = False
    calls: list[str] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def register_buffer(self, address: int, size: int, /) -> int:
        self.registered[address] = size
        return 0

    def unregister_buffer(self, address: int, /) -> int:
        del self.registered[address]
        return 0

    def batch_put_from(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: object, /
    ) -> list[int]:
        self._enter("put")
        codes = []
        for name, address, size in zip(names, addresses, sizes, strict=True):
            self._require_registered(address, size)
            codes.append(self.put_codes.pop(0) if self.put_codes else 0)
            if codes[-1] == 0:
                self.values.setdefault(name, ctypes.string_at(address, size))
        return self._codes(codes)

    def batch_get_into(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], /) -> list[int]:
        self._enter("get")
        self.on_get(names)
        codes = []
        for name, address, size in zip(names, addresses, sizes, strict=True):
            self._require_registered(address, size)
            value = self.values.get(name)
            told = self.codes.get(name, [])
            if value is None:
                codes.append(-704)
            elif len(value) > size:
                codes.append(-600)
            else:
                ctypes.memmove(address, value, len(value))
                codes.append(told.pop(0) if told else len(value))
        return self._codes(codes)

    def batch_is_exist(self, names: Sequence[str], /) -> list[int]:
        self._enter("exist")
        return self._codes([int(name in self.values) for name in names])

    def batch_remove(self, names: Sequence[str], force: bool, /) -> list[int]:
        self._enter("remove")
        return self._codes([0 if self.values.pop(name, None) is not None else -704 for name in names])

    def batch_get_replica_desc(self, names: Sequence[str], /) -> Mapping[str, Sequence[Replica]]:
        self._enter("describe")
        here = [name for name in names if name in self.values]
        return {name: [Replica(Buffer(self.nodes.get(name, "node"), len(self.values[name])))] for name in here}

    def get_hostname(self) -> str:
        return "fake:1"

    def close(self) -> int:
        self._enter("close")
        return 0

    def reading(self) -> PoolReading:
        return PoolReading(len(self.values), sum(map(len, self.values.values())), 512 * MIB)

    def names(self) -> list[str]:
        return list(self.values)

    def listens(self) -> bool:
        return self.is_listening

    def _enter(self, call: str) -> None:
        assert "close" not in self.calls, "a call after close kills the process"
        with self.lock:
            self.calls.append(call)
        self.before(call)

    def _codes(self, codes: list[int]) -> list[int]:
        return [-900] * len(codes) if self.is_unreachable else codes

    def _require_registered(self, address: int, size: int) -> None:
        assert any(start <= address and address + size <= start + length for start, length in self.registered.items())


def open_fake(
    fake: FakeMooncake, *, clock: Callable[[], float] | None = None, staging_bytes: int = 160 * MIB, **changes: float
) -> MooncakeBackend:
    """A backend over the fake."""
    settings = MooncakeSettings("127.0.0.1:1", staging_bytes=staging_bytes, **changes)  # type: ignore[arg-type]  # by name
    connection = Connection(fake, None, None)
    more = {} if clock is None else {"clock": clock}
    return MooncakeBackend(connection, fake, settings, reading_age_max_s=0.0, **more)


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
