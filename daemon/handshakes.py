"""The TLS handshakes on the bulk socket: in a thread of their own, which waits for nobody."""

from __future__ import annotations

import asyncio
import socket
import ssl

from hicache.daemon.acceptor import STRANGERS_MAX, readable, writable
from hicache.daemon.tls import ServerTls
from hicache.workers import QueueFull, Workers


class Handshakes:
    """One thread for all: strangers who make it sign keep one core busy, and not the event loop. Event loop only."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._workers = Workers("hicached-tls", threads=1, queue_max=2 * STRANGERS_MAX)

    async def shake(self, connection: socket.socket) -> ssl.SSLSocket:
        """Takes a non-blocking connection over, and returns it with TLS. Raises OSError, and closes it then."""
        secure = self._tls.context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        try:
            while (waits_for := await self._step(secure)) is not None:
                await (readable(secure) if waits_for is ssl.SSLWantReadError else writable(secure))
        except BaseException:
            secure.close()
            raise
        return secure

    async def _step(self, secure: ssl.SSLSocket) -> type[ssl.SSLError] | None:
        """What the handshake waits for; None: nothing."""
        try:
            job = self._workers.submit(secure.do_handshake)
        except QueueFull as error:
            raise ConnectionAbortedError("the daemon is stopping") from error
        stepped = asyncio.wrap_future(job.future)
        try:
            await asyncio.shield(stepped)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
            return type(wanted)
        except asyncio.CancelledError:
            if not self._workers.withdraw(job):
                # One step waits for nobody. Its descriptor must not be another's meanwhile.
                await asyncio.gather(stepped, return_exceptions=True)
            raise
        return None

    def close(self) -> None:
        """No handshake goes on."""
        self._workers.close(timeout_s=0)


def is_plain(listener: socket.socket, tls: ServerTls | None) -> bool:
    """Whether what is accepted there speaks without TLS."""
    return tls is None or listener.family == socket.AF_UNIX
