"""The leader's side: one link to each other rank, over which every rank gets every job and tells what became of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hicache.errors import ConfigError
from hicache.jobs import Completion, CopyJob, Job
from hicache.pools import L1Pool, L2Pool
from hicache.ranks.gathering import gather
from hicache.ranks.introduction import hello_of
from hicache.ranks.link import Link
from hicache.ranks.loop import LinkLoop
from hicache.ranks.messages import LEADER_DECODER, Done, Farewell, Hello, ToLeader, Welcome, frame
from hicache.ranks.peer import Peer, tick_s
from hicache.ranks.settings import Ranks
from hicache.spec import CacheSpec

_LOG = logging.getLogger(__name__)

OnComplete = Callable[[int, Completion], None]
OnLost = Callable[[int, str], None]


@dataclass(slots=True)
class _OpenJob:
    item_count: int
    copy_until_s: float | None  # None: L3 keeps the deadlines of what it moves, and its word on whose the bytes are


@dataclass(slots=True)
class _Rank:
    peer: Peer[ToLeader] | None  # None: lost
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: dict[int, _OpenJob] = field(default_factory=dict)


class RankLinks:
    """The other ranks of a replica. Every method but ``close`` returns at once.

    A rank whose link ends, that is silent, that has not done a copy in time or that answers what it was not asked, is
    lost: its link is closed, nothing that it says later is heard, and ``on_lost`` is called once. What it still does
    to memory of its own, nobody sees any more.
    """

    def __init__(self, ranks: Ranks, links: dict[int, Link], common: Hello) -> None:
        """``links``: to all ranks but the leader's own; ``common``: what all have said of themselves."""
        self.common = common
        self._copy_timeout_s = ranks.copy_timeout_s
        self._silence_timeout_s = ranks.silence_timeout_s
        self._on_complete: OnComplete = lambda rank, completion: None
        self._on_lost: OnLost = lambda rank, reason: None
        self._is_closing = False
        self._loop: LinkLoop | None = None
        self._ranks: dict[int, _Rank] = {}
        if links:
            self._loop = LinkLoop("hicache-ranks", tick_s=tick_s(ranks.silence_timeout_s), on_tick=self._tick)
            self._ranks = {rank: _Rank(self._peer(rank, link, self._loop)) for rank, link in links.items()}
            self._send_to_all(frame(Welcome(ranks.silence_timeout_s)))

    @property
    def load_timeout_s(self) -> float:
        """How long copies into L1 can take until every rank has done them, or is lost."""
        return 2 * self._copy_timeout_s

    def start(self, *, on_complete: OnComplete, on_lost: OnLost) -> None:
        """Begin to listen. Both are called in a thread of this object, which other ranks wait for: return soon."""
        self._on_complete, self._on_lost = on_complete, on_lost
        if self._loop is not None:
            self._loop.start()

    def submit(self, job: Job) -> None:
        """Send a job to every rank that is not lost: each completes it once, or is lost. Never blocks, never raises."""
        copy_until_s = time.monotonic() + self._copy_timeout_s if isinstance(job, CopyJob) else None
        try:
            framed = frame(job)
        except ValueError as error:
            for rank in self._ranks.values():
                if (peer := rank.peer) is not None:
                    peer.give_up(str(error))
            return
        for rank in self._ranks.values():
            if (peer := rank.peer) is not None:
                with rank.lock:
                    rank.open[job.job_id] = _OpenJob(len(job.items), copy_until_s)
                peer.send(framed)

    def close(self, *, timeout_s: float = 5.0) -> bool:
        """Tell the ranks, and hang up. Nothing is called afterwards. Returns whether the thread has ended."""
        self._is_closing = True
        self._send_to_all(frame(Farewell("the leader was closed")))
        has_ended = self._loop is None or self._loop.stop(timeout_s=timeout_s)
        for rank in self._ranks.values():
            if (peer := rank.peer) is not None:
                peer.end("closed here")
        return has_ended

    def _peer(self, rank: int, link: Link, loop: LinkLoop) -> Peer[ToLeader]:
        return Peer(
            link,
            loop,
            LEADER_DECODER,
            on_message=lambda message: self._heard(rank, message),
            on_end=lambda reason: self._lose(rank, reason),
        )

    def _send_to_all(self, framed: bytes) -> None:
        for rank in self._ranks.values():
            if (peer := rank.peer) is not None:
                peer.send(framed)

    def _heard(self, number: int, message: ToLeader) -> None:
        rank = self._ranks[number]
        peer = rank.peer
        if peer is None:
            return
        if not isinstance(message, Done):
            peer.end(f"it says {type(message).__name__} out of turn")
            return
        completion = message.completion
        with rank.lock:
            job = rank.open.pop(completion.job_id, None)
        if job is None or job.item_count != len(completion.outcomes):
            peer.end(f"it answers job {completion.job_id} with {len(completion.outcomes)} items, which was not asked")
            return
        if not self._is_closing:
            self._on_complete(number, completion)

    def _lose(self, number: int, reason: str) -> None:
        rank = self._ranks[number]
        is_planned = rank.peer is not None and rank.peer.said_farewell
        rank.peer = None
        with rank.lock:
            rank.open.clear()
        if not self._is_closing:
            level = logging.INFO if is_planned else logging.ERROR
            _LOG.log(level, "rank %d is lost: %s; the replica has to be started again", number, reason)
            self._on_lost(number, reason)

    def _tick(self, now_s: float) -> None:
        for rank in self._ranks.values():
            if (peer := rank.peer) is None:
                continue
            with rank.lock:
                late = [number for number, job in rank.open.items() if _is_late(job, now_s)]
            if late:
                peer.end(f"it has not done copy job {late[0]} within {self._copy_timeout_s:g} s")
            else:
                peer.tick(now_s, silence_timeout_s=self._silence_timeout_s)


def open_links(
    spec: CacheSpec, ranks: Ranks | None, *, l1: L1Pool | None, l2: L2Pool | None, has_l3: bool
) -> RankLinks:
    """Links to the other ranks of ``spec``, when all of them have come; none, and no thread, where there is none.

    Without ``l1`` the leader has no rank: rank 0 is one of the others. Raises ConfigError naming the ranks that have
    not come in time, and why others were refused.
    """
    missing = set(range(0 if l1 is None else 1, spec.rank_count))
    if ranks is None and missing:
        raise ConfigError("ranks", ranks, f"where the other ranks of {spec.rank_count} find this one: Ranks(address)")
    settings = ranks or Ranks("unix:///unused")
    own = hello_of(spec, rank=0, token=settings.token, l1=l1, l2=l2, has_l3=has_l3)
    if not missing:
        return RankLinks(settings, {}, own)
    return RankLinks(settings, *gather(settings, own, missing=missing))


def _is_late(job: _OpenJob, now_s: float) -> bool:
    return job.copy_until_s is not None and now_s > job.copy_until_s
