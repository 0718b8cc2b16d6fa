"""Spans of OpenTelemetry: from the engine to hicached, without a secret; and nothing without the API."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from hicache.client import DaemonL3
from hicache.client.batch import pack_region_request
from hicache.client.session import Session
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.tracing import NoTracer, OpenTelemetryTracer, _api, tracer
from hicache.wire.bulk import BULK_CALLER, BULK_REQUEST, BulkKind
from tests.client.memory import SmallMemory, UnshareableMemory
from tests.client.small_daemon import SmallDaemon
from tests.client.support import SPEC, get, key, put
from tests.core.memory_l3 import MemoryL3
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, SmallEngine, fill, prompt
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import ALICE, wait_until


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
        wait_until(lambda: bool(named(spans, "hicached.Put")), what="hicached has told of the put")
        [stored, *_] = named(spans, "hicached.Put")
        assert stored.context.trace_id == trace_id
        assert dict(stored.attributes or {})["hicached.result"] == "ok"
    told = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "secret" not in told
    assert engine.cache._keys.root(salt=b"a secret salt").hex() not in told
    values = [value for span in spans.get_finished_spans() for value in (span.attributes or {}).values()]
    assert all(isinstance(value, int) or value in ("ok", "cancelled") for value in values)


def test_a_request_is_one_trace_down_to_the_read_of_the_store(
    spans: InMemorySpanExporter, traced_daemon: ThreadedDaemon
) -> None:
    address = f"unix://{traced_daemon.config.socket}"
    with closing(SmallEngine(HYBRID, address=address)) as writer:
        wait_until(lambda: not writer.cache.l3.status().is_degraded, what="it is connected")  # type: ignore[union-attr]
        writer.serve(prompt(4))
        writer.settle()
    with closing(SmallEngine(HYBRID, address=address)) as reader:
        wait_until(lambda: not reader.cache.l3.status().is_degraded, what="it is connected")  # type: ignore[union-attr]
        spans.clear()
        with trace.get_tracer("engine").start_as_current_span("request") as root:
            assert reader.serve(prompt(4)).by_source["l3"] == 4 * PAGE
        wait_until(lambda: bool(named(spans, "hicached.Get")), what="hicached has told of the get")
    by_id = {span.context.span_id: span for span in spans.get_finished_spans()}
    path, parent = ["hicached.store.get"], named(spans, "hicached.store.get")[0].parent
    while parent is not None:
        path.append(by_id[parent.span_id].name)
        parent = by_id[parent.span_id].parent
    expected = ["hicached.store.get", "hicached.Get", "hicache.l3.fetch", "hicache.l3.lookup", "hicache.prefetch"]
    assert path == [*expected, "request"]
    assert named(spans, "hicached.store.get")[0].context.trace_id == root.get_span_context().trace_id


PATHS = {  # how objects come to a client, and the call that brings them
    "memory": "Get",
    "bounce": "Get",
    "stream": "GetStream",
}


@contextmanager
def moving(daemon: ThreadedDaemon, path: str, *, token: str = "") -> Iterator[DaemonL3]:
    """A client whose objects move that way."""
    address = f"tcp://{daemon.ready.listen}" if path == "stream" else f"unix://{daemon.config.socket}"
    memory = SmallMemory() if path == "memory" else UnshareableMemory()
    with closing(memory), closing(DaemonL3(address, spec=SPEC, memory=memory, token=token)) as l3:
        wait_until(lambda: l3.status().bulk == path, what=f"objects move by {path}")
        yield l3


def move_in_a_span(l3: DaemonL3) -> trace.SpanContext:
    """An object is put and got within one span, which is returned."""
    item = L3Item(key(1), 0, 1000)
    with trace.get_tracer("engine").start_as_current_span("request") as root:
        assert put(l3, [item]) == get(l3, [item]) == [Outcome.OK]
    return root.get_span_context()


@pytest.mark.parametrize("path", PATHS)
def test_calls_about_objects_are_within_the_span_of_the_engine(
    path: str, spans: InMemorySpanExporter, start_thread: Callable[..., ThreadedDaemon], two_tenants: str
) -> None:
    daemon = start_thread(listen="127.0.0.1:0", tenants_file=two_tenants)
    with moving(daemon, path, token=ALICE) as l3:
        root = move_in_a_span(l3)
        methods = {"get": PATHS[path], "put": PATHS[path].replace("Get", "Put")}
        wait_until(
            lambda: all(named(spans, f"hicached.{method}") for method in methods.values()), what="hicached has told"
        )
    for operation, method in methods.items():
        [call] = named(spans, f"hicached.{method}")
        assert (call.context.trace_id, call.kind) == (root.trace_id, trace.SpanKind.SERVER)
        assert call.parent is not None
        assert (call.parent.span_id, call.parent.is_remote) == (root.span_id, True)
        [stored] = named(spans, f"hicached.store.{operation}")
        assert stored.parent is not None
        assert stored.parent.span_id == call.context.span_id
        assert dict(stored.attributes or {}) == {"hicached.objects": 1}


def test_a_client_that_names_no_caller_is_served_in_a_trace_of_its_own(
    spans: InMemorySpanExporter, traced_daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "caller", lambda self: b"")  # as before it could
    with moving(traced_daemon, "memory") as l3:
        move_in_a_span(l3)
        wait_until(lambda: bool(named(spans, "hicached.Get")), what="hicached has told of the get")
    assert named(spans, "hicached.Get")[0].parent is None


@pytest.mark.parametrize("memory", [SmallMemory, UnshareableMemory])
def test_a_hicached_that_knows_no_callers_is_told_of_none(
    memory: type[SmallMemory], spans: InMemorySpanExporter, folder: Path
) -> None:
    old = SmallDaemon(folder).start()  # which takes every bit of the length of a key for what it was
    try:
        with closing(memory()) as bytes_, closing(DaemonL3(old.address, spec=SPEC, memory=bytes_)) as l3:
            assert l3.wait_ready(timeout_s=10)
            assert move_in_a_span(l3).is_valid
    finally:
        old.stop()


def test_without_spans_a_request_is_no_byte_longer() -> None:
    item = L3Item(key(1), 0, 1000)
    plain = pack_region_request(BulkKind.LOAD, 1, [item], timeout_ms=5, caller=tracer().caller())
    assert plain == BULK_REQUEST.pack(BulkKind.LOAD, len(item.key), 1, 5) + item.key + struct.pack("<QQQ", 1000, 0, 1)
    assert not hasattr(tracer(), "has_provider"), "there is none"


def test_a_caller_that_names_none_is_none(spans: InMemorySpanExporter) -> None:
    for caller in (bytes(BULK_CALLER.size), BULK_CALLER.pack(b"t" * 16, bytes(8), 1)):
        with tracer().span("x", caller=caller):
            pass
    assert [span.parent for span in named(spans, "x")] == [None, None]


def test_a_caller_that_is_not_sampled_is_not_sampled_here_whatever_else_it_says(spans: InMemorySpanExporter) -> None:
    for flags in (0xFE, 0xFF):
        with tracer().span("x", caller=BULK_CALLER.pack(b"t" * 16, b"s" * 8, flags)):
            assert len(tracer().caller()) == BULK_CALLER.size
    [span] = named(spans, "x")
    assert span.context.trace_flags == 1
    assert span.parent is not None
    assert span.parent.span_id == int.from_bytes(b"s" * 8)


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
        "assert not t.is_on and t.for_peer() == () and t.caller() == b'' and t.carried(len) is len\n"
        "with t.from_peer([]), t.span('x') as span: span.set_attributes({'a': 1})\n"
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
