"""What the tests of connectors share with those of the clients."""

from __future__ import annotations

from tests.client.conftest import daemon, folder
from tests.daemon.conftest import start_thread

__all__ = ["daemon", "folder", "start_thread"]
