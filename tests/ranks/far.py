"""A leader's links and the far ends of them, which say whatever a test wants."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from hicache.jobs import Completion
from hicache.ranks.gathering import gather
from hicache.ranks.leader import RankLinks
from hicache.ranks.messages import (
    FRAME_BYTES_MAX,
    RANK_PROTOCOL_VERSION,
    WORKER_DECODER,
    FrameReader,
    Hello,
    Pulse,
    ToWorker,
    Welcome,
    frame,
)
from hicache.ranks.settings import Ranks

WAIT_S = 20.0


def hello(rank: int = 1, **changes: object) -> Hello:
    said = Hello(
        version=RANK_PROTOCOL_VERSION,
        token="secret",
        rank=rank,
        descriptor={"model": "m", "page_tokens": 4, "window": None, "salt": b"x"},
        l1_slots=(8, 0),
        l2_slots=(4, 0),
        l1_bytes=0,
        has_l3=True,
    )
    return msgspec.structs.replace(said, **changes)


class Far:
    """The far end of a connection to the leader, which says whatever a test wants."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(WAIT_S)
        while True:
            try:
                self.socket.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                continue
            break
        self.reader = FrameReader(bytes_max=FRAME_BYTES_MAX)
        self.heard: list[ToWorker] = []

    def say(self, *messages: object) -> None:
        for message in messages:
            self.socket.sendall(message if isinstance(message, bytes) else frame(message))

    def hear(self) -> ToWorker | None:
        """The next message that is no pulse; None when the leader has hung up."""
        while True:
            while self.heard:
                message = self.heard.pop(0)
                if not isinstance(message, Pulse):
                    return message
            try:
                received = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not received:
                return None
            self.heard += [WORKER_DECODER.decode(payload) for payload in self.reader.feed(received)]


class Leader:
    """Links to one scripted rank."""

    def __init__(self, ranks: Ranks) -> None:
        with ThreadPoolExecutor(1) as pool:
            gathered = pool.submit(gather, ranks, hello(0), missing={1})
            self.far = Far(ranks.endpoint)
            self.far.say(hello())
            self.links = RankLinks(ranks, *gathered.result(WAIT_S))
        self.changed = threading.Condition()
        self.completions: list[tuple[int, Completion]] = []
        self.lost: list[tuple[int, str]] = []
        self.links.start(on_complete=self.on_complete, on_lost=self.on_lost)
        assert isinstance(self.far.hear(), Welcome)

    def on_complete(self, rank: int, completion: Completion) -> None:
        with self.changed:
            self.completions.append((rank, completion))
            self.changed.notify_all()

    def on_lost(self, rank: int, reason: str) -> None:
        with self.changed:
            self.lost.append((rank, reason))
            self.changed.notify_all()

    def why_lost(self) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: self.lost, WAIT_S)
            assert [rank for rank, _ in self.lost] == [1]
            return self.lost[0][1]
