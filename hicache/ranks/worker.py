"""The worker's side: a rank in a process of its own, which does what the leader's directory decides."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from hicache.connect import CAPACITY_BYTES_DEFAULT
from hicache.errors import ConfigError, RankLost
from hicache.executor import Executor
from hicache.jobs import Completion, CopyJob, Job
from hicache.l3 import L3
from hicache.pools import L1Pool, L2Pool
from hicache.rank_memory import MemorySettings, RankMemory
from hicache.ranks.introduction import hello_of, introduce
from hicache.ranks.loop import LinkLoop
from hicache.ranks.messages import WORKER_DECODER, Done, Farewell, Pulse, Refused, ToWorker, Welcome, frame
from hicache.ranks.peer import Peer, tick_s
from hicache.ranks.settings import Ranks
from hicache.ranks.step_order import StepOrder
from hicache.spec import CacheSpec

_LOG = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0
_IDLE_LOOK_S = 0.01
_IDLE_LOOKS = 5


class RankWorker:
    """Every rank but the leader's own. The engine computes in it, inside of ``step``; between steps jobs run by
    themselves.

    When the leader is gone, or has given this rank up, every wait ends, ``step`` raises RankLost, and L2 and L3 are
    given back; the process then has to be started again together with all others of the replica.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        rank: int,
        leader: Ranks,
        l1: L1Pool,
        l2: L2Pool | None,
        l3: L3 | None,
        copies: str = "auto",
        waits: bool = True,
    ) -> None:
        """Over pools of the engine's own, such as ``L1Pool.adopt``. Connects to the leader, and waits for its word.

        Takes ``l2`` and ``l3`` over, but for when it raises: ConfigError when the leader does not answer in time, or
        does not take this rank: it then says what differs. Rank 0 is a worker where the leader has no rank.

        Without ``waits`` it introduces itself in the background, for a leader that is made later in this thread: what
        would be raised here ends the worker then, and is the reason that ``wait`` tells and ``step`` raises RankLost
        with.
        """
        if l1.rank.rank != rank:
            raise ConfigError("l1.rank", l1.rank.rank, f"a pool of rank {rank}, like the worker")
        self.spec = spec
        self.rank = rank
        self.l1 = l1
        self.l2 = l2
        self.l3 = l3
        self._copy_timeout_s = leader.copy_timeout_s
        self._order = StepOrder(self._run)
        self._executor = Executor(spec, l1, l2, l3, on_complete=self._on_complete, copies=copies)
        self._hello = hello_of(spec, rank=rank, token=leader.token, l1=l1, l2=l2, has_l3=l3 is not None)
        self._leader = leader
        self._thread = threading.Thread(target=self._work, name="hicache-rank-work", daemon=True)
        self._loop: LinkLoop | None = None  # from the leader's welcome on
        self._peer: Peer[ToWorker] | None = None
        self._silence_timeout_s = 0.0
        self._jobs_seen = 0  # by ``pause``
        self._given_up = threading.Event()
        self._is_over = threading.Event()
        self._reason = ""
        if waits:
            try:
                self._connect()
            except BaseException:
                self._executor.close()
                raise
        self._thread.start()

    @classmethod
    def open(
        cls,
        spec: CacheSpec,
        *,
        rank: int,
        leader: Ranks,
        l1_pages: int = 0,
        l1_state_slots: int = 0,
        l1_bytes: int = 0,
        l2_bytes: int = 0,
        l2_state_share: float = 0.25,
        l3: str | None = None,
        l3_capacity_bytes: int = CAPACITY_BYTES_DEFAULT,
        token: str = "",
        deployment: str = "",
        salt: bytes | None = None,
        device: str = "cpu",
        copies: str = "auto",
        waits: bool = True,
    ) -> Self:
        """Build the pools, connect to L3 and to the leader. Settings as in ``HiCache.open`` on the leader; ``waits``:
        see there where it is made of pools."""
        settings = MemorySettings(
            l1_pages=l1_pages,
            l1_state_slots=l1_state_slots,
            l1_bytes=l1_bytes,
            l2_bytes=l2_bytes,
            l2_state_share=l2_state_share,
            l3=l3,
            l3_capacity_bytes=l3_capacity_bytes,
            token=token,
            deployment=deployment,
            salt=salt,
            device=device,
        )
        memory = RankMemory.open(spec, settings, rank=rank)
        try:
            return cls(
                spec,
                rank=rank,
                leader=leader,
                l1=memory.l1,
                l2=memory.l2,
                l3=memory.l3,
                copies=copies,
                waits=waits,
            )
        except BaseException:
            memory.close()
            raise

    @contextmanager
    def step(self, step: int, *, after: Collection[int] = ()) -> Iterator[None]:
        """Compute in this block: the step that the leader's ``HiCache.step`` or ``SlotCache.step`` has given this
        number.

        Every job that the leader emitted before it has run when the block begins, in this thread; every job that it
        emits later waits until the block ends. Copies that run beside compute have begun; those in ``after`` have
        ended. Raises UsageError for a step out of order, and RankLost.
        """
        self._order.begin(step, timeout_s=self._copy_timeout_s)
        try:
            if not self._executor.wait_done(after, timeout_s=self._copy_timeout_s):
                raise RankLost(f"step {step}: a copy that it waits for has not ended within {self._copy_timeout_s:g} s")
            self._executor.compute_here()
            yield
        finally:
            self._order.end()

    def pause(self, *, timeout_s: float) -> None:
        """For a step that computes nothing, after it: leave the processor to what is waited for, until a job has
        completed here since the last pause, for so long at the most.
        """
        self._jobs_seen = self._executor.wait_completed(beyond=self._jobs_seen, timeout_s=timeout_s)

    def wait_layer(self, layer: int) -> None:
        """See ``HiCache.wait_layer``; needed in every step where the leader is ``layerwise``."""
        self._executor.wait_layer(layer)

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Wait until it is over: the reason, or None when it is not over by then."""
        return self._reason if self._is_over.wait(timeout_s) else None

    def settle(self, *, timeout_s: float) -> bool:
        """Wait until this rank has been idle for a moment: what the leader makes of one job's end comes within it. For
        an engine that closes its ranks before its leader. False when it is over, or was not idle in time.
        """
        until_s = time.monotonic() + timeout_s
        idle = 0
        while idle < _IDLE_LOOKS and time.monotonic() < until_s:
            idle = 0 if any(self._executor.open_jobs().values()) else idle + 1
            if self._is_over.wait(_IDLE_LOOK_S):
                return False
        return idle >= _IDLE_LOOKS

    def close(self) -> None:
        """Leave the replica, which is over then, and free L2. Idempotent. No tensor of ``l2`` may be used after."""
        self._given_up.set()
        if self._peer is not None:
            self._peer.send(frame(Farewell("the worker was closed")))
        self._order.close("the worker was closed")
        self._thread.join(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self) -> None:
        """Have the leader take this rank. Raises ConfigError."""
        link, welcome = introduce(self._leader, self._hello, given_up=self._given_up)
        self._silence_timeout_s = welcome.silence_timeout_s
        self._loop = LinkLoop("hicache-rank", tick_s=tick_s(self._silence_timeout_s), on_tick=self._tick)
        self._peer = Peer(link, self._loop, WORKER_DECODER, on_message=self._on_message, on_end=self._on_end)
        self._loop.start()

    def _on_message(self, message: ToWorker) -> None:
        """In the loop's thread: what L3 does needs no place in the order, and does not wait for a long step."""
        if isinstance(message, Welcome | Refused | Pulse | Farewell):
            self._linked.end(f"it says {type(message).__name__} out of turn")
        elif isinstance(message, CopyJob):
            self._order.add(message.job_id, message)
        else:
            self._executor.submit(message)
            self._order.add(message.job_id, None)

    def _run(self, job: Job) -> None:
        self._executor.submit(job)

    def _on_complete(self, completion: Completion) -> None:
        self._linked.send(frame(Done(completion)))

    def _on_end(self, reason: str) -> None:
        self._order.close(f"rank {self.rank} and its leader have lost each other: {reason}")

    @property
    def _linked(self) -> Peer[ToWorker]:
        assert self._peer is not None, "jobs come from the leader"
        return self._peer

    def _tick(self, now_s: float) -> None:
        self._linked.tick(now_s, silence_timeout_s=self._silence_timeout_s)

    def _work(self) -> None:
        """Run jobs between steps until it is over; then give everything back."""
        if self._peer is None:
            try:
                self._connect()
            except ConfigError as error:
                self._order.close(f"rank {self.rank} has found no leader: {error}")
        self._reason = self._order.work()
        is_planned = self._given_up.is_set() or (self._peer is not None and self._peer.said_farewell)
        _LOG.log(logging.INFO if is_planned else logging.WARNING, "rank %d is over: %s", self.rank, self._reason)
        if self._loop is not None:
            self._loop.stop(timeout_s=_CLOSE_TIMEOUT_S)
            self._linked.end(self._reason)
        if self._executor.close() and self.l2 is not None:  # else hicached may still write there: it is left to it
            self.l2.close()
        self._is_over.set()
