"""Spans of OpenTelemetry: from the engine to hicached, without a secret; and nothing without the API."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from hicache.tracing import NoTracer, OpenTelemetryTracer, _api, tracer
from tests.core.memory_l3 import MemoryL3
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, SmallEngine, fill, prompt
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import wait_until


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Everything that ends in this process, of engines and daemons made from here on."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    _api.cache_clear()
    yield exporter
    _api.cache_clear()


@pytest.fixture
def traced_daemon(spans: InMemorySpanExporter, daemon: ThreadedDaemon) -> ThreadedDaemon:
    return daemon


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def test_a_request_is_one_trace_from_the_engine_to_hicached(
    spans: InMemorySpanExporter, traced_daemon: ThreadedDaemon
) -> None:
    engine = SmallEngine((ATTENTION,), address=f"unix://{traced_daemon.config.socket}")
    with closing(engine):
        wait_until(lambda: not engine.cache.l3.status().is_degraded, what="it is connected")  # type: ignore[union-attr]
        with trace.get_tracer("engine").start_as_current_span("request") as root:
            engine.serve(prompt(4), salt=b"a secret salt")
            engine.settle()
        trace_id = root.get_span_context().trace_id
        wait_until(lambda: bool(named(spans, "hicached.Lookup")), what="hicached has told of the look-up")
        for name in ("hicache.match", "hicache.prefetch", "hicache.load", "hicache.store", "hicache.l3.lookup"):
            assert [span.context.trace_id for span in named(spans, name)][:1] == [trace_id], name
        [server] = [span for span in named(spans, "hicached.Lookup") if span.context.trace_id == trace_id]
        [client] = named(spans, "hicache.l3.lookup")
        assert server.parent is not None
        assert server.parent.span_id == client.context.span_id
        assert server.parent.is_remote
        assert server.kind is trace.SpanKind.SERVER
        assert dict(server.attributes or {}) == {"hicached.result": "ok"}
        [load] = named(spans, "hicache.load")
        assert dict(load.attributes or {})["hicache.computed_tokens"] == 4 * PAGE + 1
        stored = named(spans, "hicached.Put")
        assert dict(stored[0].attributes or {})["hicached.result"] == "ok"
    told = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "secret" not in told
    assert engine.cache._keys.root(salt=b"a secret salt").hex() not in told
    values = [value for span in spans.get_finished_spans() for value in (span.attributes or {}).values()]
    assert all(isinstance(value, int) or value in ("ok", "cancelled") for value in values)


@pytest.mark.parametrize(
    "traceparent",
    [
        b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01",
        "00-" + "a" * 32 + "-" + "b" * 16 + "-01" + "x" * 10_000,
        "00-" + "A" * 32 + "-" + "b" * 16 + "-01",
        "nonsense",
    ],
)
def test_a_malformed_parent_is_none(traceparent: str | bytes, spans: InMemorySpanExporter) -> None:
    own = tracer()
    with own.from_peer([("traceparent", traceparent), ("tracestate", "a=b"), ("baggage", "x=y")]), own.span("x"):
        pass
    [span] = named(spans, "x")
    assert span.parent is None


def test_a_right_parent_is_taken_without_its_state_and_baggage(spans: InMemorySpanExporter) -> None:
    own = tracer()
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    with own.from_peer([("traceparent", parent), ("tracestate", "a=b")]), own.span("x"):
        assert own.for_peer()[0][1].startswith("00-" + "a" * 32)
        assert len(own.for_peer()) == 1
    [span] = named(spans, "x")
    assert span.parent is not None
    assert not span.parent.trace_state


def test_what_is_not_sampled_is_not_made_and_says_so_to_hicached(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    own = OpenTelemetryTracer()
    with own.span("x"):
        [(_, parent)] = own.for_peer()
        assert int(parent[-2:], 16) & 1 == 0, "hicached would sample it"
    assert exporter.get_finished_spans() == ()


def test_a_fault_ends_its_span_and_tells_no_text(spans: InMemorySpanExporter) -> None:
    with closing(SmallEngine(HYBRID, objects={})) as engine:
        assert isinstance(engine.l3, MemoryL3)
        fill(engine, prompt(4))
        with pytest.raises(ValueError, match="a secret"), tracer().span("x"):
            raise ValueError("a secret")
    [span] = named(spans, "x")
    assert "secret" not in span.to_json()


def test_without_the_api_nothing_is_traced_and_everything_works() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from hicache.tracing import tracer\n"
        "t = tracer()\n"
        "assert not t.is_on and t.for_peer() == ()\n"
        "with t.within(t.here()), t.from_peer([]), t.span('x') as span: span.set_attributes({'a': 1})\n"
        "import hicache.daemon.server, hicache.client\n"
        "print('ok')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ok\n", done.stderr


def test_without_a_provider_nothing_is_traced() -> None:
    assert not tracer().is_on
    assert isinstance(_api(), OpenTelemetryTracer), "the API is there"


def test_no_tracer_makes_no_object() -> None:
    nothing = NoTracer()
    assert nothing.span("x") is nothing.span("y")
