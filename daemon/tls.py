"""TLS on the TCP sockets: the certificate of hicached, the CA of its clients, and what their certificates say."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc

from hicache.certificates import earliest_expiration_s
from hicache.daemon.config import DaemonConfig
from hicache.daemon.reload import Commit
from hicache.errors import ConfigError
from hicache.notices import Notices

TENANT_URI: Final = "hicache:tenant/"  # a subject alternative name of this kind names the tenant of a client
PEM_BYTES_MAX = 1 << 20

_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    stamp: _Stamp
    context: ssl.SSLContext
    for_grpc: grpc.ServerCertificateConfiguration
    expirations_s: Mapping[str, float]  # see ServerTls.expirations_s


class ServerTls:
    """Every new connection gets what the files have; those that are open go on with what they began with. Thread-safe.

    Files that do not fit together, as in the middle of a rotation, are passed over until they do.
    """

    settings: Sequence[str] = ("tls_certificate", "tls_key", "tls_client_ca")

    def __init__(self, certificate: str, key: str, client_ca: str) -> None:
        """Without ``client_ca`` clients need no certificate. Raises ConfigError for files that cannot be used."""
        self._files = {"tls_certificate": certificate, "tls_key": key} | (
            {"tls_client_ca": client_ca} if client_ca else {}
        )
        self._lock = threading.Lock()
        self._notices = Notices(logging.getLogger(__name__))
        self._refused: _Stamp | None = None
        self._loaded = self._load()

    @classmethod
    def of(cls, config: DaemonConfig) -> ServerTls | None:
        """What ``config`` asks for; None: TCP without TLS."""
        if not config.tls_certificate:
            return None
        return cls(config.tls_certificate, config.tls_key, config.tls_client_ca)

    @property
    def wants_certificates(self) -> bool:
        """Whether a client without a certificate is turned away."""
        return "tls_client_ca" in self._files

    def context(self) -> ssl.SSLContext:
        """For one new connection."""
        return self._current().context

    def expirations_s(self) -> Mapping[str, float]:
        """When the first certificate of the chain that new connections are shown ends (``server``), and the first of
        those that clients are checked with (``client_ca``), in seconds since 1970."""
        return self._current().expirations_s

    def prepare(self, config: DaemonConfig) -> Commit:
        """See ``Reloadable.prepare``. Whether there is TLS, and whom it lets in, is decided at the start."""
        renewed = ServerTls.of(config)
        if renewed is None or renewed.wants_certificates != self.wants_certificates:
            expected = "TLS with tls_clients as at the start; restart hicached to change that"
            raise ConfigError("tls_certificate", config.tls_certificate, expected)
        return partial(self._become, renewed)

    def _become(self, other: ServerTls) -> None:
        with self._lock:
            self._files, self._loaded, self._refused = other._files, other._loaded, None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For the port of gRPC, which asks again at every handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._loaded.for_grpc,
            lambda: self._current().for_grpc,
            require_client_authentication=self.wants_certificates,
        )

    def _current(self) -> _Loaded:
        with self._lock:
            try:
                stamp = self._stamp()
                if stamp not in (self._loaded.stamp, self._refused):
                    self._refused = stamp  # not tried again before it changes, unless it loads
                    self._loaded = self._load()
                    self._notices.info(
                        "loaded", "the TLS certificate was renewed from %s", self._files["tls_certificate"]
                    )
            except (ConfigError, OSError) as error:
                self._notices.error("files", "the TLS certificate stays as it was: %s", error)
            return self._loaded

    def _stamp(self) -> _Stamp:
        stats = [os.stat(path) for path in self._files.values()]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def _load(self) -> _Loaded:
        try:
            stamp = self._stamp()
            pems = {name: _read_pem(name, path) for name, path in self._files.items()}
        except OSError as error:
            raise ConfigError(
                "tls_certificate", str(error.filename), f"a file that can be read ({error.strerror})"
            ) from error
        context = self._make_context()
        if self._stamp() != stamp:
            raise ConfigError("tls_certificate", self._files["tls_certificate"], "files that nobody changes meanwhile")
        for_grpc = grpc.ssl_server_certificate_configuration(
            [(pems["tls_key"], pems["tls_certificate"])], pems.get("tls_client_ca")
        )
        return _Loaded(stamp, context, for_grpc, _expirations_s(pems))

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # nothing is resumed: a certificate that is not renewed ends with its connection
        try:
            # The password is asked for on the terminal otherwise.
            context.load_cert_chain(self._files["tls_certificate"], self._files["tls_key"], password=lambda: "")
        except (ssl.SSLError, OSError, ValueError) as error:
            expected = f"a certificate chain in PEM with its unencrypted private key in tls_key ({_reason(error)})"
            raise ConfigError("tls_certificate", self._files["tls_certificate"], expected) from error
        if self.wants_certificates:
            try:
                context.load_verify_locations(self._files["tls_client_ca"])
            except (ssl.SSLError, OSError) as error:
                expected = f"certificates of CAs in PEM ({_reason(error)})"
                raise ConfigError("tls_client_ca", self._files["tls_client_ca"], expected) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _expirations_s(pems: Mapping[str, bytes]) -> dict[str, float]:
    names = {"server": "tls_certificate", "client_ca": "tls_client_ca"}
    ends = {name: earliest_expiration_s(pems.get(setting, b"")) for name, setting in names.items()}
    return {name: end for name, end in ends.items() if end is not None}


def certified_tenant(names: Iterable[str]) -> str:
    """The tenant that one of the subject alternative names of a certificate names; empty: none does.

    Raises ValueError for a certificate that names several.
    """
    tenants = {name.removeprefix(TENANT_URI) for name in names if name.startswith(TENANT_URI)}
    if len(tenants) > 1:
        raise ValueError(f"the certificate names {len(tenants)} tenants: expected one")
    return tenants.pop() if tenants else ""


def _read_pem(name: str, path: str) -> bytes:
    with open(path, "rb") as file:
        pem = file.read(PEM_BYTES_MAX + 1)
    if len(pem) > PEM_BYTES_MAX:
        raise ConfigError(name, path, f"a PEM file of at most {PEM_BYTES_MAX} bytes")
    return pem


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
