"""What probes and Prometheus ask: /metrics, /healthz and /readyz."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Probes:
    """Answers probes; nothing here changes anything."""

    def __init__(
        self,
        *,
        metrics: Callable[[], Awaitable[bytes]],
        problem: Callable[[], str],
        readiness: Callable[[], str],
    ) -> None:
        """``problem`` says what is wrong with the storage, ``readiness`` ``ready`` or what the daemon does instead."""
        self._metrics = metrics
        self._problem = problem
        self._readiness = readiness

    def routes(self) -> list[web.RouteDef]:
        """Where what is answered."""
        return [
            web.get("/metrics", self._get_metrics),
            web.get("/healthz", self._get_health),
            web.get("/readyz", self._get_readiness),
        ]

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._metrics(), headers={"Content-Type": METRICS_TYPE})

    async def _get_health(self, _: web.Request) -> web.Response:
        problem = self._problem()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    async def _get_readiness(self, _: web.Request) -> web.Response:
        readiness = self._readiness()
        return web.Response(status=200 if readiness == "ready" else 503, text=readiness + "\n")
