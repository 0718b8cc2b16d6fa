"""Something that may take long, and that nobody may wait for any more: it is done or undone, never both."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hicache.errors import BackendError


class Abandoned(BackendError):
    """Nobody waits for this any more: what it had changed is undone."""


class Attempt:
    """``settle`` or ``abandon``: what comes first holds, and the other one comes to nothing. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_settled = self._is_abandoned = False
        self._undo: Callable[[], None] = lambda: None

    def begin(self, undo: Callable[[], None]) -> None:
        """From here on ``abandon`` calls ``undo``, which is short. Raises Abandoned."""
        with self._lock:
            self._check()
            self._undo = undo

    def check(self) -> None:
        """To be called between steps. Raises Abandoned."""
        with self._lock:
            self._check()

    def settle(self, commit: Callable[[], None] = lambda: None) -> None:
        """All is done but for ``commit``, which is short. Raises Abandoned, and then it is not called."""
        with self._lock:
            self._check()
            commit()
            self._is_settled = True

    def abandon(self) -> bool:
        """It is not wanted any more, and undone as far as that goes at once. False: it is settled already."""
        with self._lock:
            if not self._is_settled:
                self._is_abandoned = True
                self._undo()
            return not self._is_settled

    def _check(self) -> None:
        if self._is_abandoned:
            raise Abandoned("it took too long, and nobody waits for it any more")
