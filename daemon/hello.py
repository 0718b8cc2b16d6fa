"""Who may come in: checks a hello, opens the session, and says welcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from hicache.backends.namespaces import NamespaceNames, namespace_tag
from hicache.daemon.config import DaemonConfig
from hicache.daemon.deployments import Deployments, read_membership
from hicache.daemon.namespaces import KnownNamespaces, check_key_hash, read_descriptor
from hicache.daemon.object_class import classes_of
from hicache.daemon.peers import PeerTickets
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session, Sessions
from hicache.daemon.tenants import Tenant, Tenants
from hicache.daemon.tls import certified_tenant
from hicache.tracing import tracer
from hicache.wire import hicached_pb2 as pb
from hicache.wire.protocol import KEY_BYTES_MAX, PROTOCOL_VERSION, RefusalCode

NAME_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class Identity:
    """What a welcome tells of this daemon."""

    version: str
    store_id: Callable[[], bytes]  # as it is at the time: a store that others share may be made anew
    bulk_port: int = 0  # over TCP; 0: there is none


class Hellos:
    """Turns hellos into sessions. Event loop only."""

    def __init__(
        self,
        config: DaemonConfig,
        identity: Identity,
        tenants: Tenants,
        sessions: Sessions,
        names: NamespaceNames,
        peer_tickets: PeerTickets,
    ) -> None:
        self._config = config
        self._identity = identity
        self._tenants = tenants
        self._sessions = sessions
        self._peer_tickets = peer_tickets
        self._names = names
        self.namespaces = KnownNamespaces()
        self._deployments = Deployments()

    @property
    def tenant_count(self) -> int:
        """How many tenants this daemon has."""
        return self._tenants.count

    @contextmanager
    def welcomed(
        self, hello: pb.Hello, *, peer: str, certified_names: Sequence[str] = ()
    ) -> Iterator[tuple[Session, pb.Welcome]]:
        """The session behind a hello, and the answer to it; it ends with the context. Raises Refusal.

        ``certified_names`` are the URIs in the certificate of the client.
        """
        if hello.protocol_version != PROTOCOL_VERSION:
            raise Refusal(
                RefusalCode.PROTOCOL_VERSION,
                f"the client speaks version {hello.protocol_version}, hicached {self._identity.version} speaks "
                f"version {PROTOCOL_VERSION}",
            )
        authenticate = self._proof_of(hello, certified_names)
        tenant = authenticate()
        descriptor = read_descriptor(hello.namespace_descriptor, hello.namespace_digest)
        check_key_hash(descriptor, self._tenants)
        membership = read_membership(hello.deployment, descriptor, hello.salt_fingerprint)
        with self._deployments.joined(tenant, membership):
            differences = self.namespaces.meet(tenant, hello.namespace_digest, descriptor)
            session, secret = self._sessions.open(tenant, printable(hello.client_name))
            session.authenticate = authenticate
            session.object_classes = classes_of(descriptor)
            session.namespace_tag = namespace_tag(hello.namespace_digest)
            try:
                self._note_use(tenant, hello)
                yield session, self._welcome(session, secret, differences, is_local=peer.startswith("unix:"))
            finally:
                self._sessions.end(session, secret)
                self._note_use(tenant, hello)

    def _note_use(self, tenant: Tenant, hello: pb.Hello) -> None:
        """An engine of this namespace is here, or was until now."""
        self._names.meet(tenant.digest, hello.namespace_digest, hello.namespace_descriptor, now_s=time.time())

    def _proof_of(self, hello: pb.Hello, certified_names: Sequence[str]) -> Callable[[], Tenant]:
        """Says whose session this is, as often as it is asked: a ticket is good for one time only. Raises Refusal."""
        try:
            certified = certified_tenant(certified_names)
        except ValueError as error:
            raise Refusal(RefusalCode.BAD_TOKEN, str(error)) from error
        peer = self._peer_tickets.redeem(hello.peer_ticket) if hello.peer_ticket else None
        return partial(self._tenants.authenticate, hello.token, peer=peer, certified=certified)

    def _welcome(self, session: Session, secret: bytes, differences: list[str], *, is_local: bool) -> pb.Welcome:
        return pb.Welcome(
            session_id=session.session_id,
            session_secret=secret,
            tenant=session.tenant.name,
            memory_socket=self._config.memory_socket if is_local else "",
            bulk_socket=self._config.bulk_socket if is_local else "",
            bulk_port=0 if is_local else self._identity.bulk_port,
            limits=self._limits(),
            store_id=self._identity.store_id(),
            namespace_differs=differences,
            daemon_version=self._identity.version,
            bulk_traces=tracer().is_on,
        )

    def _limits(self) -> pb.Limits:
        return pb.Limits(
            object_bytes_max=self._config.object_bytes_max,
            batch_keys_max=self._config.batch_keys_max,
            batch_bytes_max=self._config.batch_bytes_max,
            lease_ms_max=self._config.lease_ms_max,
            key_bytes_max=KEY_BYTES_MAX,
        )


def printable(name: str) -> str:
    """What a client calls something, as it may appear in a log line or on a terminal."""
    return "".join(character if character.isprintable() else "?" for character in name[:NAME_CHARS_MAX])
