"""Typed refusals of whole calls: what the daemon raises, and the gRPC status that it becomes."""

from __future__ import annotations

import grpc

from hicache.wire.protocol import RefusalCode

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


class Refusal(Exception):
    """One call is refused with a reason that its client can act on; nothing else is disturbed."""

    def __init__(self, code: RefusalCode, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.status = STATUS_OF[code]
