"""What the tests of connectors share with those of the clients."""

from __future__ import annotations

from tests.client.conftest import daemon, folder

__all__ = ["daemon", "folder"]
