"""A client that minds its own business beside whatever a test does to the daemon."""

from __future__ import annotations

import threading
from random import Random

from hicache.client import ClientSettings, DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from tests.client.memory import SmallMemory
from tests.client.support import QUICK, SPEC, get, key, payload, put

KEPT_OBJECTS = 32  # of its own; a store that keeps what was used lately would fill up
FIRST_NUMBER = 1_000_000  # of its objects; nobody else's are called like that
SETTINGS = ClientSettings(
    lease_s=0.0,
    backoff_s=QUICK.backoff_s,
    backoff_s_max=QUICK.backoff_s_max,
    breaker=QUICK.breaker,
)


def connected(address: str, memory: SmallMemory, *, token: str = "") -> DaemonL3:
    """A client that moves objects in the way its memory allows."""
    client = DaemonL3(address, spec=SPEC, memory=memory, settings=SETTINGS, token=token)
    assert client.wait_ready(timeout_s=20)
    return client


class OtherClient:
    """Puts, looks up and gets objects of its own without a pause, and remembers what went wrong.

    ``memory`` is its own, and has room for two objects of ``size_bytes``.
    """

    def __init__(self, address: str, memory: SmallMemory, *, size_bytes: int, token: str = "") -> None:
        self._memory = memory
        self._size_bytes = size_bytes
        self._l3 = connected(address, memory, token=token)
        self._number = FIRST_NUMBER + Random().randrange(FIRST_NUMBER) * FIRST_NUMBER
        self._is_over = threading.Event()
        self.rounds = 0
        self.wrong: list[str] = []

    def __enter__(self) -> OtherClient:
        self._is_over.clear()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def close(self) -> None:
        self._l3.close()
        self._memory.close()

    def _work(self) -> None:
        while not self._is_over.is_set():
            self._number += 1
            self._round(self._number)
            self.rounds += 1

    def _round(self, number: int) -> None:
        size_bytes, view = self._size_bytes, self._memory.buffer
        content = payload(number, size_bytes)
        view[:size_bytes] = content
        outcomes = put(self._l3, [L3Item(key(number), 0, size_bytes)])
        outcomes += self._l3.lookup([key(number)], timeout_s=10.0)
        outcomes += get(self._l3, [L3Item(key(number), size_bytes, size_bytes)])
        self._l3.delete([key(number - KEPT_OBJECTS)], timeout_s=10.0)
        if outcomes != [Outcome.OK] * 3 or view[size_bytes:] != content:
            self.wrong.append(f"object {number}: {outcomes}")
