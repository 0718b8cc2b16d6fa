"""The errors of hicache, as values that carry what explains them."""

from __future__ import annotations

import pickle

import pytest

from hicache.errors import (
    AdminRefused,
    ConfigError,
    DaemonUnreachable,
    HandleError,
    HiCacheError,
    SpecError,
    StorageInUse,
)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("l2_bytes", 3, "at least one page"),
        SpecError("page_tokens", 0, "at least 1"),
        AdminRefused(404, "no such tenant"),
        DaemonUnreachable("/run/hicached.sock", "it is not there"),
        StorageInUse("/var/lib/hicached", "process 12"),
        HandleError("released twice"),
    ],
)
def test_an_error_of_another_process_arrives_with_all_that_it_carries(error: HiCacheError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
