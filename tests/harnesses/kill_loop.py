"""Engines and daemons that are killed and started again at random, and what must agree after each of them."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import urllib.request
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

from bench.crash_medium import count_medium
from bench.daemon_process import DaemonProcess
from tests.harnesses.killed_engine import run_engine
from tests.observability.conservation import Scrape, check_daemon, read_scrape, total

ENGINES = 2
CAPACITY_BYTES = 16 << 20
LIFE_S_MAX = 0.3  # before the next kill
WAIT_S_MAX = 120.0  # a failure, never the usual case
AT_REST = (
    "hicache_sessions",
    "hicache_regions",
    "hicache_inflight_bytes",
    "hicache_inflight_waiting",
    "hicache_storage_queued_chunks",
    "hicache_store_leaving_objects",
)
MOMENTS = ("engine", "daemon", "both", "engine", "stop")  # of what ends, by SIGKILL but for a stop


class EngineProcess:
    """One engine, seen from the loop."""

    def __init__(self, context: ForkServerContext, address: str, seed: int) -> None:
        self._told, theirs = context.Pipe()
        self._process = context.Process(target=run_engine, args=(theirs, address, seed), daemon=True)
        self._process.start()
        theirs.close()
        self._is_serving = False

    def wait_serving(self) -> None:
        """Until its first request is done, with or without a daemon."""
        if not self._is_serving:
            answer = self._receive(self._told)
            assert answer == "serving", answer
            self._is_serving = True

    def kill(self) -> None:
        """SIGKILL; what it had found to be wrong until then is raised."""
        self._process.kill()
        self._process.join()
        try:
            while self._told.poll():
                answer = self._told.recv()
                assert answer == "serving", answer
        except EOFError:
            pass
        self._told.close()

    def end(self) -> dict[str, int]:
        """It settles, checks its accounts and leaves."""
        self._told.send("end")
        answer = self._receive(self._told)
        assert isinstance(answer, dict), answer
        self._process.join(WAIT_S_MAX)
        self._told.close()
        return answer

    @staticmethod
    def _receive(told: Connection) -> object:
        assert told.poll(WAIT_S_MAX), "an engine has not answered"
        return told.recv()


class KillLoop:
    """One store that lives through all of it."""

    def __init__(self, folder: Path, *, backend: str, seed: int) -> None:
        self._backend, self._folder = backend, folder
        self._rng = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.harnesses.killed_engine", "hicache.client"])
        settings = {"http": "127.0.0.1:0", "object-bytes-max": "65536", "drain-s": "0"}
        self._daemon = DaemonProcess(folder, backend=backend, capacity_bytes=CAPACITY_BYTES, settings=settings)
        self._engines: list[EngineProcess] = []
        self.ended: Counter[str] = Counter()

    def run(self, kills: int) -> Counter[str]:
        """What ended how often, and the counts of the last engines. Raises AssertionError and BenchError."""
        shared_before = set(os.listdir("/dev/shm"))
        try:
            self._start()
            self._engines = [self._engine() for _ in range(ENGINES)]
            for number in range(kills):
                for engine in self._engines:
                    engine.wait_serving()
                time.sleep(self._rng.uniform(0.0, LIFE_S_MAX))
                self._end(MOMENTS[number % len(MOMENTS)])
                check_daemon(self._scrape())
            for engine in self._engines:
                engine.wait_serving()
            for engine in self._engines:
                self.ended.update(engine.end())
            self._check_rest()
            self._daemon.stop()
        finally:
            for engine in self._engines:
                engine._process.kill()
            self._daemon.kill()
        left = {name for name in set(os.listdir("/dev/shm")) - shared_before if "hicache" in name}
        assert not left, f"shared memory is left: {left}"
        return self.ended

    def _engine(self) -> EngineProcess:
        return EngineProcess(self._context, self._daemon.address("unix"), self._rng.randrange(2**32))

    def _end(self, moment: str) -> None:
        self.ended[moment] += 1
        if moment == "stop":
            self._daemon.stop()
        elif moment in ("daemon", "both"):
            self._daemon.kill()
        if moment in ("engine", "both"):
            self._engines.pop(self._rng.randrange(len(self._engines))).kill()
        if moment != "engine":
            self._start()
        while len(self._engines) < ENGINES:
            self._engines.append(self._engine())

    def _start(self) -> None:
        """What the files of the dead daemon hold is what the next one says it has found, once it is ready."""
        store = self._folder / "store"
        counted = count_medium(self._backend, store) if store.exists() else None
        self._daemon.start()
        if counted is not None:
            said = self._scrape()
            found = [total(said, f"hicache_store_recovered_{unit}") for unit in ("objects", "bytes")]
            assert found == [counted.objects, counted.payload_bytes], f"on the medium {counted}, recovered {found}"

    def _check_rest(self) -> None:
        """Nobody is connected any more: all counters rest, and the medium has what they say."""
        until_s = time.monotonic() + WAIT_S_MAX
        while any(total(said := self._scrape(), name) for name in AT_REST) and time.monotonic() < until_s:
            time.sleep(0.01)
        held = {name: total(said, name) for name in AT_REST if total(said, name)}
        assert not held, f"nobody is connected, and yet there are {held}"
        check_daemon(said)
        counted = count_medium(self._backend, self._folder / "store")
        told = [total(said, f"hicache_store_{name}") for name in ("objects", "payload_bytes", "used_bytes")]
        assert told == [counted.objects, counted.payload_bytes, counted.stored_bytes]

    def _scrape(self) -> Scrape:
        with urllib.request.urlopen(f"http://{self._daemon.address('http')}/metrics", timeout=WAIT_S_MAX) as answer:
            return read_scrape(answer.read().decode())
