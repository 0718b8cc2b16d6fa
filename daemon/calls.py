"""The frame around every call: its deadline, its metrics, and how refusals and bugs reach the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Never, Protocol

import grpc
import structlog
from google.protobuf.message import DecodeError

from hicache.daemon.call_tally import LASTING_METHODS
from hicache.daemon.metrics import Metrics
from hicache.daemon.refusals import Refusal
from hicache.tracing import NoTracer, Span, tracer
from hicache.wire.protocol import RefusalCode

# Part of the client's time is kept for the way back, so that an answer with outcomes arrives instead of a bare
# DEADLINE_EXCEEDED: a tenth of it, within these bounds.
REPLY_MARGIN_SHARE = 0.1
REPLY_MARGIN_S_MAX = 0.1

# A status waits behind what its client has not read yet; after this the call ends without it.
STATUS_S = 1.0

STATUS_OF = {
    RefusalCode.BAD_TOKEN: grpc.StatusCode.UNAUTHENTICATED,
    RefusalCode.UNKNOWN_SESSION: grpc.StatusCode.UNAUTHENTICATED,
    RefusalCode.PROTOCOL_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.BAD_NAMESPACE: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.KEY_HASH_NOT_ALLOWED: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.DEPLOYMENT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalCode.BATCH_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.TOO_MANY_SESSIONS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.TOO_MANY_CALLS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.NOT_SUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    RefusalCode.UNKNOWN_REGION: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalCode.BAD_STREAM: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalCode.DRAINING: grpc.StatusCode.UNAVAILABLE,
    RefusalCode.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
}

log = structlog.get_logger("hicache.daemon.calls")


class CallContext(Protocol):
    """What the service uses of grpc.aio.ServicerContext; the generated types mix it with the synchronous one."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> Never:
        """Ends the call with a status; raises."""
        ...

    async def read(self) -> Any:  # Any: a message of the call's type, or grpc.aio.EOF
        """The next message of the client."""
        ...

    async def write(self, message: Any) -> None:  # Any: the call's type
        """Sends a message; waits while the client's window is full."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the client gives up."""
        ...

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """What the client has sent beside its message."""
        ...

    def peer(self) -> str:
        """Where the client is: ``unix:...`` or ``ipv4:...``."""
        ...

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """What TLS has found out about the client; ``peer_uri`` has the URIs of its certificate."""
        ...


class Calls:
    """Wraps the methods of the service."""

    def __init__(self, metrics: Metrics, *, call_timeout_s_max: float) -> None:
        self._metrics = metrics
        self._tracer = tracer()
        self._call_timeout_s_max = call_timeout_s_max
        self.active_count = 0  # without LASTING_METHODS

    @asynccontextmanager
    async def frame(self, method: str, context: CallContext) -> AsyncIterator[float]:
        """Runs one call; gives its deadline on the event loop's clock. Refusals become typed statuses."""
        with self._span(method, context) as span, self._metrics.tally.call(method) as result, self._counted(method):
            try:
                yield deadline_after(context.time_remaining(), self._call_timeout_s_max)
            except (Refusal, DecodeError) as error:
                refusal = error if isinstance(error, Refusal) else _not_a_message()
                result.name = refusal.code
                if method == "Session":
                    self._metrics.session_refusals.labels(code=refusal.code).inc()
                log.debug("call refused", method=method, reason=str(refusal))
                await _end(context, STATUS_OF[refusal.code], str(refusal))
            except TimeoutError:
                result.name = "deadline"
                await _end(context, grpc.StatusCode.DEADLINE_EXCEEDED, "not done in time")
            except asyncio.CancelledError:
                result.name = "cancelled"
                raise
            except grpc.aio.InternalError:
                # What a write or read ends with when its client has gone; nobody is left to be told.
                result.name = "cancelled"
            except Exception:
                result.name = "error"
                log.exception("call failed", method=method)
                await _end(context, grpc.StatusCode.INTERNAL, "hicached failed; see its log")
            finally:
                span.set_attributes({"hicached.result": result.name})

    @contextmanager
    def _span(self, method: str, context: CallContext) -> Iterator[Span]:
        """Within the client's own span, if it has told of one; none for calls that last."""
        if not self._tracer.is_on or method in LASTING_METHODS:
            with NoTracer().span(method) as nothing:
                yield nothing
            return
        with (
            self._tracer.from_peer(context.invocation_metadata() or ()),
            self._tracer.span(f"hicached.{method}", is_server=True) as span,
        ):
            yield span

    @contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        if method in LASTING_METHODS:
            yield
            return
        self.active_count += 1
        try:
            yield
        finally:
            self.active_count -= 1


def _not_a_message() -> Refusal:
    """For what came in a stream and could not be read. In other calls gRPC answers that itself."""
    return Refusal(RefusalCode.MALFORMED, "what was sent is no message of this protocol")


def deadline_after(remaining_s: float | None, call_timeout_s_max: float) -> float:
    """When a call with so much time has to be answered, on the clock of the event loop and of ``time.monotonic``."""
    budget_s = call_timeout_s_max if remaining_s is None else min(remaining_s, call_timeout_s_max)
    margin_s = min(budget_s * REPLY_MARGIN_SHARE, REPLY_MARGIN_S_MAX)
    return time.monotonic() + budget_s - margin_s


async def _end(context: CallContext, status: grpc.StatusCode, text: str) -> Never:
    """Ends the call with a status, or, where its client does not read, without one: its stream is reset."""
    try:
        async with asyncio.timeout(STATUS_S):
            await context.abort(status, text)
    except TimeoutError as error:
        raise asyncio.CancelledError(text) from error
