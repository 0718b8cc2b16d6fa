"""Streams whose client has not said yet who it is: few, and soon gone."""

from __future__ import annotations

import asyncio

from hicache.daemon.calls import CallContext
from hicache.daemon.refusals import Refusal
from hicache.wire.protocol import RefusalCode

FIRST_MESSAGE_S = 5.0
SILENT_STREAMS_MAX = 128


class FirstMessages:
    """Waits for the first messages of one kind of stream. When too many wait, the one that waits longest makes way."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Timeout, None] = {}  # oldest first

    async def next(self, context: CallContext) -> object:
        """The first message, or EOF. Raises Refusal(MALFORMED or TOO_MANY_SESSIONS)."""
        if len(self._waiting) >= SILENT_STREAMS_MAX:
            self._drop_oldest()
        patience = asyncio.timeout(FIRST_MESSAGE_S)
        try:
            async with patience:
                self._waiting[patience] = None
                return await context.read()
        except TimeoutError as error:
            if patience in self._waiting:
                raise Refusal(RefusalCode.MALFORMED, f"nothing was sent within {FIRST_MESSAGE_S:g} s") from error
            text = f"nothing was sent before {SILENT_STREAMS_MAX} other streams were opened"
            raise Refusal(RefusalCode.TOO_MANY_SESSIONS, text) from error
        finally:
            self._waiting.pop(patience, None)

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())
