"""Parts of the small daemon: faults to arm, regions, sockets."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from hicache.wire import hicached_pb2 as wire
from hicache.wire.bulk import (
    BULK_REASON,
    BULK_REFUSED,
)


@dataclass
class Faults:
    """Hooks into the daemon; each default does nothing."""

    before_reply: Callable[[str], None] = lambda operation: None  # may block: a late or missing answer
    before_bytes: Callable[[str], None] = lambda operation: None  # before registered memory is touched
    objects: Callable[[list[bytes]], list[bytes]] = lambda objects: objects  # of a get over the bulk socket, as sent
    objects_end: Callable[[], bool] = lambda: True  # after the last of them; False ends the connection
    outcomes: Callable[[bytes], bytes] = lambda outcomes: outcomes  # of a get or put of registered memory, as sent
    refuse: dict[str, tuple[grpc.StatusCode, str]] = field(default_factory=dict)  # by operation
    refuse_memory: str = ""
    watch: Callable[[], Iterator[wire.WatchEvents]] | None = None  # the events of one watch; None: there are none
    late: Callable[[str], threading.Event | None] = lambda operation: None  # answer DEADLINE now, move bytes when set

    def hang(self, *, where: str, operation: str, times: int = 1) -> threading.Event:
        """Make the next ``times`` calls of ``operation`` stand still until the event is set."""
        release = threading.Event()
        left = [times]

        def stand_still(name: str) -> None:
            if name == operation and left[0]:
                left[0] -= 1
                release.wait(30)

        setattr(self, where, stand_still)
        return release


class Region:
    """A client's mapped memory. ``detach`` returns when no transfer holds it any more."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self._changed = threading.Condition()
        self._holds = 0
        self._is_detached = False

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        with self._changed:
            is_held = not self._is_detached
            self._holds += is_held
        try:
            yield is_held
        finally:
            with self._changed:
                self._holds -= is_held
                self._changed.notify_all()

    def detach(self) -> None:
        with self._changed:
            self._is_detached = True
            self._changed.wait_for(lambda: not self._holds)
        self.mapping.close()


def _refused(reason: str) -> bytes:
    return BULK_REFUSED + BULK_REASON.pack(len(reason)) + reason.encode()


def _unix_listener(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    return listener
