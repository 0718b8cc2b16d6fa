"""What this machine does at best: memory copies, raw sockets and plain file calls."""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

COPY_BLOCK_BYTES = 1 << 20
WORKING_SET_BYTES = 128 << 20  # per thread and side, far above the caches
SOCKET_BLOCK_BYTES = 1 << 20
_ORDER = struct.Struct("<cQ")  # b"g": send me so many bytes; b"p": so many bytes follow, answer when you have them
_GIGA = 1e9

memory_move = ctypes.CDLL(None).memmove  # releases the GIL, unlike a copy between memoryviews
memory_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memory_move.restype = None


def daemon_copy_threads(io_threads: int) -> int:
    """How many threads of a daemon with so many storage threads can copy at a time."""
    return max(1, min(io_threads, len(os.sched_getaffinity(0))))


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping starts. Valid while it is open."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def touched_memory(size_bytes: int) -> mmap.mmap:
    """Private memory whose pages exist."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(address_of(mapping), 1, size_bytes)
    return mapping


def rate_of(work: Callable[[int], int], *, threads: int) -> float:
    """GB/s of ``work(thread)``, which returns the bytes it moved, in so many threads at a time."""
    moved = [0] * threads

    def run(number: int) -> None:
        moved[number] = work(number)

    others = [threading.Thread(target=run, args=(number,)) for number in range(1, threads)]
    start_s = time.perf_counter()
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
    return sum(moved) / (time.perf_counter() - start_s) / _GIGA


class MemoryCopy:
    """memcpy between touched 4 KiB pages that no cache holds, in blocks of COPY_BLOCK_BYTES."""

    def __init__(self, *, threads: int, working_set_bytes: int = WORKING_SET_BYTES) -> None:
        self.threads = threads
        self._size_bytes = working_set_bytes
        self._pairs = [(touched_memory(working_set_bytes), touched_memory(working_set_bytes)) for _ in range(threads)]
        self._next = [0] * threads

    def measure(self, total_bytes: int) -> float:
        """GB/s of all threads together, over about ``total_bytes``."""
        blocks = max(1, total_bytes // self.threads // COPY_BLOCK_BYTES)
        return rate_of(lambda number: self._copy(number, blocks), threads=self.threads)

    def _copy(self, number: int, blocks: int) -> int:
        source, target = (address_of(mapping) for mapping in self._pairs[number])
        places = self._size_bytes // COPY_BLOCK_BYTES
        for block in range(self._next[number], self._next[number] + blocks):
            offset = block % places * COPY_BLOCK_BYTES
            memory_move(target + offset, source + offset, COPY_BLOCK_BYTES)
        self._next[number] += blocks
        return blocks * COPY_BLOCK_BYTES


def _nameless_file(folder: Path) -> contextlib.closing[io.FileIO]:
    descriptor, name = tempfile.mkstemp(dir=folder)
    os.unlink(name)
    return contextlib.closing(io.FileIO(descriptor, "r+b"))


class FileCalls:
    """pread and pwrite of one warm file per thread in ``folder``: no rename, no checksum, no new pages."""

    def __init__(self, folder: Path, *, threads: int, working_set_bytes: int = WORKING_SET_BYTES) -> None:
        self.threads = threads
        self._size_bytes = working_set_bytes
        self._memory = [touched_memory(working_set_bytes) for _ in range(threads)]
        self._open = contextlib.ExitStack()
        self._files = [self._open.enter_context(_nameless_file(folder)) for _ in range(threads)]
        for file, memory in zip(self._files, self._memory, strict=True):
            file.write(memory)
        self._next = [0] * threads

    def close(self) -> None:
        """Give the disk space back."""
        self._open.close()

    def measure(self, op: str, total_bytes: int) -> float:
        """GB/s of all threads together; ``op`` is ``get`` (pread) or ``put`` (pwrite)."""
        call = self._read if op == "get" else self._write
        blocks = max(1, total_bytes // self.threads // COPY_BLOCK_BYTES)
        return rate_of(lambda number: self._move(number, blocks, call), threads=self.threads)

    def _move(self, number: int, blocks: int, call: Callable[[int, memoryview, int], int]) -> int:
        places = self._size_bytes // COPY_BLOCK_BYTES
        descriptor = self._files[number].fileno()
        moved = 0
        with memoryview(self._memory[number]) as memory:
            for block in range(self._next[number], self._next[number] + blocks):
                offset = block % places * COPY_BLOCK_BYTES
                with memory[offset : offset + COPY_BLOCK_BYTES] as part:
                    moved += call(descriptor, part, offset)
        self._next[number] += blocks
        return moved

    @staticmethod
    def _read(descriptor: int, part: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [part], offset)

    @staticmethod
    def _write(descriptor: int, part: memoryview, offset: int) -> int:
        return os.pwrite(descriptor, part, offset)


# -- raw sockets: a server with a thread for each connection; clients are where the measured clients are ---------------


def raw_socket_addresses(folder: Path) -> dict[str, str]:
    """What ``serve_raw_sockets`` listens on; the TCP port is in a file once it does."""
    return {"unix": str(folder / "raw.sock"), "tcp": str(folder / "raw.port")}


def serve_raw_sockets(folder: Path) -> None:
    """Answer orders on a Unix and a TCP socket until the process is ended."""
    addresses = raw_socket_addresses(folder)
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(addresses["unix"])
    unix.listen()
    tcp = socket.create_server(("127.0.0.1", 0))
    unfinished = Path(addresses["tcp"] + ".new")
    unfinished.write_text(str(tcp.getsockname()[1]))
    unfinished.rename(addresses["tcp"])
    threading.Thread(target=_accept, args=(unix,), daemon=True).start()
    _accept(tcp)


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    block = memoryview(bytearray(SOCKET_BLOCK_BYTES))
    with contextlib.suppress(OSError), connection:
        _without_delay(connection)
        while order := connection.recv(_ORDER.size, socket.MSG_WAITALL):
            op, count = _ORDER.unpack(order)
            if op == b"g":
                _send(connection, block, count)
            else:
                _receive(connection, block, count)
                connection.sendall(b".")


class RawConnection:
    """One client's side of the raw sockets."""

    def __init__(self, kind: str, folder: Path) -> None:
        address = raw_socket_addresses(folder)[kind]
        if kind == "unix":
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address)
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(Path(address).read_text())))
        _without_delay(self._socket)
        self._block = memoryview(bytearray(SOCKET_BLOCK_BYTES))

    def move(self, op: str, count: int) -> None:
        """Receive (``get``) or send (``put``) so many bytes; returns when the other side has them."""
        if op == "get":
            self._socket.sendall(_ORDER.pack(b"g", count))
            _receive(self._socket, self._block, count)
        else:
            self._socket.sendall(_ORDER.pack(b"p", count))
            _send(self._socket, self._block, count)
            _receive(self._socket, self._block, 1)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _without_delay(connection: socket.socket) -> None:
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _blocks(count: int) -> Iterator[int]:
    while count > 0:
        yield min(count, SOCKET_BLOCK_BYTES)
        count -= SOCKET_BLOCK_BYTES


def _send(connection: socket.socket, block: memoryview, count: int) -> None:
    for size_bytes in _blocks(count):
        connection.sendall(block[:size_bytes])


def _receive(connection: socket.socket, block: memoryview, count: int) -> None:
    while count > 0:
        received = connection.recv_into(block[: min(count, len(block))])
        if received == 0:
            raise ConnectionError("the raw socket was closed by the other side")
        count -= received
