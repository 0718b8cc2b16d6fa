"""What the other tests rest on: the engine alone repeats itself, and its answer depends on every part of a prompt."""

from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.rig import prompt

COMPARED = ("llama", "gemma3", "qwen3-next", "nemotron-h")


def test_the_answer_of_a_model_tells_prompts_apart_wherever_they_differ(engine: StartEngine) -> None:
    process = engine()
    first = prompt(1, tokens=300)
    for model in COMPARED:
        alone = process.start(model)
        answers = {}
        for place in (0, 40, 100, 150, 200, 290):
            other = list(first)
            other[place] = 3 + (other[place] - 2) % 500
            answers[place] = alone.ask(other, tokens=16).tokens
        answer = alone.ask(first, tokens=16)
        assert alone.ask(first, tokens=16) == answer, model
        assert answer.cached == 0, model
        assert len(set(answer.tokens)) >= 4, f"{model} says the same at every step"
        assert [place for place, other in answers.items() if other == answer.tokens] == [], model
        alone.stop()
    process.close()
