"""TLS on the way to hicached, and what is wrong when no connection comes about: gRPC alone hardly says."""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass

import grpc

from hicache.certificates import earliest_expiration_s
from hicache.client.fault import Fault, FaultKind

DIAGNOSIS_S = 0.5


class TlsUnusable(Exception):
    """The files that the address names cannot be used."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, read again for every session and every bulk connection: a renewed certificate is used from then on."""

    ca: str
    certificate: str = ""  # of this client; empty: it shows none
    key: str = ""
    server_name: str = ""  # that the certificate of hicached must have; empty: the host of the address

    def context(self) -> ssl.SSLContext:
        """For one connection of our own. Raises TlsUnusable."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise TlsUnusable(f"ca = {self.ca!r}: expected a PEM file of CAs ({error})") from error
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key, password=lambda: "")
            except (OSError, ValueError) as error:
                text = f"certificate = {self.certificate!r}, key = {self.key!r}: expected PEM files that fit ({error})"
                raise TlsUnusable(text) from error
        return context

    def expirations_s(self) -> dict[str, float]:
        """When the first certificate of ``ca`` ends, and the first of ``client``, in seconds since 1970; nothing of
        files that cannot be read."""
        ends = {}
        for name, path in (("ca", self.ca), ("client", self.certificate)):
            with contextlib.suppress(OSError):
                ends[name] = earliest_expiration_s(_read(path) or b"")
        return {name: end for name, end in ends.items() if end is not None}

    def credentials(self) -> grpc.ChannelCredentials:
        """For gRPC. Raises TlsUnusable."""
        self.context()
        try:
            pems = [_read(path) for path in (self.ca, self.key, self.certificate)]
        except OSError as error:
            raise TlsUnusable(f"{error.filename}: expected a file that can be read ({error.strerror})") from error
        return grpc.ssl_channel_credentials(*pems)

    def wrap(self, connection: socket.socket, host: str, *, timeout_s: float) -> ssl.SSLSocket:
        """The connection after its handshake; takes it over, closes it on errors. Raises OSError and TlsUnusable."""
        try:
            connection.settimeout(timeout_s)
            return self.context().wrap_socket(connection, server_hostname=self.server_name or host)
        except BaseException:
            connection.close()
            raise


def unusable_fault(error: TlsUnusable) -> Fault:
    """No session without these files."""
    return Fault(FaultKind.LOST, "TLS_FILES", str(error), is_lasting=True)


def diagnose(host: str, port: int, tls: TlsFiles | None) -> Fault | None:
    """Why no session came about at an address that somebody listens at; None where TLS is not the reason.

    Tries the handshake once more by itself, which gives the words that gRPC keeps. Takes DIAGNOSIS_S at most for each
    of its steps.
    """
    try:
        connection = socket.create_connection((host, port), timeout=DIAGNOSIS_S)
    except OSError:
        return None
    if tls is None:
        return _tls_expected(connection, host, port)
    try:
        secure = tls.wrap(connection, host, timeout_s=DIAGNOSIS_S)
    except TlsUnusable as error:
        return unusable_fault(error)
    except ssl.SSLCertVerificationError as error:
        return _fault(
            "TLS_SERVER", f"the certificate of hicached at {host}:{port} is not accepted: {error.verify_message}"
        )
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return _fault(
                "TLS_NOT_SPOKEN", f"{host}:{port} does not speak TLS: use tcp://, or give hicached a certificate"
            )
        return _fault("TLS_FAILED", f"no TLS with {host}:{port}: {error.reason or error}")
    except OSError:
        return None
    return _client_refused(secure, tls)


def _client_refused(secure: ssl.SSLSocket, tls: TlsFiles) -> Fault | None:
    """In TLS 1.3 the server judges the client's certificate after the client thinks that all is well."""
    with secure:
        try:
            is_refused, why = secure.recv(1) == b"", "it closed the connection"
        except ssl.SSLError as error:
            is_refused, why = True, str(error.reason)
        except TimeoutError:
            return None
        except OSError as error:
            is_refused, why = True, str(error)
    if not is_refused:
        return None
    if not tls.certificate:
        return _fault("TLS_CLIENT", f"hicached wants a certificate of its clients, and the address names none ({why})")
    return _fault(
        "TLS_CLIENT",
        f"hicached does not accept the certificate {tls.certificate} ({why}): it must be valid and from tls_client_ca",
    )


def _tls_expected(connection: socket.socket, host: str, port: int) -> Fault | None:
    """Whether the other side is one that speaks TLS. Nothing is said to it that somebody else should not hear."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(OSError), connection, context.wrap_socket(connection, server_hostname=host):
        return _fault("TLS_EXPECTED", f"hicached at {host}:{port} speaks TLS: use tls://{host}:{port}?ca=FILE")
    return None


def _fault(code: str, detail: str) -> Fault:
    return Fault(FaultKind.LOST, code, detail, is_lasting=True)


def _read(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()
