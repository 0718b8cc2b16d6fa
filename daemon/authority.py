"""Who asks the admin API, and what he may."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from hicache.daemon.config import DaemonConfig
from hicache.daemon.peers import Peer, peer_of
from hicache.daemon.refusals import Refusal
from hicache.daemon.reload import Commit
from hicache.daemon.tenants import TOKEN_CHARS_MAX, Tenants

# What a tenant may do about itself, and about nobody else. Only operators may do anything else.
VERBS_OF_TENANTS = frozenset({"namespaces", "namespace_drop", "export", "import", "tenant_erase"})

_BEARER = "Bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who asks."""

    name: str  # for logs and errors
    is_operator: bool = False
    tenant: str = ""  # on whose behalf; empty: nobody's

    def may(self, verb: str, tenant: str | None) -> bool:
        """Whether ``verb`` is allowed about ``tenant``; None: about all of them, or none."""
        return self.is_operator or (bool(self.tenant) and tenant == self.tenant and verb in VERBS_OF_TENANTS)


class Authority:
    """Tells callers apart. A token goes before the word of the kernel: who brings one wants to be seen as its owner.

    Operators are root, the user of the daemon, and who is in ``operators_file``. Event loop only.
    """

    settings: Sequence[str] = ("operators_file",)

    def __init__(self) -> None:
        self._operators: Tenants | None = None
        self._tenants: Tenants | None = None

    def learn(self, config: DaemonConfig, tenants: Tenants) -> None:
        """Who there is beside root and the daemon's user. Raises ConfigError."""
        self._operators = _read_operators(config.operators_file)
        self._tenants = tenants

    def prepare(self, config: DaemonConfig) -> Commit:
        """See ``Reloadable.prepare``."""
        return partial(setattr, self, "_operators", _read_operators(config.operators_file))

    def who(self, request: web.Request) -> Caller:
        """The caller of a request, by its token, or by what the kernel says of a Unix socket."""
        transport = request.transport
        connection = None if transport is None else transport.get_extra_info("socket")
        peer = None if connection is None else peer_of(connection)
        header = request.headers.get("Authorization", "")
        if header:
            return self._of_token(header.removeprefix(_BEARER) if header.startswith(_BEARER) else "")
        if peer is None:
            return Caller("somebody over TCP without a token")
        if peer.uid in (0, os.geteuid()):
            return Caller(f"uid {peer.uid}", is_operator=True)
        return self._of(peer=peer) or Caller(f"uid {peer.uid}")

    def _of_token(self, token: str) -> Caller:
        unknown = Caller("somebody whose token nobody knows")
        return self._of(token) or unknown if 0 < len(token) <= TOKEN_CHARS_MAX else unknown

    def _of(self, token: str = "", *, peer: Peer | None = None) -> Caller | None:
        for known, is_operator in ((self._operators, True), (self._tenants, False)):
            if known is None or not known.named:
                continue
            try:
                owner = known.authenticate(token, peer=peer)
            except Refusal:
                continue
            if is_operator:
                return Caller(f"operator {owner.name}", is_operator=True)
            return Caller(f"tenant {owner.name}", tenant=owner.name)
        return None


def _read_operators(file: str) -> Tenants | None:
    return Tenants.load(file, setting="operators_file") if file else None
