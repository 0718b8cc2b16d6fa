"""The admin API: who may ask what, what is refused in which words, and how its client takes every fault."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType

import msgspec
import pytest

from hicache.admin.client import Admin
from hicache.admin.verbs import BODY_BYTES_MAX, EVENTS, HISTORY, STATUS, VERBS, Verb
from hicache.daemon.admin_api import AdminApi, AdminError, Call
from hicache.daemon.authority import Authority, Caller
from hicache.daemon.http import HttpServer
from hicache.daemon.socket_lock import listen_unix
from hicache.errors import AdminRefused, ConfigError, DaemonUnreachable
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import http_get


class Weight(msgspec.Struct):
    grams: int


ADD = Verb("weights.add", "POST", "/v1/weights/{name}", Weight, dict)


class Everybody(Authority):
    """Lets alice do what is about her."""

    def who(self, request: object) -> Caller:
        return Alice("alice")


class Alice(Caller):
    def may(self, verb: str, tenant: str | None) -> bool:
        return tenant == "alice"


@pytest.fixture
async def api(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[AdminApi, Admin]]:
    """An API of ADD alone, for callers who are alice, and a client."""
    monkeypatch.setattr("hicache.daemon.admin_api.VERBS", (ADD,))
    made = AdminApi(Everybody(), state=lambda: "recovering")
    server = HttpServer(made.routes(is_guarded=True), on_foreign_host=lambda: None)
    path = await server.start(listen_unix("socket", str(folder / "a.sock"), mode=0o600))
    yield made, Admin(path, timeout_s=10)
    await server.stop()


async def ask(admin: Admin, body: object, **names: object) -> object:
    return await asyncio.to_thread(admin.ask, ADD, body, names={"name": "bread/1", "tenant": "alice"} | names)


async def test_a_verb_gets_its_names_and_its_body_and_answers_in_json(api: tuple[AdminApi, Admin]) -> None:
    made, admin = api

    async def add(call: Call[Weight]) -> dict[str, object]:
        return {"name": call.names["name"], "grams": call.body.grams, "tenant": call.tenant, "by": call.caller.name}

    made.serve(ADD, add)
    assert await ask(admin, Weight(7)) == {"name": "bread/1", "grams": 7, "tenant": "alice", "by": "alice"}
    with pytest.raises(AdminRefused, match="tenant 'bob' is not for alice") as refused:
        await ask(admin, Weight(7), tenant="bob")
    assert refused.value.status == 403


async def test_what_a_handler_raises_becomes_an_answer_in_its_words(api: tuple[AdminApi, Admin]) -> None:
    made, admin = api
    raised: list[BaseException] = []

    async def add(_: Call[Weight]) -> dict[str, object]:
        raise raised[0]

    with pytest.raises(AdminRefused, match="cannot be done while hicached is recovering") as refused:
        await ask(admin, Weight(1))
    assert refused.value.status == 503
    made.serve(ADD, add)
    for error, status, words in (
        (AdminError(409, "grams = 1: there is one already; change it instead"), 409, "there is one already"),
        (ConfigError("grams", 1, "at least 2"), 400, "grams = 1: expected at least 2"),
        (TimeoutError(), 503, "did not answer in time; try again"),
        (ZeroDivisionError(), 500, "its log says more"),
    ):
        raised[:] = [error]
        with pytest.raises(AdminRefused, match=words) as refused:
            await ask(admin, Weight(1))
        assert refused.value.status == status


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not what /v1/weights/{name} takes"),
        (b"[" * 5000, 400, "not what /v1/weights/{name} takes"),
        (b'{"grams": "many"}', 400, "Expected `int`, got `str`"),
        (b'{"grams": 1, "x": "' + b"x" * BODY_BYTES_MAX + b'"}', 413, f"more than {BODY_BYTES_MAX} bytes"),
        (b"\xff\xfe", 400, "not what /v1/weights/{name} takes"),
    ],
)
async def test_a_body_is_bounded_and_typed(api: tuple[AdminApi, Admin], body: bytes, status: int, words: str) -> None:
    made, admin = api

    async def add(_: Call[Weight]) -> dict[str, object]:
        raise AssertionError("a bad body got here")

    made.serve(ADD, add)
    with pytest.raises(AdminRefused, match=words) as refused:
        await ask(admin, (body,) if body else ())
    assert refused.value.status == status


async def test_a_body_that_never_ends_is_given_up(api: tuple[AdminApi, Admin], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.daemon.admin_api.BODY_TIMEOUT_S", 0.05)
    made, admin = api

    async def add(_: Call[Weight]) -> dict[str, object]:
        raise AssertionError("a body that never ended got here")

    made.serve(ADD, add)
    reader, writer = await asyncio.open_unix_connection(admin.address)
    writer.write(b"POST /v1/weights/a?tenant=alice HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n{")
    assert b"408" in await reader.readline()
    writer.close()


def test_every_verb_is_served_and_no_other_route(daemon: ThreadedDaemon, admin: Admin) -> None:
    assert len({verb.name for verb in VERBS}) == len({(verb.method, verb.path) for verb in VERBS}) == len(VERBS)
    assert all(verb.method == "GET" for verb in VERBS if verb.is_public)
    with pytest.raises(AdminRefused, match="GET /v1/no/such: Not Found"):
        admin.ask(Verb("no", "GET", "/v1/no/such", NoneType, dict))
    with pytest.raises(AdminRefused, match="DELETE /v1/status: Method Not Allowed"):
        admin.ask(Verb("no", "DELETE", "/v1/status", NoneType, dict))


def test_the_kernel_says_who_an_operator_is(
    daemon: ThreadedDaemon, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admin.ask(STATUS).state == "ready"
    monkeypatch.setattr("hicache.daemon.authority.os.geteuid", lambda: 4321)
    if os.getuid() != 0:  # root is always one
        with pytest.raises(AdminRefused, match=f"status is not for uid {os.getuid()}"):
            admin.ask(STATUS)


def test_over_tcp_only_what_is_public_is_told(daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    over_tcp = Admin(daemon.ready.http)
    assert over_tcp.ask(STATUS).state == "ready"
    assert over_tcp.ask(HISTORY).samples == []
    for verb in VERBS:
        if not verb.is_public:
            status, body = http_get(daemon.ready.http, verb.path.replace("{", "").replace("}", ""), method=verb.method)
            assert status in (401, 403), verb
            assert json.loads(body)["error"]


@contextmanager
def answering(folder: Path, answer: bytes | None) -> Iterator[str]:
    """A socket that answers one request so, or never."""
    path = str(folder / "fake.sock")
    done = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if answer is None:
                    done.wait(10)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (None, DaemonUnreachable, "no answer in time"),
        (b"", DaemonUnreachable, "cannot be asked"),
        (b"SSH-2.0-OpenSSH\r\n", DaemonUnreachable, "cannot be asked"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", DaemonUnreachable, "cannot be asked"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", AdminRefused, "what this hicache cannot read"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", AdminRefused, "404 Not Found"),
        (b'HTTP/1.1 409 No\r\nContent-Length: 13\r\n\r\n{"error":"a"}', AdminRefused, "a"),
    ],
)
def test_a_client_takes_every_fault_of_the_daemon(
    folder: Path, answer: bytes | None, error: type[Exception], words: str
) -> None:
    with answering(folder, answer) as path, pytest.raises(error, match=words):
        Admin(path, timeout_s=0.3).ask(STATUS)


def test_a_client_says_what_is_wrong_with_where_it_asks(folder: Path) -> None:
    for address in ("", "here", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="the absolute path of the admin socket, or host:port"):
            Admin(address)
    with pytest.raises(DaemonUnreachable, match="there is no such socket: is hicached running"):
        Admin(str(folder / "none")).ask(STATUS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DaemonUnreachable, match="nobody listens"):
        Admin(f"127.0.0.1:{port}").ask(STATUS)


def test_a_stream_that_falls_silent_is_given_up(folder: Path) -> None:
    with (
        answering(folder, None) as path,
        pytest.raises(DaemonUnreachable, match="no answer in time"),
        Admin(path).open(EVENTS, silence_s=0.1) as parts,
    ):
        next(parts)


def test_connections_of_one_address_are_bounded(daemon: ThreadedDaemon) -> None:
    from hicache.daemon.http import CONNECTIONS_MAX

    silent = [socket.create_connection(tuple(daemon.ready.http.split(":"))) for _ in range(CONNECTIONS_MAX + 4)]
    try:
        connection = http.client.HTTPConnection(daemon.ready.http, timeout=10)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        for one in silent:
            one.close()


@pytest.mark.parametrize("kept_bytes", [0, 20, 60])
def test_an_answer_that_ends_in_its_head_is_no_empty_one(folder: Path, kept_bytes: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "a.sock"))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(head[:kept_bytes])

        answering = threading.Thread(target=answer)
        answering.start()
        with (
            pytest.raises(DaemonUnreachable),
            Admin(str(folder / "a.sock"), timeout_s=10).open(EVENTS) as parts,
        ):
            b"".join(parts)
        answering.join()


async def test_a_caller_who_goes_away_in_the_middle_is_no_fault_of_hicached() -> None:
    from aiohttp import web
    from aiohttp.test_utils import make_mocked_request
    from structlog.testing import capture_logs

    from hicache.daemon.admin_api import json_errors

    async def gone(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    async def broken(request: web.Request) -> web.StreamResponse:
        raise KeyError("a defect")

    levels = []
    for handler in (gone, broken):
        with capture_logs() as lines:
            await json_errors(make_mocked_request("GET", "/v1/namespaces/x/export"), handler)
        levels.append([line["log_level"] for line in lines])
    assert levels == [["info"], ["error"]]
