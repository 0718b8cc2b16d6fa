"""The far end of a link as its loop sees it: decoded messages one by one, and one word when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic

import msgspec

from hicache.ranks.link import Link, LinkBroken
from hicache.ranks.loop import LinkLoop
from hicache.ranks.messages import FRAME_BYTES_MAX, Farewell, Garbage, M, Pulse, decoded, frame


class Peer(Generic[M]):
    """``on_message`` gets everything but pulses; ``on_end`` is called once, with the reason, when the link is over.

    Both are called in the loop's thread. ``send`` is for any thread, and never blocks.
    """

    def __init__(
        self,
        link: Link,
        loop: LinkLoop,
        decoder: msgspec.msgpack.Decoder[M],
        *,
        on_message: Callable[[M], None],
        on_end: Callable[[str], None],
    ) -> None:
        """``loop`` watches it until it is over. Its silence counts from here: before, it had nothing to say."""
        self._link = link
        self._loop = loop
        self._decoder = decoder
        self._on_message = on_message
        self._on_end = on_end
        self._is_over = False
        self._heard_at_s = time.monotonic()
        self.said_farewell = False
        link.reader.bytes_max = FRAME_BYTES_MAX
        link.on_backlog = loop.wake
        loop.watch(self)

    def fileno(self) -> int:
        """For the selector."""
        return self._link.fileno()

    @property
    def has_backlog(self) -> bool:
        """Whether something waits for the peer to read."""
        return self._link.has_backlog

    def send(self, framed: bytes) -> None:
        """Send it, or have the link ended when that cannot be done."""
        try:
            self._link.send(framed)
        except LinkBroken as error:
            self.give_up(str(error))

    def give_up(self, reason: str) -> None:
        """Have the loop end the link soon. For any thread."""
        self._loop.call(lambda: self.end(reason))

    def on_writable(self) -> None:
        """See Watched."""
        try:
            self._link.flush()
        except LinkBroken as error:
            self.end(str(error))

    def on_readable(self, now_s: float) -> None:
        """See Watched."""
        self._heard_at_s = now_s
        try:
            for payload in self._link.receive():
                message = decoded(self._decoder, payload)
                if isinstance(message, Farewell):
                    self.said_farewell = True
                    raise LinkBroken(f"it has closed the link: {message.reason}")
                if not isinstance(message, Pulse):
                    self._on_message(message)
                if self._is_over:
                    return
        except LinkBroken as error:
            self.end(str(error))
        except Garbage as error:
            self.end(f"it says what is no message: {error}")

    def tick(self, now_s: float, *, silence_timeout_s: float) -> None:
        """Send a pulse; end the link when nothing was heard for too long. Loop only."""
        if now_s - self._heard_at_s > silence_timeout_s:
            self.end(f"it has been silent for {now_s - self._heard_at_s:.1f} s")
        else:
            self.send(_PULSE)

    def end(self, reason: str) -> None:
        """Close the link and say so once. Loop only, or when the loop has stopped. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._loop.forget(self)
        self._link.close()
        self._on_end(reason)


_PULSE = frame(Pulse())


def tick_s(silence_timeout_s: float) -> float:
    """How often to send a pulse."""
    return min(1.0, silence_timeout_s / 5)
