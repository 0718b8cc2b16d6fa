"""Metrics can be scraped from another host while what changes something stays private."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache.daemon.config import load_config
from hicache.errors import ConfigError
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import http_get


def test_br_130_metrics_are_served_on_an_address_of_their_own(start_thread: Callable[..., ThreadedDaemon]) -> None:
    daemon = start_thread(http="0.0.0.0:0")
    port = daemon.ready.http.rpartition(":")[2]
    status, text = http_get(f"127.0.0.1:{port}", "/metrics", host="10.1.2.3:9470")
    assert status == 200
    assert "hicache_ready 1.0" in text
    for method, path in (
        ("POST", "/v1/drain"),
        ("POST", "/v1/reload"),
        ("DELETE", "/v1/tenants/x"),
        ("POST", "/v1/verify"),
    ):
        assert http_get(f"127.0.0.1:{port}", path, method=method)[0] in (401, 403, 404, 405), path
    assert daemon.config.admin_socket != daemon.ready.http


@pytest.mark.parametrize("junk", ["nonsense", "host.name:1", "127.0.0.1", "127.0.0.1:70000", "127.0.0.1:x", ":9470"])
def test_br_130_a_junk_address_is_refused_before_the_start(junk: str) -> None:
    with pytest.raises(ConfigError, match="http"):
        load_config(None, {"http": junk})
