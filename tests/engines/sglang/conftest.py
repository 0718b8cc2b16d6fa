"""SGLang as released, on a CPU, and stores for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.hicached import HicachedProcess
from tests.client.small_daemon import SmallDaemon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what SGLang and its libraries warn of when they are imported
    from tests.engines.sglang import stubs

    stubs.install()
    import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401
    from sglang.srt.mem_cache.utils import get_hash_str

    get_hash_str([1], None, 1)  # compiles the engine's hash function, once for a machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"):
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def hicached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HicachedProcess]:
    """One for all tests of a worker, with tenants: each test says a model revision of its own."""
    process = HicachedProcess(tmp_path_factory.mktemp("hicached"), has_tenants=True)
    process.start()
    yield process
    process.end()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SmallDaemon]:
    """A store that a test can make misbehave."""
    small = SmallDaemon(tmp_path).start()
    yield small
    small.stop()
