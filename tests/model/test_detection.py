"""Detection power: damage to any page or state that a restored run rests on changes what comes out."""

from __future__ import annotations

import pytest
import torch

from bench.tiny_hybrid import SequenceView, TinyConfig
from bench.tiny_reference import copy_restored, reference_generate, restored_differences, same_bits
from tests.model.sequences import DEFAULT, computed, model_of

LENGTH, BOUNDARY, COUNT = 200, 192, 24


def greedy(view: SequenceView, count: int = COUNT) -> list[int]:
    model, prompt = model_of(DEFAULT), computed(DEFAULT, LENGTH).tokens
    tokens = [int(model.advance(view, prompt[BOUNDARY:], BOUNDARY).argmax())]
    while len(tokens) < count:
        tokens.append(int(model.advance(view, tokens[-1:], LENGTH + len(tokens) - 1).argmax()))
    return tokens


def restored() -> SequenceView:
    return computed(DEFAULT, LENGTH).restore(model_of(DEFAULT), BOUNDARY, spare_tokens=COUNT)


@pytest.fixture(scope="module")
def truth() -> list[int]:
    return greedy(restored())


def present_pages(name: str) -> list[int]:
    table = restored().tables[name][: BOUNDARY // DEFAULT.page_tokens]
    return [index for index, page in enumerate(table) if page is not None]


def test_an_undamaged_restore_gives_the_tokens_of_a_recompute(truth: list[int]) -> None:
    reference = reference_generate(model_of(DEFAULT), computed(DEFAULT, LENGTH).tokens, COUNT)
    assert truth == list(reference.tokens)


@pytest.mark.parametrize("name", ["attn", "swa"])
def test_another_page_in_the_place_of_any_one_page_changes_the_tokens(name: str, truth: list[int]) -> None:
    other = computed(DEFAULT, LENGTH, seed=9).view.pages[name]
    for index in present_pages(name):
        view = restored()
        view.pages[name][:, view.tables[name][index]] = other[:, index]
        assert greedy(view) != truth, f"page {index} of {name} can be wrong unnoticed"


@pytest.mark.parametrize("name", ["attn", "swa"])
@pytest.mark.parametrize("plane", [0, 1], ids=["k", "v"])
def test_every_layer_and_plane_of_a_page_matters_to_the_logits(name: str, plane: int) -> None:
    prompt = computed(DEFAULT, LENGTH).tokens
    for layer in range(len(restored().pages[name])):
        view = restored()
        view.pages[name][layer, view.tables[name][present_pages(name)[-1]], plane] *= -1
        logits = model_of(DEFAULT).advance(view, prompt[BOUNDARY:], BOUNDARY)
        assert not same_bits(logits, computed(DEFAULT, LENGTH).logits)


@pytest.mark.parametrize("name", ["conv", "temporal"])
def test_the_state_of_another_boundary_changes_the_tokens(name: str, truth: list[int]) -> None:
    view = restored()
    view.state[name][:, view.slot] = computed(DEFAULT, LENGTH).boundaries[BOUNDARY - DEFAULT.page_tokens][name]
    assert greedy(view) != truth


@pytest.mark.parametrize("name", ["conv", "temporal"])
def test_the_state_of_every_single_layer_matters_to_the_logits(name: str) -> None:
    prompt = computed(DEFAULT, LENGTH).tokens
    for layer in range(len(DEFAULT.layer_ids("gdn"))):
        view = restored()
        view.state[name][layer, view.slot] = 0
        logits = model_of(DEFAULT).advance(view, prompt[BOUNDARY:], BOUNDARY)
        assert not same_bits(logits, computed(DEFAULT, LENGTH).logits)


@pytest.mark.parametrize("name", ["attn", "swa", "conv", "temporal", "ring_k", "ring_count"])
def test_the_comparison_names_one_flipped_bit_anywhere(name: str) -> None:
    model = model_of(DEFAULT)
    spec = model.spec()
    view = restored()
    reference = reference_generate(model, computed(DEFAULT, LENGTH).tokens, 1)
    for field in view.state:
        if field not in ("conv", "temporal"):
            view.state[field][:, view.slot] = 0
    assert restored_differences(spec, copy_restored(spec, view, BOUNDARY), reference) == []
    if name in view.pages:
        target = view.pages[name][-1, view.tables[name][present_pages(name)[0]], 1, 3, 1]
    else:
        target = view.state[name][-1, view.slot]
    target.view(torch.int32).flatten()[0] ^= 1
    (difference,) = restored_differences(spec, copy_restored(spec, view, BOUNDARY), reference)
    assert name in difference


def test_the_comparison_notices_a_window_that_does_not_reach_far_enough() -> None:
    model = model_of(DEFAULT)
    view = restored()
    first = present_pages("swa")[0]
    tables = {**view.tables, "swa": [None] * (first + 1) + list(view.tables["swa"][first + 1 :])}
    shorter = copy_restored(model.spec(), SequenceView(view.pages, tables, view.state, view.slot), BOUNDARY)
    reference = reference_generate(model, computed(DEFAULT, LENGTH).tokens, 1)
    assert any("absent" in line for line in restored_differences(model.spec(), shorter, reference))


def test_tokens_out_of_a_sliding_window_do_not_matter_and_those_in_it_do() -> None:
    """The window is exact: the state of an all-window model depends on ``window_tokens`` tokens and not on one more."""
    config = TinyConfig(layers=("swa",), window_tokens=21)
    model, expected = model_of(config), computed(config, 100)
    for position, matters in ((100 - 21, True), (100 - 22, False)):
        tokens = list(expected.tokens)
        tokens[position] = (tokens[position] + 1) % config.vocab
        view = computed(config, 100).restore(model, 0)
        logits = model.advance(view, tokens, 0)
        assert same_bits(logits, expected.logits) != matters
