"""The Unix socket on which clients hand their memory to the daemon (see hicache/wire/protocol.py for the exchange)."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Callable
from functools import partial

import structlog

from hicache.daemon.acceptor import HELLO_TIMEOUT_S, Acceptor, readable, say
from hicache.daemon.memory import Region, RegionRefused, check_memory, map_memory, seals_of
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session, Sessions
from hicache.notices import Notices
from hicache.wire.protocol import (
    MEMORY_ACCEPTED,
    MEMORY_HELLO,
    MEMORY_REFUSED,
    MEMORY_STATUS_OK,
    MEMORY_STATUS_REFUSED,
)
from hicache.workers import QueueFull, Workers

REGIONS_MAX = 32_768  # mapped at a time, those of ended sessions included; more are refused
STRANGE_DESCRIPTORS_MAX = 256  # that wait to be closed; then no memory is taken until it is fewer
STRANGE_QUEUE_MAX = 1024  # with those of all hellos that were begun before

_DISCARD_READS_MAX = 16
_DESCRIPTORS_MAX = 4  # of one connection; one is wanted: more are received only to be closed

log = structlog.get_logger("hicache.daemon.memory")


class MemorySocket:
    """Accepts memory. Each connection is one region; it stays open until nothing touches the region any more."""

    def __init__(
        self,
        listener: socket.socket,
        sessions: Sessions,
        *,
        unmap: Callable[[Callable[[], None]], None],
        strange: Workers,
        on_refusal: Callable[[], None],
    ) -> None:
        """``listener`` is bound and listening, and stays the caller's. ``unmap`` runs a blocking call in a thread.

        So does ``strange``, for descriptors that are no memory: closing one may take as long as its owner likes.
        """
        self._acceptor = Acceptor("memory", listener, self._serve, on_drop=on_refusal)
        self._sessions = sessions
        self._unmap = unmap
        self._strange = strange
        self._on_refusal = on_refusal
        self._region_ids = itertools.count(1)
        self._notices = Notices(logging.getLogger(__name__))

    def start(self) -> None:
        """Begins to accept."""
        self._acceptor.start()

    async def stop(self, *, timeout_s: float) -> None:
        """Stops accepting, and gives regions that are being detached ``timeout_s`` to go.

        The connection of a region that a transfer still touches then is left open, so that its client keeps waiting.
        """
        await self._acceptor.stop(timeout_s=timeout_s)

    async def _serve(self, connection: socket.socket, introduced: Callable[[], None]) -> None:
        try:
            session, region = await self._take_region(connection, introduced)
        except RegionRefused as refusal:
            self._on_refusal()
            self._notices.warning("refused", "memory refused: %s", refusal)
            await say(connection, _refused(str(refusal)))
            _discard_input(connection)
            return
        try:
            await say(connection, MEMORY_ACCEPTED.pack(MEMORY_STATUS_OK, region.region_id))
            await _until_end(connection, region)
            region.detach()
            await region.gone.wait()
            _discard_input(connection)
        finally:
            region.detach()
            if not region.gone.is_set():
                # The daemon is ending while a thread still touches the client's memory. End of file would say the
                # opposite, so the descriptor is left open: it closes with the process.
                connection.detach()
        session.forget(region)
        self._sessions.unmapped(region)
        log.debug("memory detached", session=session.session_id, region=region.region_id)

    async def _take_region(self, connection: socket.socket, introduced: Callable[[], None]) -> tuple[Session, Region]:
        """The region that the client offers, attached to its session. Raises RegionRefused."""
        descriptors: list[int] = []
        if self._strange.queued_count >= STRANGE_DESCRIPTORS_MAX:  # not received, the kernel drops them by itself
            raise RegionRefused("hicached holds too many descriptors that are no memory and cannot be closed")
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _receive_hello(connection, descriptors)
            introduced()
            return self._attach(hello, descriptors)
        except TimeoutError as error:
            raise RegionRefused(f"no complete hello within {HELLO_TIMEOUT_S:g} s") from error
        finally:
            for descriptor in descriptors:
                self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        if seals_of(descriptor) is not None:
            os.close(descriptor)
            return
        with contextlib.suppress(QueueFull):  # the daemon is stopping
            self._strange.submit(partial(os.close, descriptor))

    def _attach(self, hello: bytes, descriptors: list[int]) -> tuple[Session, Region]:
        secret, size_bytes = MEMORY_HELLO.unpack(hello)
        if len(descriptors) != 1:
            raise RegionRefused(f"{len(descriptors)} descriptors came with the hello: expected one memfd")
        try:
            session = self._sessions.find(secret)
        except Refusal as refusal:
            raise RegionRefused(str(refusal)) from refusal
        session.check_room_for_region()
        if len(self._sessions.mapped) >= REGIONS_MAX:
            raise RegionRefused(f"hicached maps at most {REGIONS_MAX} regions")
        offered = check_memory(descriptors[0], size_bytes)
        charge = self._sessions.region_budget.charge(session.tenant.name, offered)
        try:
            region = Region(next(self._region_ids), map_memory(offered), unmap=self._unmap)
            session.attach(region)
        except BaseException:
            self._sessions.region_budget.give_back(charge)
            raise
        self._sessions.mapped[region] = charge
        log.debug("memory attached", session=session.session_id, region=region.region_id, size_bytes=size_bytes)
        return session, region


def _refused(reason: str) -> bytes:
    text = reason.encode()[:65_535]
    return MEMORY_REFUSED.pack(MEMORY_STATUS_REFUSED, len(text)) + text


async def _receive_hello(connection: socket.socket, descriptors: list[int]) -> bytes:
    """The hello's bytes; received descriptors are appended to ``descriptors`` and are the caller's to close."""
    received = b""
    while len(received) < MEMORY_HELLO.size:
        try:
            part, ancillary, flags, _ = connection.recvmsg(
                MEMORY_HELLO.size - len(received),
                socket.CMSG_SPACE(_DESCRIPTORS_MAX * array.array("i").itemsize),
                socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            await readable(connection)
            continue
        except OSError as error:
            raise RegionRefused(f"the connection broke: {error}") from error
        descriptors += _descriptors(ancillary)
        if flags & socket.MSG_CTRUNC or len(descriptors) > _DESCRIPTORS_MAX:
            raise RegionRefused("more descriptors came with the hello than the one memfd that is expected")
        if not part:
            raise RegionRefused(f"the connection ended after {len(received)} of {MEMORY_HELLO.size} bytes")
        received += part
    return received


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    received = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
    return received.tolist()


def _discard_input(connection: socket.socket) -> None:
    """Reads what was sent against the rules: closed with unread bytes, the socket would reset instead of ending."""
    with contextlib.suppress(OSError):
        for _ in range(_DISCARD_READS_MAX):
            if not connection.recv(4096):
                return


async def _until_end(connection: socket.socket, region: Region) -> None:
    """Returns when the client half-closes, closes, breaks or says anything more, or when the region is detached."""
    spoken = asyncio.ensure_future(readable(connection))
    detaching = asyncio.ensure_future(region.detaching.wait())
    try:
        await asyncio.wait((spoken, detaching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        spoken.cancel()
        detaching.cancel()
        await asyncio.gather(spoken, detaching, return_exceptions=True)
