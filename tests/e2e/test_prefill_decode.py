"""Prefill and decode engines in processes of their own, which hand conversations over through hicached."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bench.demo.processes import Daemon
from bench.tiny_hybrid import TinyHybrid
from bench.tiny_reference import Reference, reference_generate, restored_differences
from hicache import Stored
from tests.e2e.conftest import MIB, TENANTS, WAIT_S
from tests.e2e.pd_process import AwaitL3, HoldPuts, LetPutsGo, Serve, Side, Turn, run_engine

PAGE = 16
OUTPUT_TOKENS = 40


class EngineProcess:
    """One engine, started again when a test has killed it."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._process: Any = None  # Any: a spawned process; its class depends on the start method
        self._connection: Connection | None = None

    def start(self) -> None:
        """Returns at once; ``await_ready`` follows."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_engine, args=(theirs, self.side), daemon=True)
        self._process.start()
        theirs.close()

    def await_ready(self) -> None:
        assert self.receive() == "ready"
        assert self.ask(AwaitL3())

    def send(self, command: object) -> None:
        assert self._connection is not None
        self._connection.send(command)

    def receive(self) -> Any:  # Any: each command names its own answer
        assert self._connection is not None
        assert self._connection.poll(2 * WAIT_S), "the engine did not answer"
        return self._connection.recv()

    def ask(self, command: object) -> Any:  # Any: see receive
        self.send(command)
        return self.receive()

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it is doing."""
        self._process.kill()
        self._process.join()
        assert self._connection is not None
        self._connection.close()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()


@dataclass
class Pair:
    """A daemon, a prefill engine and a decode engine."""

    daemon: Daemon
    prefill: EngineProcess
    decode: EngineProcess
    model: TinyHybrid
    rng: random.Random

    def prompt(self, length: int) -> list[int]:
        """Tokens that no other test has."""
        return [self.rng.randrange(self.model.config.vocab) for _ in range(length)]

    def reference(self, prompt: list[int]) -> Reference:
        """What a single engine without any cache gives."""
        return reference_generate(self.model, prompt, OUTPUT_TOKENS)

    def check(self, turn: Turn, reference: Reference, *, first: int, count: int) -> Turn:
        """The tokens and every restored byte, rings included, are those of the reference."""
        assert turn.tokens == reference.tokens[first : first + count]
        assert restored_differences(self.model.spec(), turn.restored, reference) == []
        return turn

    def run_prefill(self, prompt: list[int], reference: Reference, **settings: float) -> Turn:
        """The prompt and the first token."""
        turn = self.prefill.ask(Serve(tuple(prompt), 1, **settings))  # type: ignore[arg-type]  # by name
        return self.check(turn, reference, first=0, count=1)

    def run_decode(self, prompt: list[int], reference: Reference, *, speculative: bool = False) -> Turn:
        """Goes on after the first token."""
        answer = reference.tokens[1:] if speculative else ()
        turn = self.decode.ask(Serve((*prompt, reference.tokens[0]), OUTPUT_TOKENS - 1, answer=answer))
        return self.check(turn, reference, first=1, count=OUTPUT_TOKENS - 1)


@pytest.fixture(scope="module")
def running(model: TinyHybrid) -> Iterator[Pair]:
    """Started once: an engine takes seconds to load torch. Tests use prompts of their own."""
    with TemporaryDirectory(prefix="pd") as folder:
        daemon = Daemon(Path(folder), TENANTS, 128 * MIB)
        daemon.start()
        side = Side(daemon.address, TENANTS[0].token)
        pair = Pair(daemon, EngineProcess(side), EngineProcess(side), model, random.Random(7))
        for engine in (pair.prefill, pair.decode):
            engine.start()
        for engine in (pair.prefill, pair.decode):
            engine.await_ready()
        yield pair
        for engine in (pair.prefill, pair.decode):
            engine.kill()
        daemon.kill()


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    """Both engines and the daemon as they should be, before and after whatever a test does to them."""
    yield running
    if running.daemon._process is None:
        running.daemon.start()
    for engine in (running.prefill, running.decode):
        if not engine.is_alive:
            engine.start()
            engine.await_ready()
        engine.ask(LetPutsGo())
        assert engine.ask(AwaitL3())


def whole_pages(tokens: int) -> int:
    return tokens // PAGE * PAGE


def test_conversations_go_back_and_forth_and_nobody_computes_what_the_other_one_has(pair: Pair) -> None:
    """The rule: each side computes what comes after the last full page that the other one left, and nothing else."""
    histories = [pair.prompt(90 + 13 * number) for number in range(4)]
    left_by_decode = [0] * len(histories)
    for turn in range(3):
        for number, history in enumerate(histories):
            reference = pair.reference(history)
            prefill = pair.run_prefill(history, reference)
            assert prefill.by_source["computed"] == len(history) - left_by_decode[number]
            assert prefill.stored == Stored(whole_pages(len(history)), is_complete=True)
            decode = pair.run_decode(history, reference, speculative=(number + turn) % 2 == 1)
            assert decode.restored.tokens == whole_pages(len(history)), "a snapshot is found at each hand-over"
            assert decode.by_source["computed"] == len(history) % PAGE + 1 <= PAGE
            end = len(history) + OUTPUT_TOKENS - 1  # the last token generated is not computed
            assert decode.stored == Stored(whole_pages(end), is_complete=True)
            left_by_decode[number] = whole_pages(end)
            histories[number] = [*history, *reference.tokens, *pair.prompt(11)]


def test_a_daemon_that_dies_between_store_and_load_costs_the_decode_side_a_recompute_and_no_more(pair: Pair) -> None:
    history = pair.prompt(100)
    reference = pair.reference(history)
    assert pair.run_prefill(history, reference).stored.is_complete
    pair.daemon.kill()
    turn = pair.run_decode(history, reference)
    assert turn.by_source["computed"] == len(history) + 1
    assert turn.stored == Stored(0, is_complete=False), "a dead daemon has acknowledged nothing"
    pair.daemon.start()
    assert pair.prefill.ask(AwaitL3())
    assert pair.decode.ask(AwaitL3())
    other = EngineProcess(pair.decode.side)
    other.start()
    other.await_ready()
    try:
        again = replace(pair, decode=other).run_decode(history, reference)
        assert again.restored.tokens == whole_pages(100), "what was acknowledged before the kill is there after it"
    finally:
        other.kill()


def test_decode_that_starts_before_the_store_is_done_uses_what_is_whole_and_the_rest_comes_later(pair: Pair) -> None:
    history = pair.prompt(150)
    reference = pair.reference(history)
    pair.prefill.ask(HoldPuts(8))  # attention and window of the first pages, and no state
    early = pair.run_prefill(history, reference, handover_timeout_s=0.1)
    assert early.stored == Stored(0, is_complete=False)
    turn = pair.run_decode(history, reference)
    assert turn.by_source["computed"] == len(history) + 1, "pages without their state are no prefix"
    pair.prefill.ask(LetPutsGo())
    assert pair.run_prefill(history, reference).stored == Stored(whole_pages(150), is_complete=True)


def test_a_daemon_that_dies_in_the_middle_of_a_store_is_given_the_rest_when_it_is_back(pair: Pair) -> None:
    history = pair.prompt(150)
    reference = pair.reference(history)
    pair.prefill.ask(HoldPuts(5))
    assert not pair.run_prefill(history, reference, handover_timeout_s=0.1).stored.is_complete
    pair.daemon.kill()
    pair.prefill.ask(LetPutsGo())
    assert pair.run_prefill(history, reference).stored == Stored(0, is_complete=False), "it did not wait for the dead"
    pair.daemon.start()
    assert pair.prefill.ask(AwaitL3())
    assert pair.decode.ask(AwaitL3())
    assert pair.run_prefill(history, reference).stored == Stored(whole_pages(150), is_complete=True)
    assert pair.run_decode(history, reference).restored.tokens == whole_pages(150)


@pytest.mark.parametrize("objects", [1, 13, 20])
def test_br_139_what_a_killed_prefill_engine_had_stored_of_a_prompt_is_used_up_to_a_whole_boundary(
    objects: int, pair: Pair
) -> None:
    history = pair.prompt(150)
    reference = pair.reference(history)
    pair.prefill.ask(HoldPuts(objects))
    stored = pair.run_prefill(history, reference, handover_timeout_s=0.1).stored
    assert not stored.is_complete
    pair.prefill.kill()
    turn = pair.run_decode(history, reference)
    assert stored.tokens <= turn.restored.tokens
    assert turn.restored.tokens in (0, 64, 128), "where the prefill engine took snapshots, but the last one"
    assert turn.restored.tokens > 0 or objects < 9 + 9, "a page needs two objects, a snapshot one"
    assert turn.stored.is_complete, "the decode side stores what it had to compute"
