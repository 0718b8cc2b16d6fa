"""Engines, daemons and models for the tests of this folder; every process is ended at the end of its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon.conftest import folder, start, start_thread  # noqa: F401
from tests.daemon.rig import DaemonProcess
from tests.engines.vllm.rig import EngineProcess
from tests.engines.vllm.server import Server

TEST_S = 1200  # starts of engines take seconds each, and minutes where the machine is busy
StartEngine = Callable[..., EngineProcess]
StartServer = Callable[..., Server]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Where the tiny models are: one folder for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "models"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture
def target(start: Callable[..., DaemonProcess]) -> str:  # noqa: F811
    """The address of a hicached process."""
    return f"unix://{start().settings['socket']}"


@pytest.fixture
def engine(tmp_path: Path, models: Path) -> Iterator[StartEngine]:
    """Makes engine processes; see ``EngineProcess``."""
    with ExitStack() as stack:

        def make(*, in_process: bool = True, **environment: str) -> EngineProcess:
            process = EngineProcess(tmp_path, models, in_process=in_process, **environment)
            stack.callback(process.close)
            return process

        yield make


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts HTTP servers; see ``Server``."""
    with ExitStack() as stack:

        def make(model: str, connector: dict[str, object]) -> Server:
            started = Server(tmp_path, model, connector)
            stack.callback(started.close)
            return started.wait_ready()

        yield make
