"""Files of listening sockets: whose they are, and those that have none."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import AsyncExitStack
from pathlib import Path

from hicache.daemon.listeners import Inherited, Listeners, SocketFiles, address_of


def test_a_socket_with_an_abstract_name_has_no_file_that_could_be_gone() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0hicache-test-{secrets.token_hex(8)}")
        listener.listen()
        passed = Inherited(listener, "socket", address_of(listener))
        listeners = Listeners([passed], AsyncExitStack(), mode=0o600)
        assert listeners.passed("socket", "/somewhere/s.sock") is listener
        assert listeners.files.problem() == ""


def test_what_a_killed_stop_has_put_aside_takes_nobodys_place(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    path.write_text("ours")
    files = SocketFiles()
    files.note(str(path))
    (tmp_path / "new").write_text("of another daemon")
    os.rename(tmp_path / "new", path)
    (tmp_path / "s.sock.kept").write_text("left by a kill")
    with files.keeping_others():
        path.unlink()
    assert path.read_text() == "of another daemon"
    assert [found.name for found in tmp_path.iterdir()] == ["s.sock"]
