"""Asks /healthz all through a soak, and beside it a server that does nothing else: what of a delay is the machine's."""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any

from aiohttp import web

from bench.daemon_process import DaemonProcess

HEALTH_EVERY_S, HEALTH_TIMEOUT_S, HEALTH_BOUND_S = 0.05, 5.0, 0.1
SAMPLE_EVERY_S = 0.5
START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class ProbeReport:
    """What was seen of one server, and of the process that asked it."""

    answers_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)  # how late the prober woke from each sleep
    unhealthy: list[str] = field(default_factory=list)


class Probes:
    """Two processes: one asks hicached and the control server, the other one is the control server."""

    def __init__(self, hicached: DaemonProcess) -> None:
        """Returns when both are there; they ask from ``start`` on."""
        context: Any = multiprocessing.get_context("forkserver")  # Any: typeshed hides its Process
        self.rss: list[tuple[float, int]] = []  # of hicached: when, bytes
        self.daemon, self.control = ProbeReport(), ProbeReport()
        self._hicached = hicached
        self._over = Event()
        self._sampling = Thread(target=self._sample, name="soak-rss")
        self._processes = []
        self._control_pipe, theirs = context.Pipe()
        self._processes.append(context.Process(target=run_control, args=(theirs,), daemon=True))
        self._processes[0].start()
        control_address = _received(self._control_pipe)
        self._pipe, theirs = context.Pipe()
        self._processes.append(
            context.Process(target=run_prober, args=(hicached.address("http"), control_address, theirs))
        )
        self._processes[1].start()
        _received(self._pipe)

    def start(self) -> None:
        """Begins to ask."""
        self._pipe.send("start")
        self._sampling.start()

    def end(self) -> None:
        """Stops, and has what was seen. Idempotent."""
        if self._over.is_set():
            return
        self._over.set()
        self._pipe.send("stop")
        self.daemon, self.control = _received(self._pipe)
        self._control_pipe.close()
        for process in self._processes:
            process.join()
        if self._sampling.is_alive():
            self._sampling.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            self.rss.append((time.monotonic(), self._hicached.heap_bytes()))


def _received(pipe: Connection) -> Any:  # Any: whatever the other end says
    if not pipe.poll(START_TIMEOUT_S):
        raise TimeoutError(f"a process of the soak said nothing within {START_TIMEOUT_S:g} s")
    return pipe.recv()


def run_prober(daemon_address: str, control_address: str, parent: Connection) -> None:
    """Asks both in turn, each in a thread of its own, from "start" to "stop"; then sends a report of each."""
    over = Event()
    reports = [ProbeReport(), ProbeReport()]
    addresses = (daemon_address, control_address)
    threads = [
        Thread(target=_ask_all_the_time, args=(address, report, over))
        for address, report in zip(addresses, reports, strict=True)
    ]
    parent.send("ready")
    parent.recv()
    for thread in threads:
        thread.start()
    parent.recv()
    over.set()
    for thread in threads:
        thread.join()
    parent.send(reports)


def _ask_all_the_time(address: str, report: ProbeReport, over: Event) -> None:
    slept_from_s = time.monotonic()
    while not over.wait(HEALTH_EVERY_S):
        start_s = time.monotonic()
        report.late_s.append(max(0.0, start_s - slept_from_s - HEALTH_EVERY_S))
        try:
            status, text = http_get(address, "/healthz")
        except OSError as error:
            status, text = 0, repr(error)
        slept_from_s = time.monotonic()
        report.answers_s.append(slept_from_s - start_s)
        if status != 200:
            report.unhealthy.append(f"/healthz after {report.answers_s[-1]:.2f} s: {status} {text.strip()}")


def run_control(parent: Connection) -> None:
    """Says its address, and answers /healthz as hicached does until the other end of ``parent`` is closed."""
    asyncio.run(_serve_control(parent))


async def _serve_control(parent: Connection) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/healthz", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    parent.send(f"{host}:{port}")
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(parent.fileno(), over.set)
    await over.wait()
    await runner.cleanup()


def http_get(address: str, path: str) -> tuple[int, str]:
    """Status and body."""
    connection = http.client.HTTPConnection(address, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
