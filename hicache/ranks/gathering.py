"""How a leader waits for its ranks: whoever connects says hello, and is taken, told what differs, or hung up on."""

from __future__ import annotations

import contextlib
import hmac
import logging
import selectors
import socket
import time
from dataclasses import dataclass, field
from functools import reduce

import msgspec

from hicache.errors import ConfigError, UsageError
from hicache.ranks.link import Link, LinkBroken
from hicache.ranks.messages import (
    HELLO_BYTES_MAX,
    LEADER_DECODER,
    RANK_PROTOCOL_VERSION,
    FrameReader,
    Garbage,
    Hello,
    Refused,
    decoded,
    frame,
)
from hicache.ranks.settings import Ranks, listen, stop_listening
from hicache.spec import differing_fields

HELLO_TIMEOUT_S = 5.0
STRANGERS_MAX = 64  # connections that have not said hello; one more drops the oldest of them

_DIFFERENCES_MAX = 16  # that a refusal names
_LOG = logging.getLogger(__name__)


def gather(ranks: Ranks, own: Hello, *, missing: set[int]) -> tuple[dict[int, Link], Hello]:
    """Links to the ``missing`` ranks, by rank, when each has said a hello that fits ``own`` and all others; and what
    all have said together: also the slots of groups that one stage lacks and another has.

    Afterwards nobody can connect any more. Raises ConfigError naming who has not come within ``start_timeout_s``.
    """
    listener = listen(ranks, backlog=STRANGERS_MAX + len(missing))
    try:
        with _Gathering(listener, ranks, own, missing) as gathering:
            return gathering.run(until_s=time.monotonic() + ranks.start_timeout_s)
    finally:
        stop_listening(ranks, listener)


@dataclass(slots=True, eq=False)
class _Guest:
    link: Link
    until_s: float
    hello: Hello | None = None  # once it has been taken


@dataclass(slots=True)
class _Gathering:
    listener: socket.socket
    ranks: Ranks
    own: Hello
    wanted: set[int]
    guests: dict[_Guest, None] = field(default_factory=dict)  # strangers and those that were taken, oldest first
    refusals: list[str] = field(default_factory=list)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __enter__(self) -> _Gathering:
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        """Hangs up on everybody who is still a guest."""
        for guest in list(self.guests):
            self._drop(guest)
        self.selector.close()

    @property
    def missing(self) -> set[int]:
        """Ranks that are still to come."""
        return self.wanted - self._taken().keys()

    @property
    def common(self) -> Hello:
        """What all that were taken so far have said."""
        return reduce(_joined, (guest.hello for guest in self.guests if guest.hello is not None), self.own)

    def run(self, *, until_s: float) -> tuple[dict[int, Link], Hello]:
        """See ``gather``."""
        while self.missing:
            now_s = time.monotonic()
            if now_s >= until_s:
                raise self._too_late()
            deadlines = [guest.until_s for guest in self._strangers()]
            for key, _ in self.selector.select(min([until_s, *deadlines]) - now_s):
                if key.data is None:
                    self._accept()
                elif key.data in self.guests:
                    self._hear(key.data)
            for guest in [guest for guest in self._strangers() if guest.until_s <= time.monotonic()]:
                self._drop(guest)
        common, taken = self.common, self._taken()
        for guest in taken.values():
            self.selector.unregister(guest.link)
            del self.guests[guest]
        return {rank: guest.link for rank, guest in taken.items()}, common

    def _taken(self) -> dict[int, _Guest]:
        return {guest.hello.rank: guest for guest in self.guests if guest.hello is not None}

    def _strangers(self) -> list[_Guest]:
        return [guest for guest in self.guests if guest.hello is None]

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:  # it has gone already, or there is no descriptor for it: the next one may do better
            return
        link = Link(connection, FrameReader(bytes_max=HELLO_BYTES_MAX))
        guest = _Guest(link, time.monotonic() + HELLO_TIMEOUT_S)
        self.guests[guest] = None
        self.selector.register(guest.link, selectors.EVENT_READ, guest)
        strangers = self._strangers()
        if len(strangers) > STRANGERS_MAX:
            self._drop(strangers[0])

    def _hear(self, guest: _Guest) -> None:
        try:
            for payload in guest.link.receive():
                message = decoded(LEADER_DECODER, payload)
                if guest.hello is not None or not isinstance(message, Hello):
                    raise Garbage("one hello is all that a worker says before it is greeted")
                self._greet(guest, message)
        except (LinkBroken, Garbage, UsageError) as error:
            _LOG.info("a connection to the ranks' socket was dropped: %s", error)
            self._drop(guest)

    def _greet(self, guest: _Guest, hello: Hello) -> None:
        differences = _differences(self.common, hello)
        if not differences and hello.rank not in self.missing:
            differences = [f"rank {hello.rank}: this leader waits for ranks {sorted(self.missing)}"]
        if not differences:
            guest.hello = hello
            return
        reason = "; ".join(differences[:_DIFFERENCES_MAX])
        _LOG.warning("rank %d is refused: %s", hello.rank, reason)
        self.refusals = [*self.refusals[-_DIFFERENCES_MAX:], f"rank {hello.rank} was refused: {reason}"]
        guest.link.send(frame(Refused(reason)))
        raise LinkBroken("it was refused")

    def _drop(self, guest: _Guest) -> None:
        del self.guests[guest]
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(guest.link)
        guest.link.close()

    def _too_late(self) -> ConfigError:
        refusals = "".join(f"; {refusal}" for refusal in self.refusals)
        return ConfigError(
            "ranks.start_timeout_s",
            self.ranks.start_timeout_s,
            f"ranks {sorted(self.missing)} to have come to {self.ranks.address} by then{refusals}",
        )


def _differences(common: Hello, hello: Hello) -> list[str]:
    """What must be equal and is not, as ``field: the leader's != the worker's``. Nothing is told to a stranger."""
    if hello.version != RANK_PROTOCOL_VERSION:
        return [f"protocol version: {RANK_PROTOCOL_VERSION} != {hello.version}"]
    if not hmac.compare_digest(common.token.encode(), hello.token.encode()):
        return ["token: it is not that of the leader"]
    differing = differing_fields(common.descriptor, hello.descriptor)
    if differing or not common.l1_slots:
        return differing
    for name in ("l1_slots", "l2_slots"):
        ours, theirs = getattr(common, name), getattr(hello, name)
        are_alike = len(ours) == len(theirs) and all(a == b for a, b in zip(ours, theirs, strict=True) if a and b)
        if any(ours) != any(theirs) or not are_alike:
            differing.append(f"{name}: {ours!r} != {theirs!r}")
    for name in ("l1_bytes", "has_l3"):
        if getattr(common, name) != getattr(hello, name):
            differing.append(f"{name}: {getattr(common, name)} != {getattr(hello, name)}")
    return differing


def _joined(common: Hello, hello: Hello) -> Hello:
    """Slots that some rank has: 0 stands for a group of another pipeline stage."""
    if not common.l1_slots:
        return hello
    return msgspec.structs.replace(
        common,
        l1_slots=tuple(map(max, common.l1_slots, hello.l1_slots)),
        l2_slots=tuple(map(max, common.l2_slots, hello.l2_slots)),
    )
