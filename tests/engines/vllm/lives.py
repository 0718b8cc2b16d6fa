"""The life that most tests give an engine: it stores, its process ends, and another process loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.rig import EngineProcess, hicache, prompt

PROMPT_TOKENS = 410
RESTORED_TOKENS = 384  # a multiple of the page sizes of all models, and the last below PROMPT_TOKENS


@dataclass(slots=True)
class Stored:
    """What an engine without any cache answered, and what was in the memory of the one that stored it."""

    model: str
    turn: list[int]
    answer: tuple[int, ...]
    next_turn: list[int]
    next_answer: tuple[int, ...]
    digests: list[list[str]]
    settings: dict[str, Any] = field(default_factory=dict)


def store(make: StartEngine, model: str, target: str, **settings: Any) -> Stored:
    """One process: the answers without a cache, then an engine that stores a prompt and ends."""
    process = make()
    turn = prompt(1, tokens=PROMPT_TOKENS)
    alone = process.start(model, **settings)
    answer = alone.ask(turn).tokens
    next_turn = [*turn, *answer, *prompt(2, tokens=20)]
    next_answer = alone.ask(next_turn).tokens
    alone.stop()
    storing = process.start(model, hicache(target), **settings)
    digests = storing.run("bytes_of", prompt=turn, tokens=RESTORED_TOKENS)  # stores as it runs
    storing.reset()
    assert storing.ask(turn).tokens == answer
    process.end()
    return Stored(model, turn, answer, next_turn, next_answer, digests, settings)


def start_again(process: EngineProcess, stored: Stored, target: str, **connector: Any) -> EngineProcess:
    return process.start(stored.model, hicache(target, **connector), **stored.settings)


def check_foreign(engine: EngineProcess, stored: Stored, *, salt: str) -> None:
    """Another tenant's request gets nothing of it, and the same answer."""
    foreign = engine.ask(stored.turn, salt=salt)
    assert (foreign.external, foreign.cached) == (0, 0), "another tenant's pages were served"
    assert foreign.tokens == stored.answer


def check_loaded(engine: EngineProcess, stored: Stored) -> None:
    """The prompt comes from the store, but for its last page, and is answered as without a cache."""
    engine.reset()
    loaded = engine.ask(stored.turn)
    assert loaded.external == RESTORED_TOKENS
    assert loaded.tokens == stored.answer, "loaded bytes give other tokens than computed ones"


def check_bytes(engine: EngineProcess, stored: Stored) -> None:
    """What was loaded is, in the engine's memory, what was there when it was stored."""
    engine.reset()
    found = engine.run("bytes_of", prompt=stored.turn, tokens=RESTORED_TOKENS)
    assert found == stored.digests, "other bytes than those that were stored"
