"""One daemon for each socket, port and directory: others are told so, and harm nothing."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.client import Client
from tests.daemon.raw_links import object_key
from tests.daemon.rig import DaemonProcess, http_get, refused_start

Start = Callable[..., DaemonProcess]

KEYS = [object_key(number) for number in range(4)]


class TestOneDaemonPerSocketAndDirectory:
    """A second one refuses to start, and says who holds what."""

    def test_the_same_socket(self, start: Start, folder: Path) -> None:
        first = start()
        code, line = refused_start(start(wait=False, path=str(folder / "other"), ready_file=str(folder / "r2")))
        assert code == 1
        assert f"pid {first.process.pid}" in line
        assert str(first.settings["socket"]) in line
        assert http_get(first.ready["http"], "/readyz")[0] == 200

    def test_the_same_directory(self, start: Start, folder: Path) -> None:
        first = start()
        code, line = refused_start(start(wait=False, socket=str(folder / "t.sock"), ready_file=str(folder / "r2")))
        assert code == 1
        assert f"pid {first.process.pid}" in line
        with Client(first.target) as client:
            assert client.present(KEYS) == [False] * 4

    def test_the_socket_of_another_program_is_left_alone(self, start: Start, folder: Path) -> None:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(folder / "s.sock"))
            other.listen()
            code, line = refused_start(start(wait=False))
            assert code == 1
            assert f"pid {os.getpid()}" in line
            assert (folder / "s.sock").exists()

    @pytest.mark.parametrize("name", ["s.sock", "s.sock.memory"])
    def test_a_file_that_is_no_socket_is_not_deleted(self, start: Start, folder: Path, name: str) -> None:
        (folder / name).write_text("precious")
        code, line = refused_start(start(wait=False))
        assert code == 2
        assert name in line
        assert (folder / name).read_text() == "precious"

    def test_the_socket_of_a_killed_daemon_is_replaced(self, start: Start, folder: Path) -> None:
        daemon = start()
        daemon.kill()
        assert stat.S_ISSOCK((folder / "s.sock").lstat().st_mode)
        with Client(start().target) as client:
            assert client.present(KEYS) == [False] * 4
