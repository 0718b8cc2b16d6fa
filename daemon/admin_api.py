"""The admin API: finds the handler of a verb, asks whether its caller may, reads the body, and answers in JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Generic

import msgspec
import structlog
from aiohttp import web

from hicache.admin.verbs import BODY_BYTES_MAX, VERBS, Answer, Body, Stream, Verb
from hicache.daemon.authority import Authority, Caller
from hicache.errors import ConfigError, HiCacheError
from hicache.workers import QueueFull

BODY_TIMEOUT_S = 5.0  # for a body of BODY_BYTES_MAX to arrive

log = structlog.get_logger("hicache.daemon.admin")


class AdminError(Exception):
    """A verb cannot be done. The text names what was asked, the limit and the way out, and goes to the caller."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Call(Generic[Body]):
    """One request: who asks, the names in its path and query, and its body."""

    caller: Caller
    names: Mapping[str, str]
    body: Body

    @property
    def tenant(self) -> str | None:
        """The tenant that is asked about; None: all of them."""
        return self.names.get("tenant")


Handler = Callable[[Call[Any]], Awaitable[object]]  # Any: serve() sees to the types of each verb
StreamHandler = Callable[[Call[Any], web.Request], Awaitable[web.StreamResponse]]


class AdminApi:
    """Serves the verbs that have a handler; for the others it is too early, and that is what is answered."""

    def __init__(self, authority: Authority, *, state: Callable[[], str]) -> None:
        """``state`` says ``ready``, or what the daemon is doing instead."""
        self._authority = authority
        self._state = state
        self._handlers: dict[str, Handler] = {}
        self._stream_handlers: dict[str, StreamHandler] = {}

    def serve(self, verb: Verb[Body, Answer], handler: Callable[[Call[Body]], Awaitable[Answer]]) -> None:
        """From now on ``handler`` does ``verb``. What it raises becomes the answer: AdminError with its status,
        ConfigError as 400, TimeoutError and QueueFull as 503, and other errors of hicache as 500."""
        self._handlers[verb.name] = handler

    def serve_stream(
        self, verb: Verb[Body, Any], handler: Callable[[Call[Body], web.Request], Awaitable[web.StreamResponse]]
    ) -> None:
        """As ``serve`` for a verb that answers, or with a body of Stream is sent, part by part."""
        self._stream_handlers[verb.name] = handler

    def routes(self, *, is_guarded: bool) -> list[web.RouteDef]:
        """All verbs. Where ``is_guarded`` is false, the public ones are done whoever asks."""
        return [web.route(verb.method, verb.path, self._route(verb, is_guarded=is_guarded)) for verb in VERBS]

    def _route(
        self, verb: Verb[Any, Any], *, is_guarded: bool
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await self._answer(verb, request, is_guarded=is_guarded)
            except AdminError as error:
                return error_response(error.status, str(error))
            except ConfigError as error:
                return error_response(400, str(error))
            except (TimeoutError, QueueFull):
                return error_response(503, f"{verb.name}: the storage did not answer in time; try again")
            except HiCacheError as error:
                log.error("a verb failed", verb=verb.name, reason=str(error))
                return error_response(500, str(error))

        return answer

    async def _answer(self, verb: Verb[Any, Any], request: web.Request, *, is_guarded: bool) -> web.StreamResponse:
        names = {**request.query, **request.match_info}
        caller = self._authority.who(request)
        if (is_guarded or not verb.is_public) and not caller.may(verb.name, names.get("tenant")):
            about = f" about tenant {names['tenant']!r}" if "tenant" in names else ""
            raise AdminError(
                403, f"{verb.name}{about} is not for {caller.name}: ask as root or hicached's user, or with a token"
            )
        handler, stream_handler = self._handlers.get(verb.name), self._stream_handlers.get(verb.name)
        if handler is None and stream_handler is None:
            raise AdminError(
                503, f"{verb.name} cannot be done while hicached is {self._state()}; try again when it is ready"
            )
        call = Call(caller, names, await _read_body(verb, request))
        if stream_handler is not None:
            return await stream_handler(call, request)
        assert handler is not None
        return web.Response(body=msgspec.json.encode(await handler(call)), content_type="application/json")


async def _read_body(verb: Verb[Body, Answer], request: web.Request) -> Body:
    if verb.body is Stream or verb.body is NoneType:
        return None  # type: ignore[return-value] # Body is None here; a stream is read by its handler
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.content.iter_any():
                raw += part
                if len(raw) > BODY_BYTES_MAX:
                    raise AdminError(
                        413, f"{verb.name}: the body has more than {BODY_BYTES_MAX} bytes, which is the most"
                    )
    except TimeoutError as error:
        raise AdminError(408, f"{verb.name}: the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    try:
        return msgspec.json.decode(bytes(raw), type=verb.body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise AdminError(400, f"{verb.name}: the body is not what {verb.path} takes: {error}") from error


def error_response(status: int, text: str) -> web.Response:
    """What every refusal of the API looks like."""
    return web.Response(status=status, body=msgspec.json.encode({"error": text}), content_type="application/json")


@web.middleware
async def json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Routes that are not there, and faults, under /v1 are answered in JSON, too."""
    if not request.path.startswith("/v1"):
        return await handler(request)
    try:
        return await handler(request)
    except web.HTTPException as error:
        return error_response(error.status, f"{request.method} {request.path[:200]}: {error.reason}")
    except ConnectionError as error:  # in the middle of an answer
        log.info("the caller of a verb went away", path=request.path[:200], reason=str(error))
        return error_response(499, "the caller went away")
    except Exception:
        log.exception("a verb failed", path=request.path[:200])
        return error_response(500, "hicached has a fault here; its log says more")
