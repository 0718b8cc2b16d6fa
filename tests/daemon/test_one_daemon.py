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
from tests.daemon.rig import TOKEN, DaemonProcess, http_get, refused_start, tenants_file, wait_until

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

    def test_br_115_the_same_tcp_port(self, start: Start, folder: Path) -> None:
        tenants = tenants_file(folder)
        first = start(listen="127.0.0.1:0", tenants_file=tenants)
        elsewhere = {"path": str(folder / "other"), "socket": str(folder / "t.sock"), "ready_file": str(folder / "r2")}
        for listen in (first.ready["listen"], "0.0.0.0:" + first.ready["listen"].split(":")[1]):
            code, line = refused_start(start(wait=False, listen=listen, tenants_file=tenants, **elsewhere))
            assert code == 2
            assert "listen" in line
        for _ in range(20):
            with (
                Client(first.ready["listen"], token=TOKEN) as writer,
                Client(first.ready["listen"], token=TOKEN) as reader,
            ):
                writer.put_stream(KEYS[:1], [b"bytes"])
                assert reader.get_stream(KEYS[:1], [5]) == [b"bytes"]

    @pytest.mark.parametrize("setting", ["listen", "http"])
    def test_br_115_a_port_that_another_program_holds(self, start: Start, folder: Path, setting: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            taken = f"127.0.0.1:{holder.getsockname()[1]}"
            code, line = refused_start(start(wait=False, tenants_file=tenants_file(folder), **{setting: taken}))
            assert code == 2
            assert setting in line
            assert taken in line

    def test_br_115_port_zero_reports_the_real_port(self, start: Start, folder: Path) -> None:
        daemon = start(listen="127.0.0.1:0", tenants_file=tenants_file(folder))
        host, port = daemon.ready["listen"].split(":")
        assert (host, int(port) > 0) == ("127.0.0.1", True)
        wait_until(lambda: daemon.ready["listen"] in daemon.log, what="the log tells the port")
        with Client(daemon.ready["listen"], token=TOKEN) as client:
            assert client.welcome.memory_socket == "", "a remote client cannot share memory"

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
