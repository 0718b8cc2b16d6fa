"""What one engine stored another one loads after a restart: the same tokens as without a cache, and the same bytes."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.inside import BYTES_TOKENS
from tests.engines.vllm.lives import (
    RESTORED_TOKENS,
    check,
    check_bytes,
    check_foreign,
    check_loaded,
    start_again,
    store,
)
from tests.engines.vllm.rig import hicache, prompt, prompts

PAGED = ("llama", "llama-mha", "gemma3")
HYBRID = ("qwen3-next", "nemotron-h")
MUTANTS = {"llama": "DropsSalts", "gemma3": "SkipsWindows", "qwen3-next": "SkipsStates", "nemotron-h": "SkipsStates"}


@pytest.mark.parametrize("model", [*PAGED, *HYBRID])
def test_a_prompt_is_restored_after_a_restart_and_the_checks_tell_a_connector_with_a_fault(
    engine: StartEngine, target: str, model: str
) -> None:
    stored = store(engine, model, target)
    process = engine()

    loading = start_again(process, stored, target)
    check_foreign(loading, stored, salt="bob")
    [next_turn] = check([stored.next_turn], [loading.ask(stored.next_turn.prompt)])
    computed = len(stored.turn.prompt) + BYTES_TOKENS - 1  # of what was stored, the last token was not computed
    assert next_turn.external == (computed // 32 * 32 if model in PAGED else RESTORED_TOKENS)
    check_loaded(loading, stored)
    check_bytes(loading, stored)
    loading.stop()

    if mutant := MUTANTS.get(model):
        faulty = start_again(process, stored, target, name=mutant, module="tests.engines.vllm.mutants")
        if mutant == "DropsSalts":
            with pytest.raises(AssertionError, match="another tenant"):
                check_foreign(faulty, stored, salt="carol")
        else:
            with pytest.raises(AssertionError, match="other tokens"):
                check_loaded(faulty, stored)
            with pytest.raises(AssertionError, match="other bytes"):
                check_bytes(faulty, stored)
        faulty.stop()
    process.close()


def test_the_latents_of_mla_are_restored_byte_for_byte(engine: StartEngine, target: str) -> None:
    """vLLM's MLA on CPUs decodes other tokens than it prefills, without any cache: what can be compared are bytes."""
    process = engine()
    ask, restored = prompt(1, tokens=410), 400  # blocks of 16 tokens
    stored = process.start("deepseek", hicache(target)).run("bytes_of", prompt=ask, tokens=restored)
    process.stop()
    process.start("deepseek", hicache(target))
    assert process.run("bytes_of", prompt=ask, tokens=restored) == stored
    assert process.run("external_tokens_so_far") == restored
    process.end()


@pytest.mark.parametrize("model", HYBRID)
def test_br_146_the_third_of_siblings_that_diverge_is_restored_where_they_do(
    engine: StartEngine, target: str, model: str
) -> None:
    shared = prompt(3, tokens=256)
    process = engine()
    alone = process.start(model)
    siblings = list(islice(alone.settled([*shared, *rest] for rest in prompts(4, tokens=144)), 3))
    alone.stop()
    with_store = process.start(model, hicache(target))
    outputs = []
    for sibling in siblings:
        outputs.append(with_store.ask(sibling.prompt))
        with_store.reset()  # what is reused comes from the store, not from the engine's own memory
    check(siblings, outputs)
    assert [output.external for output in outputs] == [0, 0, 256]
    process.end()
