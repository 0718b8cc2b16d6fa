"""The whole connector, but for vLLM itself: random lives of requests over real copies, L2, ranks and L3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.slot_cache import SlotCache
from tests.connectors.vllm_engine import MODELS, PAGE, VllmEngine

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
    """Requests come, are preempted and aborted, whatever they are at."""
    for number in range(steps):
        if len(engine.waiting) < 6:
            engine.submit(f"{number}", prompt(engine), generated=engine.random.randrange(2 * PAGE))
        engine.step()
        everybody = [*engine.running, *engine.waiting]
        if everybody and engine.random.random() < 0.15:
            victim = engine.random.choice(everybody)
            if victim.total >= 0:
                engine.abort(victim)
        if engine.running and engine.random.random() < 0.1:
            engine.preempt(engine.random.choice(engine.running))
    engine.run_to_end()


def check_nothing_is_held(cache: SlotCache, engine: VllmEngine) -> None:
    assert cache.flush(timeout_s=20)
    assert cache.busy_slots() == set()
    assert not engine.side._entries
    assert not engine.side._busy
    assert sorted(engine.free) == list(range(1, engine.config.num_blocks))
    assert engine.side.counts.calls_refused == 0


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_every_block_holds_what_its_tokens_make_of_it_in_random_lives(opened: Open, model: str, tp_size: int) -> None:
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
