"""SGLang as released, on a CPU, and stores for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

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

    from sglang.srt.plugins.hook_registry import HookRegistry

    from hicache.connectors import sglang_plugin

    sglang_plugin.register()  # as SGLang itself does where hicache is installed
    HookRegistry.apply_hooks()

    from tests.engines.sglang.devices import Device
    from tests.engines.sglang.rig import Engine, server

Start: TypeAlias = Callable[..., Engine]


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


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines one after another, each as a server of its own; those before it are closed by then."""
    with contextlib.ExitStack() as running:

        def engine(device: Device, config: dict[str, Any], *, core: str = "rust", **arguments: Any) -> Engine:
            running.close()
            server_args = running.enter_context(server(config, **arguments))
            made = Engine(server_args, device, core=core)
            running.callback(made.close)
            return made

        yield engine
