"""The whole connector, but for vLLM itself: random lives of requests over real copies, L2, ranks and L3."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.marker import MARKER_NAME
from hicache.connectors import vllm_worker
from hicache.copies import PoolCopies
from hicache.embedded import EmbeddedL3
from hicache.errors import ConfigError
from hicache.slot_cache import SlotCache
from tests.connectors.vllm_engine import MODELS, PAGE, VllmEngine
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import TOKEN, tenants_file

Open = Callable[..., VllmEngine]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    engines: list[VllmEngine] = []

    def open_engine(model: str, **options: Any) -> VllmEngine:
        engines.append(VllmEngine(model, tmp_path, seed=options.pop("seed", len(engines)), **options))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def prompt(engine: VllmEngine) -> list[int]:
    """One of few, which share beginnings and diverge within and between pages."""
    choice = engine.random
    family, length = choice.randrange(3), choice.randrange(1, 9 * PAGE)
    tokens = [family * 100 + number % 90 for number in range(length)]
    diverges = choice.randrange(length)
    return (
        tokens
        if choice.random() < 0.5
        else [*tokens[:diverges], *(900 + choice.randrange(2) for _ in tokens[diverges:])]
    )


def live(engine: VllmEngine, steps: int) -> None:
    """Requests come, are preempted and aborted, whatever they are at; and then end."""
    live_on(engine, steps)
    engine.run_to_end()


def live_on(engine: VllmEngine, steps: int) -> None:
    for _ in range(steps):
        if len(engine.waiting) < 6:
            engine.submit(f"{engine.random.random()}", prompt(engine), generated=engine.random.randrange(2 * PAGE))
        engine.step()
        everybody = [*engine.running, *engine.waiting]
        if everybody and engine.random.random() < 0.15:
            victim = engine.random.choice(everybody)
            if victim.total >= 0:
                engine.abort(victim)
        if engine.running and engine.random.random() < 0.1:
            engine.preempt(engine.random.choice(engine.running))


def check_nothing_is_held(cache: SlotCache, engine: VllmEngine) -> None:
    assert cache.flush(timeout_s=20)
    assert cache.busy_slots() == set()
    assert not engine.side._entries
    assert not engine.side._busy
    assert sorted(engine.free) == list(range(1, engine.config.num_blocks))
    assert engine.side.counts.calls_refused == 0


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_br_002_br_003_every_block_holds_what_its_tokens_make_of_it_in_random_lives(
    opened: Open, model: str, tp_size: int
) -> None:
    engine = opened(model, tp_size=tp_size, seed=tp_size)
    live(engine, 150)
    assert engine.tokens_loaded > 0
    assert engine.finished > 10
    check_nothing_is_held(engine.cache, engine)


@pytest.mark.parametrize("model", MODELS)
def test_what_one_engine_has_saved_another_loads(opened: Open, model: str, tmp_path: Path) -> None:
    l3 = f"file://{tmp_path}/l3?shared=1"
    first = opened(model, l3=l3, prefetch_mode="wait_complete")
    first.submit("a", range(50), generated=10)
    first.run_to_end()
    assert first.cache.flush(timeout_s=20)
    second = opened(model, l3=l3, prefetch_mode="wait_complete")
    second.submit("a", range(50), generated=10)
    second.run_to_end()
    assert second.tokens_loaded == (40 if model == "hybrid" else 48)
    check_nothing_is_held(second.cache, second)


@pytest.mark.parametrize("model", MODELS)
def test_br_076_bytes_that_changed_in_l3_are_computed_instead(opened: Open, model: str, tmp_path: Path) -> None:
    l3 = f"file://{tmp_path}/l3?shared=1"
    first = opened(model, l3=l3, prefetch_mode="wait_complete")
    first.submit("a", range(50), generated=10)
    first.run_to_end()
    assert first.cache.flush(timeout_s=20)
    objects = [path for path in (tmp_path / "l3").rglob("*") if path.is_file() and path.name != MARKER_NAME]
    assert objects
    for path in objects:
        content = bytearray(path.read_bytes())
        content[::97] = bytes(byte ^ 0xFF for byte in content[::97])
        path.write_bytes(content)
    second = opened(model, l3=l3, prefetch_mode="wait_complete")
    for name in "ab":
        second.submit(name, range(50), generated=10)
        second.run_to_end()
    assert second.tokens_loaded == (40 if model == "hybrid" else 48)  # what it has saved itself, by the second request
    check_nothing_is_held(second.cache, second)


@pytest.mark.parametrize("leg", ["load", "backup"])
@pytest.mark.parametrize("model", MODELS)
def test_br_139_br_143_copies_that_fail_cost_their_requests_the_cache_and_no_more(
    opened: Open, model: str, leg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = getattr(PoolCopies, leg)
    calls = iter(range(1_000_000))

    def failing(self: PoolCopies, group: int, sources: list[int], targets: list[int]) -> None:
        if next(calls) % 11 == 0:
            copy(self, group, sources[::-1], targets)  # some wrong bytes are there already
            raise OSError("a copy failed on purpose")
        copy(self, group, sources, targets)

    monkeypatch.setattr(PoolCopies, leg, failing)
    engine = opened(model, tp_size=2)
    live(engine, 100)
    assert engine.finished > 10
    assert engine.tokens_loaded > 0
    assert leg == "backup" or engine.loads_failed > 0
    check_nothing_is_held(engine.cache, engine)


def test_a_lost_rank_costs_the_engine_the_cache_and_no_more(opened: Open) -> None:
    engine = opened("hybrid", tp_size=2)
    live(engine, 30)
    worker = engine.workers[1]._worker
    assert worker is not None
    worker.close()
    finished = engine.finished
    live(engine, 30)
    assert engine.finished > finished
    assert list(engine.cache.stats.ranks_lost) == [1]
    loaded = engine.tokens_loaded
    live(engine, 10)
    assert engine.tokens_loaded == loaded


@pytest.mark.parametrize("model", MODELS)
def test_br_062_after_a_weight_update_nothing_of_before_is_loaded(opened: Open, model: str) -> None:
    engine = opened(model)
    for _ in range(5):
        live_on(engine, 12)
        engine.update_weights()
    live(engine, 20)
    assert engine.tokens_loaded > 0
    check_nothing_is_held(engine.cache, engine)


def test_br_128_a_token_that_hicached_does_not_know_stops_start_up(
    opened: Open, start_thread: Callable[..., ThreadedDaemon], folder: Path
) -> None:
    l3 = start_thread(tenants_file=tenants_file(folder)).target.replace("unix:", "unix://")
    with pytest.raises(ConfigError, match="token") as refused:
        opened("dense", l3=l3, token="mallory-0123456789")
    assert "mallory" not in str(refused.value)
    engine = opened("dense", l3=l3, token=TOKEN)
    engine.submit("a", range(50))
    engine.run_to_end()
    assert engine.cache.flush(timeout_s=20)
    assert engine.workers[0].samples()["l3_objects", "put", "ok"] == 50 // PAGE


def test_a_hicached_that_is_away_does_not_stop_start_up_and_is_said_not_to_be_ready(opened: Open, folder: Path) -> None:
    engine = opened("dense", l3=f"unix://{folder}/nobody.sock")
    live(engine, 10)
    assert engine.workers[0].samples()["l3_ready", "0"] == 0
    check_nothing_is_held(engine.cache, engine)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_while_requests_wait_for_l3_steps_leave_the_processor_to_those_that_bring_it(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    lookup, go_on = EmbeddedL3.lookup, threading.Event()

    def held(self: EmbeddedL3, *arguments: Any, **options: Any) -> Any:
        assert go_on.wait(20)
        return lookup(self, *arguments, **options)

    l3 = f"file://{tmp_path}/l3?shared=1"
    first = opened("dense", tp_size=tp_size, l3=l3, prefetch_mode="wait_complete")
    first.submit("a", range(50))
    first.run_to_end()
    assert first.cache.flush(timeout_s=20)
    monkeypatch.setattr(EmbeddedL3, "lookup", held)
    engine = opened("dense", tp_size=tp_size, l3=l3, prefetch_mode="wait_complete")
    waiting = engine.submit("a", range(50))

    steps, began_s = 50, time.monotonic()
    for _ in range(steps):
        assert engine.side.matched(waiting.request, 0) is None
        step_idly(engine)
    assert time.monotonic() - began_s >= tp_size * steps * vllm_worker.IDLE_STEP_S

    assert engine.side.matched(waiting.request, 0) is None
    with monkeypatch.context() as patience:
        patience.setattr(vllm_worker, "IDLE_STEP_S", 600.0)  # longer than a test may take
        go_on.set()
        step_idly(engine)  # what has come ends it
    engine.run_to_end()
    assert engine.tokens_loaded == 48
    check_nothing_is_held(engine.cache, engine)


def step_idly(engine: VllmEngine) -> None:
    plan = engine.side.plan({}, lambda name: None, {}, [])
    for worker in engine.workers:
        worker.begin(plan)
        worker.end(plan)


@pytest.mark.parametrize(("token_s", "is_loaded"), [(1e-7, False), (1.0, True)])
@pytest.mark.parametrize("model", MODELS)
def test_what_workers_have_timed_decides_whether_l3_is_read(
    opened: Open, model: str, token_s: float, is_loaded: bool, tmp_path: Path
) -> None:
    l3 = f"file://{tmp_path}/l3?shared=1"
    first = opened(model, l3=l3)
    for name in "ab":
        first.submit(name, [*f"{name}".encode(), *range(47)], generated=10)
    first.run_to_end()
    assert first.cache.flush(timeout_s=20)

    second = opened(model, l3=l3, prefetch_mode="wait_complete", read_policy="latency")
    second.token_s = token_s
    second.submit("a", [*b"a", *range(47)], generated=10)
    second.run_to_end()
    assert second.tokens_loaded > 0, "nothing is known yet of what either takes"
    loaded = second.tokens_loaded
    second.submit("new", range(500, 548))
    second.run_to_end()
    second.submit("b", [*b"b", *range(47)], generated=10)
    second.run_to_end()
    assert (second.tokens_loaded > loaded) == is_loaded
    check_nothing_is_held(second.cache, second)


@pytest.mark.parametrize("eviction", ["s3_fifo", "continuation", "marconi", "ttl"])
def test_every_block_holds_what_its_tokens_make_of_it_under_other_evictions(opened: Open, eviction: str) -> None:
    engine = opened("hybrid", eviction=eviction, l2_bytes=1 << 16)
    live(engine, 150)
    assert engine.tokens_loaded > 0
    check_nothing_is_held(engine.cache, engine)
