"""The ring: updates that are put off, replayed or dropped, and never change what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.tiny_hybrid import SequenceView, TinyHybrid
from bench.tiny_reference import same_bits
from hicache.errors import StateNotCommitted, UsageError
from tests.model.sequences import (
    SMALL,
    SMALL_TOKENS,
    Computed,
    computed,
    model_of,
    page_bytes,
    poisoned_view,
    same,
    state_bytes,
)

# (drafts, how many of them are right, whether to fold first although there is room)
STEPS = st.lists(st.tuples(st.integers(0, SMALL.ring_tokens - 1), st.integers(0, SMALL.ring_tokens), st.booleans()))


def drafted(
    model: TinyHybrid, view: SequenceView, expected: Computed, start: int, steps: Sequence[tuple[int, int, bool]]
) -> tuple[int, list[torch.Tensor]]:
    """Goes along ``expected`` in draft steps from ``start``; wrong drafts are computed and dropped."""
    position, logits = start, []
    for draft_count, right_count_max, fold_first in steps:
        truth = expected.tokens[position : position + 1 + draft_count]
        if not truth:
            break
        right_count = min(right_count_max, len(truth) - 1)
        wrong = [(token + 1) % SMALL.vocab for token in truth[1 + right_count :]]
        tokens = truth[: 1 + right_count] + wrong
        if fold_first or model.pending(view) + len(tokens) > SMALL.ring_tokens:
            model.fold(view)
        pending = model.pending(view)
        logits.append(model.draft(view, tokens, position)[: 1 + right_count])
        model.keep(view, pending + 1 + right_count)
        position += 1 + right_count
    return position, logits


@settings(deadline=None, max_examples=80)
@given(start=st.integers(1, 60), steps=STEPS, seed=st.integers(0, 20))
def test_accepted_and_rejected_drafts_leave_the_bits_of_a_plain_run(
    start: int, steps: list[tuple[int, int, bool]], seed: int
) -> None:
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)
    view = poisoned_view(model, SMALL_TOKENS + SMALL.ring_tokens, seed=seed)
    model.advance(view, expected.tokens[:start], 0)
    end, logits = drafted(model, view, expected, start, steps)
    model.fold(view)
    assert model.pending(view) == 0
    plain = Computed(model, expected.tokens[:end])
    assert same(state_bytes(view), state_bytes(plain.view))
    assert same(page_bytes(view, end), page_bytes(plain.view, end))
    if logits:
        assert same_bits(logits[-1][-1], plain.logits)


def test_the_state_stays_where_it_was_until_the_ring_is_folded() -> None:
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)
    view = poisoned_view(model, SMALL_TOKENS)
    model.advance(view, expected.tokens[:40], 0)
    before = {name: field.clone() for name, field in state_bytes(view).items()}
    model.draft(view, expected.tokens[40:44], 40)
    assert model.pending(view) == 4
    assert same(state_bytes(view), before)
    model.fold(view)
    assert same(state_bytes(view), expected.boundaries[44])


def test_dropping_all_drafts_is_as_if_they_had_never_been() -> None:
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)
    view = poisoned_view(model, SMALL_TOKENS)
    model.advance(view, expected.tokens[:41], 0)
    model.draft(view, [1, 2, 3, 4, 5], 41)
    model.keep(view, 0)
    assert same_bits(model.advance(view, expected.tokens[41:], 41), expected.logits)
    assert same(page_bytes(view, SMALL_TOKENS), page_bytes(expected.view, SMALL_TOKENS))


def test_advancing_over_pending_updates_is_refused_and_changes_nothing() -> None:
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)
    view = poisoned_view(model, SMALL_TOKENS)
    model.advance(view, expected.tokens[:40], 0)
    model.draft(view, expected.tokens[40:42], 40)
    before = {name: field.clone() for name, field in view.state.items()}
    with pytest.raises(StateNotCommitted, match="2 tokens are pending"):
        model.advance(view, expected.tokens[42:], 42)
    assert same(dict(view.state), before)


def test_a_full_ring_refuses_more_and_keeps_what_it_has() -> None:
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)
    view = poisoned_view(model, SMALL_TOKENS)
    model.draft(view, expected.tokens[:4], 0)
    with pytest.raises(UsageError, match="ring_tokens = 6"):
        model.draft(view, expected.tokens[4:7], 4)
    assert model.pending(view) == 4
    model.fold(view)
    assert same(state_bytes(view), expected.boundaries[4])


def test_keeping_more_than_is_pending_is_refused() -> None:
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)
    view = poisoned_view(model, SMALL_TOKENS)
    model.draft(view, expected.tokens[:2], 0)
    for count in (3, -1):
        with pytest.raises(UsageError, match=f"keep {count} of 2"):
            model.keep(view, count)
    assert model.pending(view) == 2


@pytest.mark.parametrize("is_settled", [False, True], ids=["draft", "settled"])
@pytest.mark.parametrize("name", ["d", "k", "g", "rawv", "rawk", "beta", "conv"])
def test_what_comes_out_rests_on_every_ring_field_that_its_part_of_the_ring_has(name: str, is_settled: bool) -> None:
    """Detection power: one row of a field changes the next logits and the folded state, or is not read there at all."""
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)

    def run(damaged: str | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        view = poisoned_view(model, SMALL_TOKENS)
        model.advance(view, expected.tokens[:40], 0)
        model.draft(view, expected.tokens[40:43], 40)
        position = 43
        if is_settled:
            model.draft(view, expected.tokens[43:44], 43)
            position = 44
        if damaged is not None:
            view.state[damaged][:, view.slot, 1] += 0.5
        logits = model.draft(view, expected.tokens[position : position + 1], position)
        model.fold(view)
        return logits, state_bytes(view)

    (intact_logits, intact_state), (logits, state) = run(None), run(f"ring_{name}")
    assert same_bits(intact_logits[0], Computed(model, expected.tokens[: 45 if is_settled else 44]).logits)
    is_read = name in (("d", "k", "g", "conv") if is_settled else ("rawv", "rawk", "beta", "g", "conv"))
    assert same_bits(logits, intact_logits) != is_read
    assert same(state, intact_state) != is_read


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_a_ring_gives_the_same_bits_whatever_the_number_of_heads(heads: int) -> None:
    config = dataclasses.replace(SMALL, layers=("gdn", "full"), state_heads=heads)
    model, expected = model_of(config), computed(config, 70)
    view = poisoned_view(model, 70)
    model.advance(view, expected.tokens[:30], 0)
    for position in range(30, 70, 2):
        if model.pending(view) == config.ring_tokens:
            model.fold(view)
        logits = model.draft(view, expected.tokens[position : position + 2], position)
    assert same_bits(logits[-1], expected.logits)
    model.fold(view)
    assert same(state_bytes(view), state_bytes(expected.view))


def test_a_restore_that_does_not_empty_the_ring_does_not_go_unnoticed() -> None:
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)
    view = expected.restore(model, 80)
    view.state["ring_count"][:, view.slot] = 2
    with pytest.raises(StateNotCommitted):
        model.advance(view, expected.tokens[80:], 80)
    drafted_logits = model.draft(view, expected.tokens[80:81], 80)
    assert not same_bits(drafted_logits[0], Computed(model, expected.tokens[:81]).logits)
