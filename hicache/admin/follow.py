"""Follows what a daemon tells of itself, through its restarts: keeps the latest status and the last hour."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from hicache.admin.client import Admin
from hicache.admin.status import SAMPLES_MAX, Sample, Status
from hicache.admin.verbs import EVENTS, HISTORY
from hicache.errors import AdminRefused, DaemonUnreachable

SILENCE_S = 5.0  # events come every second
RETRY_S = 1.0
EVENT_BYTES_MAX = 4 * 1024 * 1024


def read_events(parts: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Kind and document of each server-sent event. Raises AdminRefused for one that never ends."""
    unread = b""
    for part in parts:
        *events, unread = (unread + part).split(b"\n\n")
        if len(unread) > EVENT_BYTES_MAX:
            raise AdminRefused(200, f"an event has more than {EVENT_BYTES_MAX} bytes: this is no hicached")
        for event in events:
            fields = dict(line.partition(b": ")[::2] for line in event.split(b"\n"))
            if b"data" in fields:
                yield fields.get(b"event", b"message").decode(errors="replace"), fields[b"data"]


class Follower:
    """What was told last, and whether somebody still tells. Read it in any thread; ``changed`` is called in its own."""

    def __init__(self, admin: Admin, *, changed: Callable[[], None]) -> None:
        self._admin = admin
        self._changed = changed
        self._stopped = threading.Event()
        self.status: Status | None = None
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self.trouble: str | None = None  # why nobody tells, while nobody does

    def start(self) -> None:
        """Begins to follow, until ``stop``."""
        threading.Thread(target=self._run, name="hicache-follow", daemon=True).start()

    def stop(self) -> None:
        """Ends it, after what it waits for now."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._follow()
            except (DaemonUnreachable, AdminRefused, msgspec.MsgspecError) as error:
                self.trouble = str(error)
                self._changed()
            self._stopped.wait(RETRY_S)

    def _follow(self) -> None:
        with self._admin.open(EVENTS, silence_s=SILENCE_S) as parts:
            self.samples = deque(self._admin.ask(HISTORY).samples, maxlen=SAMPLES_MAX)
            for kind, document in read_events(parts):
                if self._stopped.is_set():
                    return
                if kind == "status":
                    self.status = msgspec.json.decode(document, type=Status)
                    self.trouble = None
                elif kind == "sample":
                    self.samples.append(msgspec.json.decode(document, type=Sample))
                self._changed()
        self.trouble = f"hicached at {self._admin.address} has stopped"
        self._changed()
