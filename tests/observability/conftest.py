"""Daemons in threads of the test, as the tests of hicached have them."""

from tests.daemon.conftest import daemon, folder, start_thread, two_tenants  # noqa: F401
