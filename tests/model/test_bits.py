"""The same bits, however a sequence is cut, resumed, decoded or drafted."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.tiny_hybrid import BoundaryStates, SequenceView, TinyConfig, TinyHybrid
from bench.tiny_reference import private_view, same_bits
from hicache.errors import ConfigError, UsageError
from tests.model.sequences import (
    DEFAULT,
    SMALL,
    SMALL_TOKENS,
    Computed,
    computed,
    model_of,
    page_bytes,
    poisoned_view,
    prompt_of,
    same,
    state_bytes,
)

CUTS = st.sets(st.integers(1, SMALL_TOKENS - 1), max_size=12).map(sorted)


def advance_in_parts(
    model: TinyHybrid, view: SequenceView, tokens: list[int], cuts: list[int], *, start: int = 0
) -> torch.Tensor:
    logits = None
    edges = [start, *(cut for cut in cuts if start < cut < len(tokens)), len(tokens)]
    for first, end in itertools.pairwise(edges):
        logits = model.advance(view, tokens[first:end], first)
    assert logits is not None
    return logits


def assert_same_as(expected: Computed, view: SequenceView, logits: torch.Tensor, *, first: int = 0) -> None:
    end = len(expected.tokens)
    assert same_bits(logits, expected.logits)
    assert same(page_bytes(view, end, first=first), page_bytes(expected.view, end, first=first))
    assert same(state_bytes(view), state_bytes(expected.view))


@settings(deadline=None, max_examples=60)
@given(cuts=CUTS, length=st.sampled_from((SMALL_TOKENS, 128, 33)), seed=st.integers(0, 50))
def test_any_chunking_gives_the_same_logits_pages_and_state(cuts: list[int], length: int, seed: int) -> None:
    model, expected = model_of(SMALL), computed(SMALL, length)
    view = poisoned_view(model, length, seed=seed)
    assert_same_as(expected, view, advance_in_parts(model, view, expected.tokens, cuts))


@settings(deadline=None, max_examples=60)
@given(pages=st.integers(0, (SMALL_TOKENS - 1) // SMALL.page_tokens), cuts=CUTS, seed=st.integers(0, 50))
def test_a_run_resumed_at_a_page_boundary_and_cut_anywhere_equals_a_recompute(
    pages: int, cuts: list[int], seed: int
) -> None:
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)
    boundary = pages * SMALL.page_tokens
    view = expected.restore(model, boundary, seed=seed)
    logits = advance_in_parts(model, view, expected.tokens, cuts, start=boundary)
    assert_same_as(expected, view, logits, first=boundary)


@pytest.mark.parametrize("page_tokens", [8, 16, 32, 64])
def test_every_boundary_of_the_default_model_resumes_to_the_same_bits(page_tokens: int) -> None:
    config = TinyConfig(page_tokens=page_tokens)
    model, expected = model_of(config), computed(config, 333)
    for boundary in range(0, 333, page_tokens * max(1, 32 // page_tokens)):
        view = expected.restore(model, boundary, seed=boundary)
        logits = model.advance(view, expected.tokens[boundary:], boundary)
        assert same_bits(logits, expected.logits), f"resumed at {boundary}"
        assert same(state_bytes(view), state_bytes(expected.view)), f"resumed at {boundary}"


@pytest.mark.parametrize("kinds", [("full",), ("swa",), ("gdn",), ("gdn", "full"), ("swa", "gdn")])
def test_every_kind_of_layer_is_exact_on_its_own(kinds: tuple[str, ...]) -> None:
    config = TinyConfig(layers=kinds, page_tokens=4, block_tokens=16, context_block_tokens=32, window_tokens=7)
    model, expected = model_of(config), computed(config, 75)
    for boundary in range(0, 75, 4):
        view = expected.restore(model, boundary, seed=boundary)
        logits = advance_in_parts(model, view, expected.tokens, [boundary + 1, boundary + 9], start=boundary)
        assert same_bits(logits, expected.logits), f"resumed at {boundary}"


@pytest.mark.parametrize("config", [SMALL, DEFAULT], ids=["small", "default"])
def test_decode_leaves_the_pages_and_states_that_a_prefill_of_the_same_tokens_leaves(config: TinyConfig) -> None:
    model = model_of(config)
    prompt = prompt_of(61, vocab=config.vocab)
    view = poisoned_view(model, 130)
    states: BoundaryStates = {}
    logits = [model.advance(view, prompt, 0, boundaries=states)]
    tokens = [*prompt, int(logits[-1].argmax())]
    while len(tokens) < 130:
        logits.append(model.advance(view, tokens[-1:], len(tokens) - 1, boundaries=states))
        tokens.append(int(logits[-1].argmax()))
    expected = Computed(model, tokens[:-1])
    assert_same_as(expected, view, logits[-1])
    assert states.keys() == expected.boundaries.keys()
    assert all(same(states[boundary], expected.boundaries[boundary]) for boundary in states)


def test_a_state_taken_in_passing_is_the_state_of_a_run_that_ends_there() -> None:
    model, expected = model_of(SMALL), computed(SMALL, SMALL_TOKENS)
    for boundary, fields in expected.boundaries.items():
        view = poisoned_view(model, boundary)
        model.advance(view, expected.tokens[:boundary], 0)
        assert same(state_bytes(view), fields)


def test_a_model_made_twice_from_one_seed_is_one_model_and_from_another_seed_is_not() -> None:
    tokens = prompt_of(20, vocab=SMALL.vocab)
    first, again, other = (Computed(TinyHybrid(SMALL, seed), tokens) for seed in (5, 5, 6))
    assert same_bits(first.logits, again.logits)
    assert not same_bits(first.logits, other.logits)


_DIGEST = """
import hashlib, torch
torch.set_num_threads(1)
from tests.model.sequences import DEFAULT, computed, page_bytes, state_bytes
def digest():
    run = computed(DEFAULT, 200)
    parts = [run.logits, *page_bytes(run.view, 200).values(), *state_bytes(run.view).values()]
    return hashlib.blake2b(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()
"""


def test_another_process_computes_the_same_bits() -> None:
    here: dict[str, object] = {}
    exec(_DIGEST + "result = digest()", here)
    there = subprocess.run(
        [sys.executable, "-c", _DIGEST + "print(digest())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )
    assert there.stdout.strip() == here["result"]


def test_more_than_one_torch_thread_is_refused() -> None:
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigError, match="torch threads = 2"):
            TinyHybrid(SMALL, seed=1)
    finally:
        torch.set_num_threads(1)


def test_a_sequence_longer_than_the_position_tables_is_refused() -> None:
    model = model_of(SMALL)
    view = private_view(model.spec(), pages=200)
    with pytest.raises(UsageError, match="tokens_max = 512"):
        model.advance(view, [1] * 513, 0)


def test_greedy_output_is_varied() -> None:
    model = model_of(DEFAULT)
    for seed in range(4):
        view = private_view(model.spec(), pages=12)
        tokens = [int(model.advance(view, prompt_of(100, vocab=DEFAULT.vocab, seed=seed), 0).argmax())]
        while len(tokens) < 48:
            tokens.append(int(model.advance(view, tokens[-1:], 99 + len(tokens)).argmax()))
        assert len(set(tokens)) > 24, tokens
