"""Sequences to compute with the tiny model, and comparison of all that they leave behind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import torch

from bench.tiny_hybrid import BoundaryStates, SequenceView, TinyConfig, TinyHybrid
from bench.tiny_reference import private_view, same_bits

# Small blocks: many of every kind of edge in few tokens.
SMALL = TinyConfig(
    layers=("gdn", "swa", "full", "gdn", "full"),
    vocab=97,
    hidden=32,
    mlp_hidden=48,
    window_tokens=10,
    state_heads=2,
    state_key_dim=8,
    state_value_dim=12,
    ring_tokens=6,
    page_tokens=4,
    block_tokens=16,
    context_block_tokens=32,
    tokens_max=512,
)
SMALL_TOKENS = 150
DEFAULT = TinyConfig()
PERSISTENT = ("conv", "temporal")


@lru_cache(maxsize=8)
def model_of(config: TinyConfig, seed: int = 5) -> TinyHybrid:
    return TinyHybrid(config, seed)


def prompt_of(length: int, *, vocab: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def poisoned_view(model: TinyHybrid, tokens: int, *, seed: int = 0) -> SequenceView:
    """A pool where nothing is as tidy as in a private one.

    Pages are shuffled, strided and unaligned, NaN is wherever nothing was written, the sequence's slot lies between two
    others, and its ring is full of rubbish but for the count.
    """
    page_count = -(-tokens // model.config.page_tokens) + 1
    tidy = private_view(model.spec(), pages=page_count)
    numbers = random.Random(seed).sample(range(page_count + 3), page_count)
    pages = {}
    for name, paged in tidy.pages.items():
        layers, _, *page = paged.shape
        # Page first, with a spare page and an odd element in front of it: other strides and another alignment.
        memory = torch.full((1 + (page_count + 3) * layers * paged[0, 0].numel(),), torch.nan)
        pages[name] = memory[1:].view(page_count + 3, layers, *page).transpose(0, 1)
    state = {}
    for name, field in tidy.state.items():
        slots = torch.full((len(field), 3, *field.shape[2:]), 7, dtype=field.dtype)
        slots[:, 1] = 7 if name.startswith("ring") and name != "ring_count" else 0
        state[name] = slots
    return SequenceView(pages, dict.fromkeys(pages, numbers), state, slot=1)


def page_bytes(view: SequenceView, tokens: int, *, first: int = 0) -> dict[str, torch.Tensor]:
    """Rows of tokens ``[first, tokens)`` by group: [layers, 2, tokens, heads, dim]; absent pages read as page 0."""
    rows = {}
    for name, paged in view.pages.items():
        ordered = paged[
            :, [page or 0 for page in view.tables[name]]
        ]  # [layers, pages, 2, page_tokens, heads, head_dim]
        rows[name] = ordered.transpose(1, 2).flatten(2, 3)[:, :, first:tokens]
    return rows


def state_bytes(view: SequenceView) -> dict[str, torch.Tensor]:
    return {name: view.state[name][:, view.slot] for name in PERSISTENT if name in view.state}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


class Computed:
    """A prompt computed in one call: what every other way to compute it must equal."""

    def __init__(self, model: TinyHybrid, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.view = private_view(model.spec(), pages=-(-len(tokens) // model.config.page_tokens))
        self.boundaries: BoundaryStates = {}
        self.logits = model.advance(self.view, self.tokens, 0, boundaries=self.boundaries)

    def restore(self, model: TinyHybrid, boundary: int, *, seed: int = 0, spare_tokens: int = 0) -> SequenceView:
        """A poisoned pool with what a cache would restore at a page boundary, and no more than that."""
        view = poisoned_view(model, len(self.tokens) + spare_tokens, seed=seed)
        page_tokens = model.config.page_tokens
        reach = {group.name: group.reach_pages(page_tokens) for group in model.spec().groups}
        tables = {}
        for name, paged in view.pages.items():
            first = 0 if reach[name] is None else max(0, boundary // page_tokens - reach[name])
            for index in range(first, boundary // page_tokens):
                paged[:, view.tables[name][index]] = self.view.pages[name][:, index]
            tables[name] = [None] * first + list(view.tables[name][first:])
        for name in PERSISTENT if boundary else ():
            if name in view.state:
                view.state[name][:, view.slot] = self.boundaries[boundary][name]
        return SequenceView(view.pages, tables, view.state, view.slot)


@lru_cache(maxsize=16)
def computed(config: TinyConfig, length: int, *, seed: int = 0) -> Computed:
    return Computed(model_of(config), prompt_of(length, vocab=config.vocab, seed=seed))
