"""Daemons in processes and in threads of the test, as the tests of hicached have them; a service manager."""

from tests.daemon.conftest import (  # noqa: F401
    client,
    daemon,
    folder,
    memory,
    start,
    start_thread,
    two_tenants,
)
from tests.systemd.conftest import manager  # noqa: F401
