"""Group K: ports, messages, doors and stops of a daemon that somebody has to run."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hicache import CacheSpec, HiCache, PagedGroup
from hicache.admin.client import Admin
from hicache.admin.verbs import NAMESPACES, VERBS
from hicache.client import DaemonL3
from hicache.daemon.config import DaemonConfig, load_config
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from hicache.policies.prefetch import PrefetchPolicy
from hicache.wire.bulk import BulkKind
from tests.core.small_engine import ATTENTION, Make, prompt
from tests.daemon.client import Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, Memory, object_key, payload_of
from tests.daemon.rig import TOKEN, DaemonProcess, http_get, refused_start, tenants_file, wait_until
from tests.daemon.test_deployments import OTHER, REFUSED, refusal
from tests.daemon.test_http import ROUTES

Start = Callable[..., DaemonProcess]
MIB = 1 << 20
PAGE = 64 * 1024
KEYS = [object_key(number) for number in range(4)]


def test_br_115_the_same_tcp_port(start: Start, folder: Path) -> None:
    tenants = tenants_file(folder)
    first = start(listen="127.0.0.1:0", tenants_file=tenants)
    elsewhere = {"path": str(folder / "other"), "socket": str(folder / "t.sock"), "ready_file": str(folder / "r2")}
    for listen in (first.ready["listen"], "0.0.0.0:" + first.ready["listen"].split(":")[1]):
        code, line = refused_start(start(wait=False, listen=listen, tenants_file=tenants, **elsewhere))
        assert code == 2
        assert "listen" in line
    for _ in range(20):
        with (
            Client(first.ready["listen"], token=TOKEN) as writer,
            Client(first.ready["listen"], token=TOKEN) as reader,
        ):
            writer.put_stream(KEYS[:1], [b"bytes"])
            assert reader.get_stream(KEYS[:1], [5]) == [b"bytes"]


@pytest.mark.parametrize("setting", ["listen", "http"])
def test_br_115_a_port_that_another_program_holds(start: Start, folder: Path, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        code, line = refused_start(start(wait=False, tenants_file=tenants_file(folder), **{setting: taken}))
        assert code == 2
        assert setting in line
        assert taken in line


def test_br_115_port_zero_reports_the_real_port(start: Start, folder: Path) -> None:
    daemon = start(listen="127.0.0.1:0", tenants_file=tenants_file(folder))
    host, port = daemon.ready["listen"].split(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    wait_until(lambda: daemon.ready["listen"] in daemon.log, what="the log tells the port")
    with Client(daemon.ready["listen"], token=TOKEN) as client:
        assert client.welcome.memory_socket == "", "a remote client cannot share memory"


def test_br_116_objects_around_and_far_above_the_default_message_limit_pass_in_one_call(start: Start) -> None:
    sizes = [MIB, 4 * MIB - 1, 4 * MIB + 1, 64 * MIB]
    keys = [object_key(number) for number in range(len(sizes))]
    daemon = start(capacity_bytes="512MiB")
    with Client(daemon.target) as client, Memory(sum(sizes)) as memory:
        region = client.attach(memory).region_id
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            memory.bytes[offset : offset + size] = payload_of(number, size)
        assert client.put(region, keys, offsets, sizes) == [Outcome.OK] * len(sizes)
        memory.bytes[:] = bytes(len(memory.bytes))

        assert client.get(region, keys, offsets, sizes) == [Outcome.OK] * len(sizes)
        for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            assert memory.bytes[offset : offset + size] == payload_of(number, size)
        assert client.get_stream(keys, sizes) == [payload_of(number, size) for number, size in enumerate(sizes)]

        streamed = [object_key(100 + number) for number in range(len(sizes))]
        payloads = [payload_of(number, size) for number, size in enumerate(sizes)]
        assert client.put_stream(streamed, payloads) == [Outcome.OK] * len(sizes)
        assert client.present(streamed) == [True] * len(sizes)


def test_br_116_ten_thousand_keys_fit_into_one_lookup(client: Client) -> None:
    keys = [object_key(number) for number in range(10_000)]
    assert client.put_stream(keys[5_000:5_001], [b"x"]) == [Outcome.OK]

    present = client.present(keys)

    assert len(present) == 10_000
    assert [index for index, is_present in enumerate(present) if is_present] == [5_000]


def test_br_118_by_default_everything_listens_on_this_machine_only() -> None:
    config = DaemonConfig()
    assert config.http.startswith("127.0.0.1:")
    assert config.listen == ""
    assert config.socket_mode == "0600"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_br_118_no_route_can_change_anything(daemon: ThreadedDaemon, method: str) -> None:
    for route in ROUTES:
        assert http_get(daemon.ready.http, route, method=method)[0] == 405


@pytest.mark.parametrize("path", ["/v1", "/v1/flush", "/debug", "/metrics/../metrics/x", "/run", "/%2e%2e/etc/passwd"])
def test_br_118_there_are_no_other_routes(daemon: ThreadedDaemon, path: str) -> None:
    assert http_get(daemon.ready.http, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9470", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_br_118_a_foreign_host_header_is_refused_on_every_route(daemon: ThreadedDaemon, host: str) -> None:
    for route in ROUTES:
        assert http_get(daemon.ready.http, route, host=host)[0] == 421
    assert daemon.metric("hicache_http_host_refusals_total") == len(ROUTES)


@pytest.mark.parametrize("path", ["/", "/v1/status", "/v1/history", "/v1/events"])
def test_br_118_a_foreign_host_is_told_nothing(daemon: ThreadedDaemon, path: str) -> None:
    assert http_get(daemon.ready.http, path, host="evil.example")[0] == 421


@pytest.mark.parametrize(
    ("tokens", "patience_s"), [(0, 1.0), (1024, 1.25), (1_000, 1.244140625), (100_000, 25.4140625), (1_000_000, 30.0)]
)
def test_br_120_the_timeout_grows_with_the_tokens_up_to_the_hard_cap(tokens: int, patience_s: float) -> None:
    assert PrefetchPolicy().patience_s("timeout", tokens=tokens) == patience_s


def test_br_121_sigterm_ends_the_process_in_time_with_every_kind_of_idle_connection_open(
    start: Start, folder: Path
) -> None:
    daemon = start(listen="127.0.0.1:0", tenants_file=tenants_file(folder))
    kept_alive = http.client.HTTPConnection(daemon.ready["http"])
    kept_alive.request("GET", "/healthz")
    kept_alive.getresponse().read()
    half_a_request = socket.create_connection(daemon.ready["http"].split(":"))
    half_a_request.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n")
    with (
        Client(daemon.target, token=TOKEN) as client,
        Client(daemon.ready["listen"], token=TOKEN) as remote,
        Memory(PAGE) as memory,
    ):
        attachment = client.attach(memory)
        remote.put_stream(KEYS[:1], [payload_of(1, 32 << 20)])
        remote.bulk().request(BulkKind.GET, KEYS[:1], [32 << 20])

        daemon.terminate()

        assert daemon.process.returncode == 0, f"1 from a stop that takes longer than it may\n{daemon.log}"
        assert attachment.is_at_end(within_s=CALL_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(client.stream)
        assert refusal_code(caught.value) == "SHUTTING_DOWN"
    kept_alive.close()
    half_a_request.close()
    assert "Traceback" not in daemon.log
    left_over = {path.name for path in folder.iterdir() if "log" not in path.name}
    assert left_over == {"store", "s.sock.lock", "tenants"}

    with Client(start(tenants_file=tenants_file(folder)).target, token=TOKEN) as client:
        assert client.present(KEYS[:1]) == [True]


def test_br_128_another_geometry_in_a_deployment_is_refused_with_exactly_the_fields_that_differ(
    daemon: ThreadedDaemon,
) -> None:
    with Client(daemon.target, deployment="chat"), Client(daemon.target, deployment="chat") as equal:
        said = refusal(daemon.target, deployment="chat", descriptor=OTHER)
        assert said == REFUSED + "group.0.dtype: None != 'float16'; page_tokens: 64 != 32"
        assert list(equal.welcome.namespace_differs) == []
        with (
            Client(daemon.target, descriptor=OTHER) as unnamed,
            Client(daemon.target, deployment="code", descriptor=OTHER) as elsewhere,
        ):
            assert unnamed.welcome.session_id != elsewhere.welcome.session_id
    assert daemon.metric("hicache_session_refusals_total", code="DEPLOYMENT_MISMATCH") == 1


def test_br_130_metrics_are_served_on_an_address_of_their_own(start_thread: Callable[..., ThreadedDaemon]) -> None:
    daemon = start_thread(http="0.0.0.0:0")
    port = daemon.ready.http.rpartition(":")[2]
    status, text = http_get(f"127.0.0.1:{port}", "/metrics", host="10.1.2.3:9470")
    assert status == 200
    assert "hicache_ready 1.0" in text
    for method, path in (
        ("POST", "/v1/drain"),
        ("POST", "/v1/reload"),
        ("DELETE", "/v1/tenants/x"),
        ("POST", "/v1/verify"),
    ):
        assert http_get(f"127.0.0.1:{port}", path, method=method)[0] in (401, 403, 404, 405), path
    assert daemon.config.admin_socket != daemon.ready.http


@pytest.mark.parametrize("junk", ["nonsense", "host.name:1", "127.0.0.1", "127.0.0.1:70000", "127.0.0.1:x", ":9470"])
def test_br_130_a_junk_address_is_refused_before_the_start(junk: str) -> None:
    with pytest.raises(ConfigError, match="http"):
        load_config(None, {"http": junk})


def test_br_115_two_ways_to_one_directory_are_one_directory(start: Start, folder: Path) -> None:
    """The second guard: another socket, no port, and a link to the store."""
    first = start()
    (folder / "link").symlink_to(folder / "store")
    elsewhere = {"path": str(folder / "link"), "socket": str(folder / "t.sock"), "ready_file": str(folder / "r2")}
    code, line = refused_start(start(wait=False, **elsewhere))
    assert code == 1
    assert f"pid {first.process.pid}" in line


def test_br_116_an_engine_whose_objects_are_too_large_hears_it_when_it_connects(
    start_thread: Callable[..., ThreadedDaemon],
) -> None:
    daemon = start_thread(object_bytes_max=4096)
    spec = CacheSpec("m", "r", (PagedGroup("attn", (0,), heads=1, head_dim=512, dtype="float32"),), page_tokens=64)
    assert spec.object_bytes_max > 4096
    settings = {"l1_pages": 2, "l2_bytes": 16 * spec.object_bytes_max, "l3": f"unix://{daemon.config.socket}"}
    with pytest.raises(ConfigError, match=f"{spec.object_bytes_max} bytes and hicached takes 4096") as caught:
        HiCache.open(spec, deployment="chat", **settings)  # type: ignore[arg-type]  # by name
    assert "raise its object_bytes_max" in str(caught.value)
    fitting = CacheSpec("m", "r", spec.groups, page_tokens=1)
    with HiCache.open(fitting, deployment="chat", **settings) as cache:  # type: ignore[arg-type]  # by name
        assert isinstance(cache.l3, DaemonL3)
        assert cache.l3.wait_ready(timeout_s=20), "the control"


def test_br_118_every_verb_that_there_is_wants_an_operator_over_tcp_and_get_changes_nothing(
    daemon: ThreadedDaemon, client: Client
) -> None:
    """By the router's own table, so that a verb that is added is asked, too."""
    client.put_stream(KEYS[:1], [b"kept"])
    routes = [(route.method, route.path) for route in daemon.daemon.admin.routes(is_guarded=False)]
    assert len(routes) == len(VERBS) > 10
    doors = {verb.path for verb in VERBS if verb.is_public}
    changing = {path for method, path in routes if method != "GET"}
    assert not doors & changing
    for method, path in routes:
        concrete = re.sub(r"{\w+}", "default", path)
        if path not in doors:
            for headers in ({}, {"Authorization": "Bearer guessed-0123456789"}, {"Authorization": "Basic cm9vdDo="}):
                assert ask(daemon, method, concrete, headers) in (401, 403), (method, path, headers)
        if path in changing and ("GET", path) not in routes:
            assert ask(daemon, "GET", concrete, {}) == 405
        assert ask(daemon, method, concrete, {"Host": "evil.example"}) == 421
    assert client.present(KEYS[:1]) == [True]
    assert http_get(daemon.ready.http, "/readyz")[0] == 200, "nobody has drained it"
    assert Admin(daemon.config.admin_socket).ask(NAMESPACES), "the control: the daemon's own user may"


def ask(daemon: ThreadedDaemon, method: str, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(daemon.ready.http, timeout=CALL_S)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_br_120_a_stalled_store_costs_the_cap_however_long_the_prompt_is(make: Make) -> None:
    """The deadline is the request's to see; with no patience at all the request goes on at once."""
    policy = PrefetchPolicy("timeout", base_s=0.0, per_ki_token_s=1e-6, hard_cap_s=1e-6, threshold_tokens=0)
    for pages in (1, 100):
        writer = make(ATTENTION, objects={}, l1=128, l2=128)
        writer.serve(prompt(pages))
        writer.settle()
        assert writer.l3 is not None
        reader = make(ATTENTION, objects=writer.l3.objects, l1=128, l2=256, prefetch=policy)
        assert reader.l3 is not None
        reader.l3.gates["get"].clear()
        request = reader.cache.match(prompt(pages))
        before_s = reader.cache._clock()
        reader.cache.prefetch(request)
        assert before_s <= request.prefetch_deadline_s <= reader.cache._clock() + policy.hard_cap_s
        assert not reader.cache.wait(request)
        restored = reader.cache.load(request)
        assert restored is not None
        assert restored.tokens == 0
        reader.l3.gates["get"].set()
        reader.cache.release(request)
        reader.settle()


def test_br_120_best_effort_uses_what_arrives_in_its_grace_time(make: Make) -> None:
    writer = make(ATTENTION, objects={})
    writer.serve(prompt(6))
    writer.settle()
    assert writer.l3 is not None
    graceful = PrefetchPolicy("best_effort", grace_s=20, threshold_tokens=0)
    idle = make(ATTENTION, objects=writer.l3.objects, prefetch=graceful)
    assert idle.serve(prompt(6)).by_source["l3"] == 24, "all of it, as soon as it is there"
    hurried = make(ATTENTION, objects=writer.l3.objects, prefetch=PrefetchPolicy("best_effort", threshold_tokens=0))
    assert hurried.l3 is not None
    hurried.l3.gates["get"].clear()
    request = hurried.cache.match(prompt(6))
    hurried.cache.prefetch(request)
    assert not hurried.cache.wait(request)
    hurried.l3.gates["get"].set()
    hurried.settle()
    restored = hurried.cache.load(request)
    assert restored is not None
    assert restored.tokens == 24, "what arrives before the engine schedules counts without grace, too"
    hurried.cache.release(request)


def test_br_121_streams_without_an_end_do_not_hold_up_a_stop(start: Start) -> None:
    daemon = start()
    events = http.client.HTTPConnection(daemon.ready["http"], timeout=CALL_S)
    events.request("GET", "/v1/events")
    stream = events.getresponse()
    assert stream.status == 200
    assert stream.read(1)
    with Client(daemon.target) as client:
        client.put_stream(KEYS[:1], [b"kept"])
        watching = client.watch(snapshot=True)
        next(watching)
        daemon.terminate()
        assert daemon.process.returncode == 0, f"1 from a stop that takes longer than it may\n{daemon.log}"
        with contextlib.suppress(grpc.RpcError):
            list(watching)  # ends
    stream.close()
    events.close()
    with Client(start().target) as client:
        assert client.get_stream(KEYS[:1], [4]) == [b"kept"]
