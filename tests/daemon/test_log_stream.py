"""Log lines hold up nobody: a slow reader loses some and is told, one that is gone is no fault of the daemon."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache.daemon.log_stream import PIECE_BYTES, LogStream

LINE = "x" * 99 + "\n"


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """Of one page."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIECE_BYTES)
    try:
        yield ours, theirs
    finally:
        os.close(theirs)
        os.close(ours)


def test_a_reader_who_is_too_slow_loses_lines_and_hears_how_many() -> None:
    with pipe() as (ours, theirs):
        stream = LogStream(theirs)
        for _ in range(100):
            stream.write(LINE)
        kept = os.read(ours, 1 << 16).decode()
        lost = 100 - kept.count("\n")
        assert 0 < lost < 100
        assert kept == LINE * (100 - lost)
        stream.write("once more\n")
        assert os.read(ours, 1 << 16) == b"%d log lines were lost: nobody read them\nonce more\n" % lost
        stream.write("again\n")
        assert os.read(ours, 1 << 16) == b"again\n"


def test_a_line_longer_than_the_pipe_is_cut_where_it_would_wait() -> None:
    with pipe() as (ours, theirs):
        stream = LogStream(theirs)
        stream.write("y" * 10 * PIECE_BYTES + "\n")
        assert set(os.read(ours, 1 << 20)) == {ord("y")}
        stream.write("once more\n")
        assert os.read(ours, 1 << 16) == b"\n1 log lines were lost: nobody read them\nonce more\n"


def test_what_logs_in_the_middle_of_a_line_does_not_wait_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as file:
        stream = LogStream(file.fileno())
        is_writable = stream._is_writable

        def collect_garbage() -> bool:
            monkeypatch.undo()
            stream.write("Task exception was never retrieved\n")
            return is_writable()

        monkeypatch.setattr(stream, "_is_writable", collect_garbage)
        writing = threading.Thread(target=stream.write, args=("a line\n",), daemon=True)
        writing.start()
        writing.join(timeout=30)
        assert not writing.is_alive()
    assert (tmp_path / "log").read_text() == "Task exception was never retrieved\na line\n"


def test_a_reader_who_is_gone_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        stream = LogStream(theirs.fileno())
        assert stream.write(LINE) == len(LINE)
