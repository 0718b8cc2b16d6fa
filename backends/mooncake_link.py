"""The one way to call a Mooncake client: in time, on registered memory, and not while the master is away."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hicache.backends.arena import Arena, Extent
from hicache.backends.mooncake_calls import BoundedCalls
from hicache.backends.mooncake_client import StoreClient
from hicache.backends.mooncake_codes import INTERNAL, RPC_FAIL, TRANSFER_FAIL, is_without_master
from hicache.backends.mooncake_master import Master
from hicache.backends.mooncake_nodes import SuspectNodes
from hicache.backends.mooncake_settings import MooncakeSettings
from hicache.breaker import BreakerLimits, BreakerStatus, CircuitBreaker, Permit
from hicache.errors import BackendError
from hicache.notices import Notices
from hicache.outcome import Outcome

QUESTION_THREADS = 4
TRANSFER_THREADS = 8  # a hung node keeps some of them for 5 s each
BYTES_PER_S_MIN = 50 << 20  # slower transfers are given up
CLOSE_TIMEOUT_S = 3.0
LIMITS = BreakerLimits(consecutive_failures_max=1, open_s=0.5, open_s_max=10.0)


@dataclass(frozen=True, slots=True)
class Moved:
    """A transfer that ended in time. Its memory is the caller's until ``extent.release()``."""

    codes: list[int]
    extent: Extent


@dataclass(frozen=True, slots=True)
class Copies:
    """Where an object lies, and how large it is."""

    nodes: frozenset[str]
    size_bytes: int


class Link:
    """Owns the client, its threads and its registered memory. Thread-safe.

    Every call comes back in time. What a transfer writes later goes into memory that nobody has been given.
    """

    def __init__(
        self, client: StoreClient, master: Master, settings: MooncakeSettings, *, clock: Callable[[], float]
    ) -> None:
        """Registers the memory. Raises BackendError when the client does not take it."""
        self._client: StoreClient | None = client
        self._master = master
        self._call_timeout_s = settings.call_timeout_s
        self._clock = clock
        self._notices = Notices(logging.getLogger(__name__))
        self._breaker = CircuitBreaker(LIMITS, clock=clock)
        self._suspects = SuspectNodes(clock=clock)
        self._has_recovered = threading.Event()
        self._staging = Arena(settings.staging_bytes)
        code = client.register_buffer(self._staging.address, self._staging.size_bytes)
        if code != 0:
            client.close()
            limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            limit = "unlimited" if limit_bytes == resource.RLIM_INFINITY else f"{limit_bytes} bytes"
            raise BackendError(
                f"Mooncake does not register {self._staging.size_bytes} bytes (code {code}); RLIMIT_MEMLOCK "
                f"is {limit}: raise it (ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock in containers)"
            )
        self._questions = BoundedCalls("mooncake-question", threads=QUESTION_THREADS)
        self._transfers = BoundedCalls("mooncake-transfer", threads=TRANSFER_THREADS)

    @property
    def staging_bytes(self) -> int:
        """The largest object with its header."""
        return self._staging.size_bytes

    @property
    def staging_free_bytes(self) -> int:
        """What no transfer holds."""
        return self._staging.free_bytes

    @property
    def running(self) -> int:
        """Calls of the client that have not come back."""
        return self._questions.running + self._transfers.running

    def status(self) -> BreakerStatus:
        """Of the breaker in front of the master."""
        return self._breaker.status()

    def take_recovery(self) -> bool:
        """Whether the master was away and is back since this was last asked: it may have forgotten everything."""
        if not self._has_recovered.is_set():
            return False
        self._has_recovered.clear()
        return True

    def suspects(self) -> frozenset[str]:
        """Nodes that did not answer lately."""
        return self._suspects.current()

    def suspect(self, names: Sequence[str]) -> None:
        """The nodes that have these objects did not answer."""
        nodes = {node for copies in self.locate(names).values() for node in copies.nodes} if names else set()
        if nodes:
            self._notices.warning("node", "Mooncake nodes do not answer: %s", ", ".join(sorted(nodes)))
            self._suspects.add(nodes)

    def locate(self, names: Sequence[str]) -> dict[str, Copies]:
        """Where the objects lie that the master tells. Leases them."""
        found: dict[str, Copies] = {}

        def look(client: StoreClient) -> list[int]:
            for name, replicas in client.batch_get_replica_desc(names).items():
                described = [each.get_memory_descriptor() for each in replicas if each.is_memory_replica()]
                buffers = [each.buffer_descriptor for each in described]
                if buffers:
                    nodes = frozenset(buffer.transport_endpoint for buffer in buffers)
                    found[name] = Copies(nodes, max(buffer.size for buffer in buffers))
            return [0] * len(names)

        is_answered = bool(names) and self.ask(look, len(names))[0] == 0
        return found if is_answered else {}

    def ask(self, question: Callable[[StoreClient], list[int]], count: int) -> list[int]:
        """A code for each of ``count`` keys; RPC_FAIL for all without a master that answers in time."""
        permit = self._admit()
        if permit is None:
            return [RPC_FAIL] * count

        def late(codes: list[int] | None) -> None:  # a question has no reason to take long: late is as good as never
            self._judge(permit, None if codes is None else [RPC_FAIL] * count)

        codes = self._questions.run(self._guarded(question, count), timeout_s=self._call_timeout_s, late=late)
        if codes is None:
            return [RPC_FAIL] * count
        self._judge(permit, codes)
        return codes

    def move(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        transfer: Callable[[StoreClient, list[int]], list[int]],
        *,
        deadline_s: float,
        fill: Callable[[Extent], None] | None = None,
    ) -> Moved | Outcome:
        """Run a transfer between the store and a buffer of each size, which ``fill`` fills before.

        ``transfer`` gets the client and the buffers' addresses. An Outcome is that of all: UNAVAILABLE without a
        master, TOO_LARGE, or DEADLINE, after which a transfer that runs keeps its buffers until it ends.
        """
        permit = self._admit()
        if permit is None:
            return Outcome.UNAVAILABLE
        extent = self._staging.acquire(sizes, timeout_s=deadline_s - self._clock())
        if extent is None:
            self._breaker.abandon(permit)
            return Outcome.TOO_LARGE if max(sizes) > self._staging.size_bytes else Outcome.DEADLINE
        if fill is not None:
            fill(extent)

        def late(codes: list[int] | None) -> None:
            extent.release()
            self._judge(permit, codes)
            if codes is not None:
                with suppress(BackendError):  # closed meanwhile
                    self.suspect([name for name, code in zip(names, codes, strict=True) if code == TRANSFER_FAIL])

        allowed_s = self._call_timeout_s + sum(sizes) / BYTES_PER_S_MIN
        codes = self._transfers.run(
            self._guarded(lambda client: transfer(client, extent.addresses), len(names)),
            timeout_s=min(allowed_s, deadline_s - self._clock()),
            late=late,
        )
        if codes is None:
            return Outcome.DEADLINE
        self._judge(permit, codes)
        return Moved(codes, extent)

    def close(self) -> None:
        """Let go of the client; one with calls that hang stays open, and ends with the last of them. Idempotent."""
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        pools = (self._questions, self._transfers)
        is_quiet = [pool.close(timeout_s=until_s - time.monotonic()) for pool in pools]
        client, self._client = self._client, None
        if client is None:
            return
        if not all(is_quiet):
            self._notices.warning("close", "calls of the Mooncake client hang: it was left open")
            return
        client.unregister_buffer(self._staging.address)
        client.close()  # it tells the master that it lives until the last reference is gone: there is no other

    def _admit(self) -> Permit | None:
        """Leave for one call. A probe looks first whether anybody listens there: a call without a master takes 4 s."""
        permit = self._breaker.acquire()
        if permit is not None and permit.is_probe and not self._master.listens():
            self._breaker.fail(permit)
            return None
        return permit

    def _judge(self, permit: Permit, codes: Sequence[int] | None) -> None:
        """Give a permit back. ``codes`` None: the call was never made."""
        if codes is None:
            self._breaker.abandon(permit)
        elif is_without_master(codes):
            self._breaker.fail(permit)
            self._notices.warning("master", "the Mooncake master does not answer: objects are neither read nor stored")
        else:
            if permit.is_probe:
                self._has_recovered.set()
                self._notices.info("recovery", "the Mooncake master answers again")
            self._breaker.succeed(permit)

    def _guarded(self, call: Callable[[StoreClient], list[int]], count: int) -> Callable[[], list[int]]:
        """The call as a function that does not raise, and answers for each key."""
        client = self._client

        def guarded() -> list[int]:
            try:
                codes = call(client) if client is not None else []
            except Exception as error:
                self._notices.error("client", "the Mooncake client failed: %r", error)
                codes = []
            return codes if len(codes) == count else [INTERNAL] * count

        return guarded
