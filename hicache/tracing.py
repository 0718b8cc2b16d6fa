"""Spans for OpenTelemetry, where its API is installed; nothing, at next to no cost, where it is not.

Spans have names, times and counts, and never a token, a salt, a key, the text of an error or a name of a client.
Whether they are sampled, and where they go, is decided by the SDK that the process sets up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from hicache.wire.bulk import BULK_CALLER

if TYPE_CHECKING:
    from opentelemetry.context import Context

TRACEPARENT = "traceparent"  # the only thing that is sent to hicached: no tracestate, no baggage
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")  # W3C, 55 characters

P = ParamSpec("P")
R = TypeVar("R")


class Span(Protocol):
    """What is set of a span."""

    def set_attributes(self, attributes: Mapping[str, str | int | float]) -> None: ...


class _NoSpan:
    def set_attributes(self, attributes: Mapping[str, str | int | float]) -> None:
        """Nothing."""


class NoTracer:
    """Where there is no OpenTelemetry."""

    is_on = False
    _nothing = nullcontext(_NoSpan())

    def span(self, name: str, *, is_server: bool = False, caller: bytes = b"") -> AbstractContextManager[Span]:
        """Nothing."""
        return self._nothing

    def caller(self) -> bytes:
        """Nothing."""
        return b""

    def carried(self, work: Callable[[], R]) -> Callable[[], R]:
        """``work`` itself."""
        return work

    def from_peer(self, metadata: Sequence[tuple[str, str | bytes]]) -> AbstractContextManager[object]:
        """Nothing."""
        return self._nothing

    def for_peer(self) -> tuple[tuple[str, str], ...]:
        """Nothing."""
        return ()


class OpenTelemetryTracer:
    """Through the API, to whichever provider the process has. Thread-safe."""

    is_on = True

    def __init__(self) -> None:
        """Raises ImportError where the API is not installed."""
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._context = context
        self._trace = trace
        self._kinds = trace.SpanKind
        self._get_provider, self._proxy = trace.get_tracer_provider, trace.ProxyTracerProvider
        self._tracer = trace.get_tracer("hicache")
        self._propagator = TraceContextTextMapPropagator()

    @property
    def has_provider(self) -> bool:
        """Whether the process has one: without it, spans would cost 10 us each, and go nowhere."""
        return not isinstance(self._get_provider(), self._proxy)

    def span(self, name: str, *, is_server: bool = False, caller: bytes = b"") -> AbstractContextManager[Span]:
        """A span around the block, within the one that is current, or the peer's that ``caller`` names; one that names
        none counts as nothing."""
        kind = self._kinds.SERVER if is_server else self._kinds.INTERNAL
        return self._tracer.start_as_current_span(
            name,
            context=self._of_peer(caller) if caller else None,
            kind=kind,
            record_exception=False,
            set_status_on_exception=False,
        )

    def caller(self) -> bytes:
        """The current span, for the bulk socket: a BULK_CALLER; empty where there is none."""
        span = self._trace.get_current_span().get_span_context()
        if not span.is_valid:
            return b""
        return BULK_CALLER.pack(span.trace_id.to_bytes(16), span.span_id.to_bytes(8), span.trace_flags)

    def _of_peer(self, caller: bytes) -> Context:
        trace_id, span_id, flags = BULK_CALLER.unpack(caller)
        sampled = self._trace.TraceFlags(flags & self._trace.TraceFlags.SAMPLED)
        ids = int.from_bytes(trace_id), int.from_bytes(span_id)
        span = self._trace.SpanContext(*ids, is_remote=True, trace_flags=sampled)
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(span))

    def carried(self, work: Callable[[], R]) -> Callable[[], R]:
        """``work`` for another thread, which does it within the span that is current here."""
        context = self._context.get_current()

        def within_caller() -> R:
            with self._within(context):
                return work()

        return within_caller

    @contextmanager
    def _within(self, context: Context) -> Iterator[None]:
        token = self._context.attach(context)
        try:
            yield
        finally:
            self._context.detach(token)

    def from_peer(self, metadata: Sequence[tuple[str, str | bytes]]) -> AbstractContextManager[None]:
        """As if the block were where the peer called; what is malformed counts as nothing."""
        carrier = {
            name: value
            for name, value in metadata
            if name == TRACEPARENT and isinstance(value, str) and _TRACEPARENT.fullmatch(value)
        }
        return self._within(self._propagator.extract(carrier))

    def for_peer(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call to hicached."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return ((TRACEPARENT, carrier[TRACEPARENT]),) if TRACEPARENT in carrier else ()


def tracer() -> NoTracer | OpenTelemetryTracer:
    """That of this process: of the provider that it has set up, if it has."""
    api = _api()
    return api if isinstance(api, OpenTelemetryTracer) and api.has_provider else _NO_TRACER


@cache
def _api() -> NoTracer | OpenTelemetryTracer:
    try:
        return OpenTelemetryTracer()
    except ImportError:
        return _NO_TRACER


_NO_TRACER = NoTracer()


class Traced(Protocol):
    """What has methods with spans."""

    _tracer: NoTracer | OpenTelemetryTracer


T = TypeVar("T", bound=Traced)


def traced(
    name: str, counts: Callable[[Any], Mapping[str, int]] | None = None
) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R]]:
    """A span around each call of a method; ``counts`` of its result become attributes."""

    def decorate(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
        @wraps(method)
        def call(self: T, /, *arguments: P.args, **settings: P.kwargs) -> R:
            if not self._tracer.is_on:
                return method(self, *arguments, **settings)
            with self._tracer.span(name) as span:
                result = method(self, *arguments, **settings)
                if counts is not None:
                    span.set_attributes(counts(result))
                return result

        return call

    return decorate
