"""How long a stop may take, and whether it left everything as it should."""

from __future__ import annotations

import asyncio
import math

# A stop is over within 5 s: calls, sessions and regions get their share (grpc_server.py, memory_socket.py), the
# store what is left of STOP_S, HTTP its moment after that. STOP_S_MAX ends the process if something takes longer still.
STORE_CLOSE_S_MIN = 0.5
STOP_S = 4.0
STOP_S_MAX = 4.7


class Stopping:
    """One stop. Event loop only."""

    def __init__(self) -> None:
        self.is_clean = True  # until somebody says that it is not
        self._stop_by = math.inf  # of the event loop's clock

    def begin(self) -> None:
        """The time of the stop runs from here."""
        self._stop_by = asyncio.get_running_loop().time() + STOP_S

    @property
    def store_left_s(self) -> float:
        """What is left of the stop for closing the store."""
        return max(STORE_CLOSE_S_MIN, self._stop_by - asyncio.get_running_loop().time())
