"""A daemon over TLS, with the CA that it and its clients have certificates of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.certificates import Authority
from hicache.client import DaemonL3
from tests.client.memory import SmallMemory
from tests.client.support import QUICK, SPEC
from tests.daemon.conftest import ThreadedDaemon, folder, start, start_thread, two_tenants

__all__ = ["folder", "start", "start_thread", "two_tenants"]  # fixtures


class TlsRig:
    """``ca`` signs for the daemon (``server.pem``) and for clients (``client.pem``, which names no tenant)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority(folder)
        self.server = self.ca.issue("server")
        self.client = self.ca.issue("client")

    def settings(self, *, clients: str = "certificate", **changes: object) -> dict[str, object]:
        """Those of the daemon."""
        ca = {"tls_client_ca": str(self.ca.file)} if clients == "certificate" else {}
        return {
            "listen": "127.0.0.1:0",
            "tls_certificate": str(self.server),
            "tls_key": str(self.server),
            "tls_clients": clients,
            **ca,
            **changes,
        }

    def address(self, listen: str, *, ca: Path | None = None, certificate: Path | None = None, name: str = "") -> str:
        """For a client that shows ``certificate``."""
        query = f"ca={ca or self.ca.file}" + (f"&certificate={certificate}" if certificate else "")
        return f"tls://{listen}?{query}" + (f"&name={name}" if name else "")


@pytest.fixture
def rig(folder: Path) -> TlsRig:
    return TlsRig(folder)


@pytest.fixture
def secure(start_thread: Callable[..., ThreadedDaemon], rig: TlsRig, two_tenants: str) -> ThreadedDaemon:
    """A daemon with the tenants alice and bob, on a TCP port that wants certificates."""
    return start_thread(tenants_file=two_tenants, **rig.settings())


@pytest.fixture
def new_l3() -> Iterator[Callable[..., DaemonL3]]:
    """Makes clients with memory of their own."""
    with ExitStack() as stack:

        def make(address: str, *, size_bytes: int = 1 << 20, **changes: Any) -> DaemonL3:  # Any: what DaemonL3 takes
            memory = SmallMemory(size_bytes)
            stack.callback(memory.close)
            client = DaemonL3(address, **{"spec": SPEC, "memory": memory, "settings": QUICK, **changes})
            client.test_memory = memory  # type: ignore[attr-defined]
            stack.callback(client.close)
            return client

        yield make
