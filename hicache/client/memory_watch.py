"""The thread that waits for hicached to let go of registered memory."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from hicache.client.memory_link import LinkState, MemoryLink, Settle

CLOSING_POLL_S = 0.05  # how often a closing watch looks whether the last transfer of an idle-to-be link has ended

_log = logging.getLogger(__name__)


class MemoryWatch:
    """Watches every link until its end of file, and then settles what was in doubt on it.

    ``on_end`` is called, from the watching thread, after a link has ended and its items were settled. The thread is
    started with the first link; after ``close`` it ends as soon as nothing is in doubt any more.
    """

    def __init__(self, *, on_end: Callable[[MemoryLink], None]) -> None:
        self._on_end = on_end
        self._changed = threading.Condition()
        self._links: set[MemoryLink] = set()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._wake_receiver: socket.socket | None = None
        self._wake_sender: socket.socket | None = None

    def add(self, link: MemoryLink) -> None:
        """Watch ``link``, which is the watch's from now on. After ``close`` it is closed at once."""
        with self._changed:
            if not self._is_closing:
                self._links.add(link)
                self._start()
                self._wake()
                return
        for settle in link.end():
            _settle(settle)

    @property
    def draining_count(self) -> int:
        """Links that hicached has been asked to let go of, and has not yet."""
        with self._changed:
            return sum(link.state is LinkState.DRAINING for link in self._links)

    @property
    def items_in_doubt(self) -> int:
        """Items of ended calls whose bytes hicached may still touch."""
        with self._changed:
            return sum(link.items_in_doubt for link in self._links)

    def close(self, *, timeout_s: float) -> int:
        """Close every link that is idle, and wait for the others. Returns the items still in doubt.

        To be called when no transfer can begin any more. If it is not zero, the thread goes on: it settles them,
        and ends, when hicached lets go of them or dies. Nothing else makes their bytes free.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._is_closing = True
            self._wake()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return self.items_in_doubt

    def _start(self) -> None:
        if self._thread is None:
            self._wake_receiver, self._wake_sender = socket.socketpair()
            self._wake_sender.setblocking(False)
            self._thread = threading.Thread(target=self._run, name="hicache-l3-memory", daemon=True)
            self._thread.start()

    def _wake(self) -> None:
        if self._wake_sender is not None:
            with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
                self._wake_sender.send(b"\0")

    def _run(self) -> None:
        assert self._wake_receiver is not None
        assert self._wake_sender is not None
        with selectors.DefaultSelector() as selector, self._wake_receiver, self._wake_sender:
            selector.register(self._wake_receiver, selectors.EVENT_READ, None)
            while self._register_all(selector):
                for key, _ in selector.select(CLOSING_POLL_S if self._is_closing else None):
                    if key.data is None:
                        self._wake_receiver.recv(4096)
                    elif key.data.has_ended():
                        selector.unregister(key.fileobj)
                        self._end(key.data)

    def _register_all(self, selector: selectors.BaseSelector) -> bool:
        """Watch what was added meanwhile. False when there is nothing left to wait for."""
        with self._changed:
            watched = {key.data for key in selector.get_map().values()}
            for link in self._links - watched:
                selector.register(link, selectors.EVENT_READ, link)
            if not self._is_closing:
                return True
            finished = [link for link in self._links if link.is_idle]
            for link in finished:
                selector.unregister(link)
                self._links.remove(link)
        for link in finished:
            link.end()
        return bool(self._links)

    def _end(self, link: MemoryLink) -> None:
        settles = link.end()
        for settle in settles:
            _settle(settle)
        with self._changed:
            self._links.discard(link)
        self._on_end(link)


def _settle(settle: Settle) -> None:
    try:
        settle()
    except Exception:  # a caller's mistake must not keep the others' memory in doubt
        _log.exception("settling an L3 transfer failed")
