"""Requests at the edges of what vLLM and the connector make of blocks: lengths, budgets, samples, salts, resets."""

from __future__ import annotations

from pathlib import Path

from tests.daemon.rig import wait_until
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


def test_requests_with_a_lora_adapter_find_only_what_its_very_content_has_stored(
    engine: StartEngine, target: str, tmp_path: Path
) -> None:
    process = engine()
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    process.start("llama", hicache(target, prefetch_threshold_tokens=0), **settings)
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    process.run("make_adapter", folder=one, seed=1)
    process.run("make_adapter", folder=other, seed=2)
    turn = prompt(1, tokens=7 * BLOCK + 1)

    def ask(folder: str, number: int) -> tuple[list[int], int]:
        process.reset()
        tokens, external = process.run("ask_adapter", prompt=turn, folder=folder, number=number)
        process.flush()
        return tokens, external

    plain = process.ask(turn)
    process.flush()
    answer, external = ask(one, 1)
    assert answer != list(plain.tokens), "the adapter changes nothing"
    assert external == 0
    wait_until(lambda: ask(one, 1) == (answer, 7 * BLOCK), what="its content has been read, and its pages are stored")
    different, external = ask(other, 2)
    assert external == 0
    assert different != answer
    wait_until(lambda: ask(other, 2) == (different, 7 * BLOCK), what="the other one likewise")

    process.run("make_adapter", folder=one, seed=2)
    assert ask(one, 1) == (answer, 0), "which of the two contents the engine holds nobody can say"
    process.stop()
    process.start("llama", hicache(target, prefetch_threshold_tokens=0), **settings)
    asked = [ask(one, 1)]
    wait_until(lambda: asked.append(ask(one, 1)) or asked[-1][1] > 0, what="the new content has been read and stored")
    assert {tuple(tokens) for tokens, _ in asked} == {tuple(different)}, "pages of other content were served"
    process.reset()
    assert process.ask(turn).external == 7 * BLOCK, "the model alone has not found its own"
    process.end()
