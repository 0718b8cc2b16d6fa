"""The contract of a shared backend, kept by a RAM tier in front of a real Mooncake store, and what a daemon tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.base import Backend
from hicache.backends.open import open_store
from hicache.backends.ram_tier import SharedRamTier
from hicache.backends.shared_store import SharedStore
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from tests.backends.mooncake_cluster import MIB, MooncakeCluster, require_wheel
from tests.backends.payloads import get, key, payload, put
from tests.backends.test_mooncake_contract import TestMooncakeBackend as MooncakeContract
from tests.backends.test_mooncake_contract import cluster, raw  # noqa: F401  # fixtures

require_wheel()


class TestSharedRamTier(MooncakeContract):
    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        inner = super().open(directory, capacity_bytes=capacity_bytes)
        return SharedRamTier(inner, capacity_bytes=8 * MIB)  # type: ignore[arg-type]  # it is a shared one


del MooncakeContract  # its own tests run where it is defined


def test_a_url_opens_the_tier_and_hot_objects_are_read_from_it(
    cluster: MooncakeCluster,  # noqa: F811  # as above
) -> None:
    store = open_store(cluster.settings(ram_bytes=8 * MIB).url(), capacity_bytes=0, object_bytes_max=MIB)
    assert isinstance(store, SharedStore)
    assert put(store, (key(1), payload(1, MIB))) == [Outcome.OK]  # type: ignore[arg-type]  # same calls
    for _ in range(3):
        assert get(store, key(1), MIB) == (Outcome.OK, payload(1, MIB))  # type: ignore[arg-type]  # as above
    told = {number.name: number.value for number in store.numbers()}
    assert told["hicache_ram_hits"] == 2
    assert told["hicache_ram_used_bytes"] == MIB
    assert told["hicache_mooncake_breaker_open"] == 0
    store.close()
    with pytest.raises(ConfigError, match=r"mooncake_ram_bytes.*less than there is"):
        open_store(cluster.settings(ram_bytes=1 << 62).url(), capacity_bytes=0, object_bytes_max=MIB)
