"""Requests at the edges of what vLLM and the connector make of blocks: lengths, budgets, samples, salts, resets."""

from __future__ import annotations

from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.rig import hicache, prompt

BLOCK = 32
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 7 * BLOCK, 7 * BLOCK + 1)
SMALL_STEPS = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}


def test_prompts_of_every_length_are_restored_up_to_the_last_block_that_leaves_a_token(
    engine: StartEngine, target: str
) -> None:
    """With steps smaller than a prompt, the scheduler ahead of the model, and others that wait for one prefix."""
    process = engine()
    prompts = [prompt(length, tokens=length) for length in LENGTHS]
    expected = [process.start("llama", **SMALL_STEPS).ask(each).tokens for each in prompts[:1]]
    expected += [process.ask(each).tokens for each in prompts[1:]]
    process.stop()

    with_store = process.start(
        "llama", hicache(target, prefetch_threshold_tokens=0), async_scheduling=True, **SMALL_STEPS
    )
    assert [with_store.ask(each).tokens for each in prompts] == expected
    with_store.flush()
    with_store.reset()
    outputs = [with_store.ask(each) for each in prompts]
    assert [each.tokens for each in outputs] == expected
    assert [each.external for each in outputs] == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]

    with_store.reset()
    longest = prompts[-1]
    assert {each.tokens for each in with_store.generate(longest, longest, longest, longest)} == {expected[-1]}
    with_store.reset()
    assert set(map(tuple, with_store.run("samples", prompt=longest, count=3))) == {expected[-1]}
    with_store.reset()
    assert with_store.ask(longest, salt="").external == 7 * BLOCK, "an empty salt is none"

    with_store.reset(connector=True)
    after = with_store.ask(longest)
    assert (after.external, after.tokens) == (0, expected[-1]), "the weights may be others"
    with_store.flush()
    with_store.reset()
    assert with_store.ask(longest).external == 7 * BLOCK, "what was saved since is its own"
    process.end()
