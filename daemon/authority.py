"""Who asks the admin API, and what he may."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from aiohttp import web

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who asks."""

    name: str  # for logs and errors
    is_operator: bool = False

    def may(self, verb: str, tenant: str | None) -> bool:
        """Whether ``verb`` is allowed about ``tenant``; None: about all of them, or none."""
        return self.is_operator


class Authority:
    """Tells callers apart."""

    def who(self, request: web.Request) -> Caller:
        """The caller of a request. Whom the kernel says to be root or the daemon's own user is an operator."""
        transport = request.transport
        peer = None if transport is None else transport.get_extra_info("socket")
        if peer is None or peer.family != socket.AF_UNIX:
            return Caller("somebody over TCP")
        _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return Caller(f"uid {uid}", is_operator=uid in (0, os.geteuid()))
