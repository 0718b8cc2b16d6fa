"""Adapters are known by content; where that is in doubt, they are not cached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.connectors.adapters import AdapterIdentities
from hicache.connectors.checkpoint import fingerprint_adapter

WEIGHTS = "adapter_model.safetensors"


class Reader:
    """Reads when it is let, and says when it has read."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.has_read = threading.Semaphore(0)
        self.may_read.set()

    def __call__(self, folder: Path) -> bytes:
        assert self.may_read.wait(20)
        try:
            return fingerprint_adapter(folder)
        finally:
            self.has_read.release()


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def adapters(reader: Reader) -> Iterator[AdapterIdentities]:
    adapters = AdapterIdentities(read=reader)
    yield adapters
    reader.may_read.set()
    adapters.close()


def lora(folder: Path, *, content: bytes | None = None, number: int = 1, load_inplace: bool = False) -> Any:
    if content is not None:
        folder.mkdir(exist_ok=True)
        (folder / WEIGHTS).write_bytes(content)
    return SimpleNamespace(lora_name="name", lora_int_id=number, lora_path=str(folder), load_inplace=load_inplace)


def identity(adapters: AdapterIdentities, request: Any) -> bytes:
    """Once it is read."""
    for _ in range(20_000):
        if (content := adapters.identity(request)) is not None:
            return content
        threading.Event().wait(0.001)
    raise AssertionError("the adapter is never read")


def test_an_adapter_is_not_cached_before_it_is_read(
    adapters: AdapterIdentities, reader: Reader, tmp_path: Path
) -> None:
    reader.may_read.clear()
    request = lora(tmp_path / "a", content=b"1")
    assert [adapters.identity(request) for _ in range(3)] == [None] * 3
    reader.may_read.set()
    assert identity(adapters, request) == fingerprint_adapter(tmp_path / "a")


def test_the_same_content_is_the_same_adapter_whatever_its_path_and_name(
    adapters: AdapterIdentities, tmp_path: Path
) -> None:
    one = identity(adapters, lora(tmp_path / "a", content=b"1"))
    assert one == identity(adapters, lora(tmp_path / "b", content=b"1", number=2))
    assert one != identity(adapters, lora(tmp_path / "c", content=b"2", number=3))


def test_an_adapter_whose_files_change_is_not_cached_until_it_is_loaded_anew(
    adapters: AdapterIdentities, tmp_path: Path
) -> None:
    first = identity(adapters, lora(tmp_path / "a", content=b"1"))
    changed = lora(tmp_path / "a", content=b"2")
    assert adapters.identity(changed) is None
    assert identity(adapters, lora(tmp_path / "a", number=2)) not in (None, first)
    assert adapters.identity(changed) is None


def test_files_that_change_while_they_are_read_are_not_cached(
    adapters: AdapterIdentities, reader: Reader, tmp_path: Path
) -> None:
    reader.may_read.clear()
    request = lora(tmp_path / "a", content=b"1")
    assert adapters.identity(request) is None
    lora(tmp_path / "a", content=b"2")
    reader.may_read.set()
    assert reader.has_read.acquire(timeout=20)
    assert adapters.identity(request) is None


def test_an_adapter_that_is_replaced_in_place_or_is_not_here_is_never_cached(
    adapters: AdapterIdentities, tmp_path: Path
) -> None:
    assert adapters.identity(lora(tmp_path / "a", content=b"1", load_inplace=True)) is None
    assert adapters.identity(lora(tmp_path / "nowhere")) is None


def test_an_adapter_that_cannot_be_read_is_not_cached(tmp_path: Path) -> None:
    read = threading.Event()

    def fail(folder: Path) -> bytes:
        read.set()
        raise OSError("broken")

    adapters = AdapterIdentities(read=fail)
    request = lora(tmp_path / "a", content=b"1")
    assert adapters.identity(request) is None
    assert read.wait(20)
    adapters.close()
    assert adapters.identity(request) is None
