"""An engine of two ranks, each in a process of its own: each gets its own heads back."""

from __future__ import annotations

import pytest

from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.lives import Stored, answered, check, check_foreign, check_loaded, start_again
from tests.engines.vllm.rig import hicache

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def test_br_007_two_ranks_restore_what_two_stored_and_one_does_not_and_the_check_tells_swapped_ranks(
    engine: StartEngine, target: str
) -> None:
    process = engine()
    turn, next_turn = answered(process, "llama", count=2)
    stored = Stored("llama", turn, next_turn, [], TWO)
    storing = start_again(process, stored, target)
    check([turn], [storing.ask(turn.prompt)])
    storing.flush()
    process.end()

    process = engine()
    loading = start_again(process, stored, target)
    check_foreign(loading, stored, salt="bob")
    check_loaded(loading, stored)
    loading.stop()
    [one] = check([turn], [process.start("llama", hicache(target)).ask(turn.prompt)])
    assert one.external == 0
    process.stop()
    faulty = start_again(process, stored, target, name="LoadsOtherRank", module="tests.engines.vllm.mutants")
    with pytest.raises(AssertionError, match="other tokens"):
        check_loaded(faulty, stored)
    process.end()
