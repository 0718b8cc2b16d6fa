"""Generation with no cache at all, keeping every page and state it passed: what a cached run is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.tiny_hybrid import BoundaryStates, SequenceView, TinyHybrid
from hicache.spec import CacheSpec, PagedGroup, StateGroup


@dataclass(frozen=True, slots=True)
class Reference:
    """A full recompute. ``pages[group]`` is ``[full pages, layers, 2, page_tokens, heads, head_dim]``, from token 0."""

    tokens: tuple[int, ...]  # generated
    ttft_s: float
    total_s: float
    page_tokens: int
    pages: Mapping[str, torch.Tensor]
    states: BoundaryStates  # at every page boundary


@dataclass(frozen=True, slots=True)
class RestoredBytes:
    """Copies of what a cache put into L1, taken before anything was computed on top.

    ``pages[group]`` holds pages ``first_page[group]`` and after, up to the boundary at ``tokens``; the shape is that of
    Reference. ``state`` has all fields, the transient ones too, ``[layers, *shape]``.
    """

    tokens: int
    first_page: Mapping[str, int]
    pages: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


def private_view(spec: CacheSpec, *, pages: int, fill: float = 0.0) -> SequenceView:
    """Tensors for one sequence of up to ``pages`` pages, in the layout of an L1 pool. The state is empty."""
    paged: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for group in spec.groups:
        if isinstance(group, PagedGroup):
            shape = (len(group.layers), pages, group.planes, spec.page_tokens, group.heads, group.head_dim)
            paged[group.name] = torch.full(shape, fill, dtype=getattr(torch, group.dtype))
        else:
            for field in group.fields:
                state[field.name] = torch.zeros(len(group.layers), 1, *field.shape, dtype=getattr(torch, field.dtype))
    return SequenceView(paged, {name: range(pages) for name in paged}, state, slot=0)


def reference_generate(
    model: TinyHybrid, prompt: Sequence[int], count: int, *, clock: Callable[[], float] = time.monotonic
) -> Reference:
    """Greedy decode of ``count`` tokens after ``prompt``, everything computed, in private memory."""
    assert prompt, "nothing to go on from"
    assert count > 0, "at least one token to generate"
    start_s = clock()
    page_tokens = model.config.page_tokens
    full_pages = (len(prompt) + count - 1) // page_tokens  # the last token generated is not computed
    view = private_view(model.spec(), pages=full_pages + 1)
    states: BoundaryStates = {}
    tokens = [int(model.advance(view, prompt, 0, boundaries=states).argmax())]
    ttft_s = clock() - start_s
    while len(tokens) < count:
        position = len(prompt) + len(tokens) - 1
        tokens.append(int(model.advance(view, tokens[-1:], position, boundaries=states).argmax()))
    pages = {name: paged.transpose(0, 1)[:full_pages] for name, paged in view.pages.items()}
    return Reference(tuple(tokens), ttft_s, clock() - start_s, page_tokens, pages, states)


def copy_restored(spec: CacheSpec, view: SequenceView, tokens: int) -> RestoredBytes:
    """Copies the pages that ``view`` has below ``tokens``, a page boundary, and its state."""
    page_count = tokens // spec.page_tokens
    first_page: dict[str, int] = {}
    pages: dict[str, torch.Tensor] = {}
    for name, paged in view.pages.items():
        present = [page for page in view.tables[name][:page_count] if page is not None]
        first_page[name] = page_count - len(present)
        assert None not in view.tables[name][first_page[name] : page_count], f"{name} has a hole before {tokens}"
        pages[name] = paged[:, present].transpose(0, 1)
    transient = {
        field.name
        for group in spec.groups
        if isinstance(group, StateGroup)
        for field in group.fields
        if field.transient
    }
    slots = {name: view.slot if name in transient else view.read_slot for name in view.state}
    state = {name: field[:, slots[name]].clone() for name, field in view.state.items()}
    return RestoredBytes(tokens, first_page, pages, state)


def restored_differences(spec: CacheSpec, restored: RestoredBytes, reference: Reference) -> list[str]:
    """What differs, to the bit, between restored bytes and a recompute; one line each, empty when nothing does.

    The reference must reach at least as far. Transient fields must be empty, whatever the boundary.
    """
    differences: list[str] = []
    page_count = restored.tokens // spec.page_tokens
    for group in spec.groups:
        if isinstance(group, StateGroup):
            differences += _state_differences(group, restored, reference)
            continue
        first = restored.first_page[group.name]
        reach = group.reach_pages(spec.page_tokens)
        if first > (0 if reach is None else max(0, page_count - reach)):
            differences.append(f"{group.name}: pages before {first} are needed and absent")
        for index, page in enumerate(restored.pages[group.name], start=first):
            if not same_bits(page, reference.pages[group.name][index]):
                differences.append(f"{group.name}: page {index} of {page_count} differs")
    return differences


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes: a NaN equals itself, 0.0 does not equal -0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _state_differences(group: StateGroup, restored: RestoredBytes, reference: Reference) -> list[str]:
    differences: list[str] = []
    for field in group.fields:
        actual = restored.state[field.name]
        if field.transient or restored.tokens == 0:
            expected = torch.zeros_like(actual)
        else:
            expected = reference.states[restored.tokens][field.name]
        if not same_bits(actual, expected):
            differences.append(f"{group.name}: {field.name} at {restored.tokens} tokens differs")
    return differences
