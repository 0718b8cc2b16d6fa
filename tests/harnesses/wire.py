"""A Unix socket of a daemon, with a wire before it that delays, cuts, garbles or holds back what the daemon answers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

DELAY_S = 0.02
PART_BYTES = 1 << 16
FDS_MAX = 16


class Wire:
    """Takes the place of the socket at ``path``; clients connect as before. File descriptors pass, too.

    ``fault`` meets the next answers: of ``FAULTS`` those that a connection can have.
    """

    def __init__(self, path: str) -> None:
        self._real = f"{path}.real"
        self._path = path
        os.rename(path, self._real)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self.fault = ""
        self._at_byte = 0
        self._is_released = threading.Event()
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def arm(self, fault: str, *, at_byte: int = 0) -> None:
        """Whatever the daemon answers from here on meets the fault: is cut behind, or has a wrong bit in, its byte
        ``at_byte``; at 0 all of it is missing, or wrong.
        """
        self._at_byte = at_byte
        self._is_released = threading.Event()
        self.fault = fault

    def release(self) -> None:
        """No fault any more; what was held back goes on (``answers late``) or is lost."""
        self.fault = ""
        self._is_released.set()

    def close(self) -> None:
        """End all connections and put the socket back where it was."""
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._cut(pair)
        for thread in self._threads:
            thread.join()
        if Path(self._real).exists():
            os.rename(self._real, self._path)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="fault-matrix-wire", daemon=True)  # type: ignore[arg-type]  # a method of this class
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            daemon = socket.socket(socket.AF_UNIX)
            try:
                daemon.connect(self._real)
            except OSError:
                client.close()
                daemon.close()
                continue
            pair = client, daemon
            with self._lock:
                self._pairs.add(pair)
            self._start(self._both_ways, pair)

    def _both_ways(self, pair: tuple[socket.socket, socket.socket]) -> None:
        client, daemon = pair
        asking = threading.Thread(target=self._pass_on, args=(client, daemon), name="fault-matrix-wire", daemon=True)
        asking.start()
        self._answer(pair)
        asking.join()
        with self._lock:
            self._pairs.discard(pair)
        client.close()
        daemon.close()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                part, descriptors, _, _ = socket.recv_fds(source, PART_BYTES, FDS_MAX)
                if not part:
                    break
                try:
                    socket.send_fds(target, [part], descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _answer(self, pair: tuple[socket.socket, socket.socket]) -> None:
        client, daemon = pair
        passed = 0  # bytes that have met the fault
        with contextlib.suppress(OSError):
            while part := daemon.recv(PART_BYTES):
                fault, at, is_released = self.fault, self._at_byte - passed, self._is_released
                if fault in ("never answers", "answers late"):
                    is_released.wait()
                if fault in ("EIO", "never answers"):
                    break
                if fault == "short" and len(part) > at:
                    client.sendall(part[:at])
                    break
                if fault == "delay":
                    threading.Event().wait(DELAY_S)
                client.sendall(self._garbled(part, at) if fault == "wrong bytes" else part)
                passed = passed + len(part) if fault else 0
            else:
                client.shutdown(socket.SHUT_WR)
                return
        self._cut(pair)

    def _garbled(self, part: bytes, at: int) -> bytes:
        if self._at_byte == 0:
            return bytes(byte ^ 0xFF for byte in part)
        return part[:at] + bytes([part[at] ^ 0x10]) + part[at + 1 :] if 0 <= at < len(part) else part

    def _cut(self, pair: tuple[socket.socket, socket.socket]) -> None:
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
