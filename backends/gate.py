"""Many at once, or one alone: transactions pass a gate that can be closed to change the map under them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hicache.errors import BackendError


class Gate:
    """Shared entry for transactions, exclusive entry for whoever needs that there is none.

    Not reentrant: a thread that is inside must not ask for ``exclusive``.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._is_exclusive = False
        self._is_shut = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside with others; waits while somebody is alone. Raises BackendError after ``shut``."""
        with self._condition:
            while self._is_exclusive and not self._is_shut:
                self._condition.wait()
            if self._is_shut:
                raise BackendError("the backend is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                if self._inside == 0:
                    self._condition.notify_all()

    @contextmanager
    def exclusive(self, *, timeout_s: float) -> Iterator[bool]:
        """Alone inside, or False when the others did not leave in time. Nobody enters meanwhile."""
        with self._condition:
            is_turn = self._condition.wait_for(lambda: not self._is_exclusive, timeout=timeout_s)
            if is_turn:
                self._is_exclusive = True
            is_alone = is_turn and self._condition.wait_for(lambda: self._inside == 0, timeout=timeout_s)
        try:
            yield is_alone
        finally:
            if is_turn:
                with self._condition:
                    self._is_exclusive = False
                    self._condition.notify_all()

    def shut(self) -> None:
        """Let nobody enter any more. Those inside stay until they leave."""
        with self._condition:
            self._is_shut = True
            self._condition.notify_all()
