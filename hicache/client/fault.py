"""Why a call to hicached ended without a reply, and what that says about the bytes it was about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import grpc

from hicache.outcome import Outcome
from hicache.tracing import tracer
from hicache.wire.protocol import RefusalCode, parse_refusal

Request = TypeVar("Request")
Reply = TypeVar("Reply")

# hicached says these before it touches a byte: whoever gets one may reuse the memory at once. SHUTTING_DOWN is not
# among them: it may come in the middle of a transfer.
_BEFORE_ANY_BYTE = frozenset(RefusalCode) - {RefusalCode.SHUTTING_DOWN}

# What tells that this client will not get a session by trying again soon.
_LASTING = frozenset(
    {
        RefusalCode.BAD_TOKEN,
        RefusalCode.PROTOCOL_VERSION,
        RefusalCode.BAD_NAMESPACE,
        RefusalCode.KEY_HASH_NOT_ALLOWED,
        RefusalCode.DEPLOYMENT_MISMATCH,
        RefusalCode.MALFORMED,
        RefusalCode.NOT_SUPPORTED,
    }
)
_LASTING_STATUS = {
    grpc.StatusCode.UNIMPLEMENTED: "NOT_HICACHED",
    grpc.StatusCode.UNAUTHENTICATED: "UNAUTHENTICATED",
    grpc.StatusCode.PERMISSION_DENIED: "PERMISSION_DENIED",
}


class FaultKind(StrEnum):
    """What happened to the call."""

    DEADLINE = "deadline"  # no answer in time
    LOST = "lost"  # the connection or the daemon went away, or the call failed inside the daemon
    REFUSED = "refused"  # hicached answered: no


@dataclass(frozen=True, slots=True)
class Fault:
    """A call without a reply. ``code`` is stable, ``detail`` is for people."""

    kind: FaultKind
    code: str
    detail: str
    is_lasting: bool = False  # trying again soon gives the same answer
    leaves_bytes_alone: bool = False  # hicached neither touches nor will touch the memory that the call named

    @property
    def outcome(self) -> Outcome:
        """What each item of the call gets."""
        match self.kind:
            case FaultKind.DEADLINE:
                return Outcome.DEADLINE
            case FaultKind.LOST:
                return Outcome.UNAVAILABLE
            case FaultKind.REFUSED:
                return Outcome.UNAVAILABLE if self.code in _ABOUT_THE_SESSION else Outcome.REFUSED

    @property
    def is_answer(self) -> bool:
        """Whether hicached said something, which means that it is alive."""
        return self.kind is FaultKind.REFUSED

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


_ABOUT_THE_SESSION = frozenset(
    {
        RefusalCode.UNKNOWN_SESSION,
        RefusalCode.UNKNOWN_REGION,
        RefusalCode.TOO_MANY_SESSIONS,
        RefusalCode.TOO_MANY_CALLS,
        RefusalCode.DRAINING,
        RefusalCode.SHUTTING_DOWN,
    }
)

NEVER_SENT = Fault(FaultKind.LOST, "CLOSED", "the session was closed before the call", leaves_bytes_alone=True)

OUT_OF_TIME = Fault(FaultKind.DEADLINE, "DEADLINE_EXCEEDED", "no time was left to call", leaves_bytes_alone=True)


def late_fault(late: int, count: int) -> Fault:
    """hicached answered that so many of the objects were not moved in time: it may still be moving them."""
    return Fault(FaultKind.DEADLINE, "NOT_IN_TIME", f"hicached did not move {late} of {count} objects in time")


def fault_of(error: object) -> Fault:
    """The fault that a ``grpc.RpcError`` stands for. Whatever is not surely an answer counts as none.

    Takes any object because the typed stubs know no RpcError that is a Call, while every one that a call raises is.
    """
    if not isinstance(error, grpc.Call):
        return Fault(FaultKind.LOST, "RPC_ERROR", str(error))
    status = error.code()
    details = "".join(filter(str.isprintable, error.details() or ""))  # gRPC quotes addresses with all their zeros
    fault = refusal_fault(details)
    if fault is not None:
        return fault
    if status in _LASTING_STATUS:
        return Fault(FaultKind.REFUSED, _LASTING_STATUS[status], details, is_lasting=True)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Fault(FaultKind.DEADLINE, status.name, details)
    return Fault(FaultKind.LOST, status.name, details)


def refusal_fault(details: str) -> Fault | None:
    """The fault behind a typed refusal, ``CODE: text``; None where ``details`` is something else."""
    refusal = parse_refusal(details)
    if refusal is None:
        return None
    code, text = refusal
    return Fault(
        FaultKind.REFUSED, code, text, is_lasting=code in _LASTING, leaves_bytes_alone=code in _BEFORE_ANY_BYTE
    )


def call(
    method: Callable[..., Reply],  # a grpc.UnaryUnaryMultiCallable; its stub type names its own request only
    request: object,
    *,
    timeout_s: float,
) -> Reply | Fault:
    """One unary call that ends within ``timeout_s``. Raises nothing for a fault of the peer."""
    if timeout_s <= 0:
        return OUT_OF_TIME
    try:
        metadata = tracer().for_peer()
        return method(request, timeout=timeout_s, metadata=metadata) if metadata else method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        return fault_of(error)
    except ValueError as error:
        if not is_closed_channel(error):
            raise
        return NEVER_SENT


def is_closed_channel(error: ValueError) -> bool:
    """Whether gRPC says that another thread has just closed the channel: it has no type for that, and two wordings."""
    text = str(error).lower()
    return "channel" in text and "closed" in text
