"""The life that most tests give an engine: it stores, its process ends, and another process loads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tests.daemon.rig import DaemonProcess, scrape, wait_until
from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.inside import NOT_HELD
from tests.engines.vllm.rig import Asked, EngineProcess, Output, hicache, prompts

RESTORED_TOKENS = 384  # of a prompt of 410: a multiple of the page sizes of all models but MLA, and the last one


@dataclass(slots=True)
class Stored:
    """What an engine without any cache answered, and what was in the memory of the one that stored it."""

    model: str
    turn: Asked
    next_turn: Asked
    digests: list[list[str]]
    settings: dict[str, Any] = field(default_factory=dict)


def answered(process: EngineProcess, model: str, *, count: int, **settings: Any) -> list[Asked]:
    """Prompts with what the model answers without a cache."""
    found = list(islice(process.start(model, **settings).settled(prompts()), count))
    process.stop()
    return found


def check(asked: list[Asked], outputs: list[Output]) -> list[Output]:
    """All answers are right and whole."""
    assert [output.tokens for output in outputs] == [each.answer for each in asked]
    assert {output.finish for output in outputs} == {"length"}
    return outputs


def wait_reconnected(daemon: DaemonProcess, ask: Callable[[str], object]) -> None:
    """Returns when an engine has a session with a daemon that came back; ``ask(salt)`` asks it for nothing stored."""
    tries = itertools.count()

    def is_connected() -> bool:
        ask(f"nobody {next(tries)}")
        return scrape(daemon.ready["http"])["hicache_sessions"] > 0

    wait_until(is_connected, what="the engine has a session again")


def store(make: StartEngine, model: str, target: str) -> Stored:
    """One process: the answers without a cache, then an engine that stores a prompt and ends."""
    process = make()
    alone = process.start(model)
    turn = next(alone.settled(prompts()))
    next_turn = next(alone.settled([*turn.prompt, *turn.answer, *more] for more in prompts(tokens=20)))
    alone.stop()
    storing = process.start(model, hicache(target))
    digests = storing.run("bytes_of", prompt=turn.prompt, tokens=RESTORED_TOKENS)  # stores as it runs
    storing.reset()
    check([turn], [storing.ask(turn.prompt)])
    storing.flush()
    process.end()
    return Stored(model, turn, next_turn, digests)


def start_again(process: EngineProcess, stored: Stored, target: str, **connector: Any) -> EngineProcess:
    return process.start(stored.model, hicache(target, **connector), **stored.settings)


def check_foreign(engine: EngineProcess, stored: Stored, *, salt: str) -> None:
    """Another tenant's request gets nothing of it, and the same answer."""
    foreign = engine.ask(stored.turn.prompt, salt=salt)
    assert (foreign.external, foreign.cached) == (0, 0), "another tenant's pages were served"
    assert foreign.tokens == stored.turn.answer


def check_loaded(engine: EngineProcess, stored: Stored) -> None:
    """The prompt comes from the store, but for its last page, and is answered as without a cache."""
    engine.reset()
    loaded = engine.ask(stored.turn.prompt)
    assert loaded.external == RESTORED_TOKENS, f"{loaded.external} tokens were loaded, not {RESTORED_TOKENS}"
    assert loaded.tokens == stored.turn.answer, "loaded bytes give other tokens than computed ones"


def check_bytes(engine: EngineProcess, stored: Stored) -> None:
    """What was loaded is, in the engine's memory, what was there when it was stored."""
    engine.reset()
    found = engine.run("bytes_of", prompt=stored.turn.prompt, tokens=RESTORED_TOKENS)
    for loaded, kept in zip(found, stored.digests, strict=True):
        assert loaded[-1] != NOT_HELD
        pairs = [pair for pair in zip(loaded, kept, strict=True) if NOT_HELD not in pair]
        assert all(one == other for one, other in pairs), "other bytes than those that were stored"
