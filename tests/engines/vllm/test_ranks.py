"""An engine of two ranks, each in a process of its own: each gets its own heads back."""

from __future__ import annotations

import pytest

from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.lives import Stored, check_foreign, check_loaded, start_again
from tests.engines.vllm.rig import hicache, prompt

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def test_two_ranks_restore_what_they_stored_and_the_check_tells_one_that_loads_the_others(
    engine: StartEngine, target: str
) -> None:
    process = engine(in_process=False)
    turn = prompt(1, tokens=410)
    alone = process.start("llama", **TWO)
    stored = Stored("llama", turn, alone.ask(turn).tokens, [], (), [], TWO)
    alone.stop()
    storing = start_again(process, stored, target)
    assert storing.ask(turn).tokens == stored.answer
    process.end()

    process = engine(in_process=False)
    loading = start_again(process, stored, target)
    check_foreign(loading, stored, salt="bob")
    check_loaded(loading, stored)
    loading.stop()
    faulty = start_again(process, stored, target, name="LoadsOtherRank", module="tests.engines.vllm.mutants")
    with pytest.raises(AssertionError, match="other tokens"):
        check_loaded(faulty, stored)
    process.end()


def test_br_007_one_rank_finds_nothing_of_what_two_have_stored(engine: StartEngine, target: str) -> None:
    process = engine()
    turn = prompt(1, tokens=410)
    process.start("llama", hicache(target), **TWO).ask(turn)
    process.stop()
    one = process.start("llama", hicache(target))
    assert one.ask(turn).external == 0
    process.stop()
    two = process.start("llama", hicache(target), **TWO)
    assert two.ask(turn).external == 384  # there was something to find
    process.end()
