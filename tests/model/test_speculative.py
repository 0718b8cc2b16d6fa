"""Speculative decode over the real cache: every pattern of accepted drafts, restored from every tier, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from bench.tiny_engine import TinyEngine
from bench.tiny_hybrid import SequenceView, TinyHybrid
from bench.tiny_reference import same_bits
from hicache import HiCache, Request
from hicache.errors import StateNotCommitted
from hicache.policies.prefetch import PrefetchPolicy
from hicache.spec import StateGroup
from tests.model.sequences import SMALL, computed, model_of, same, state_bytes

BASE = dataclasses.replace(SMALL, layers=("gdn", "swa", "full"), hidden=16, mlp_hidden=16)
PAGE = BASE.page_tokens
STARTS = range(2 * PAGE, 3 * PAGE)  # so that a boundary lies at every place of a draft window
LENGTH = 34  # of the sequence that all patterns go along


@dataclass(frozen=True)
class Pattern:
    """Rounds of drafts from ``start`` on: how many of each were right. Its salt keeps it apart from the others."""

    start: int
    right: tuple[int, ...]
    cuts_at_boundaries: bool  # drops accepted tokens after a boundary, so that it can be snapshotted

    @property
    def salt(self) -> bytes:
        return repr(self).encode()


class Rig:
    """The tiny model over one cache, in draft windows of ``width`` tokens: the one that follows, and drafts."""

    def __init__(self, model: TinyHybrid, cache: HiCache, width: int, *, folds: bool = True) -> None:
        """``folds=False``: it says that the state is committed, and it is not."""
        self.folds = folds
        self.model = model
        self.cache = cache
        self.width = width
        self.engine = TinyEngine(model, cache, chunk_tokens=PAGE)
        self.truth = computed(model.config, LENGTH)
        self.refused = 0

    def serve(self, pattern: Pattern) -> int:
        """Goes along the truth as the pattern says. Returns the last boundary that was snapshotted."""
        tokens = self.truth.tokens
        request = self.cache.match(tokens[: pattern.start], salt=pattern.salt)
        assert self.cache.load(request) is not None
        assert self.cache.extend(request, tokens=LENGTH, timeout_s=5)
        view = self.engine.view(request)
        snapshotted = pattern.start // PAGE * PAGE
        self.model.advance(view, tokens[:snapshotted], 0)
        self.cache.store(request, computed=snapshotted, state_at=snapshotted)
        if snapshotted < pattern.start:
            self.model.advance(view, tokens[snapshotted : pattern.start], snapshotted)
        position = pattern.start
        for right in pattern.right:
            before, position = position, self.draft(view, position, right, cuts=pattern.cuts_at_boundaries)
            self.cache.append(request, tokens[before:position])
            if position // PAGE > before // PAGE:
                snapshotted = self.store(request, view, position) or snapshotted
        self.cache.release(request)
        return snapshotted

    def draft(self, view: SequenceView, position: int, right: int, *, cuts: bool) -> int:
        """One round; returns where the sequence is now."""
        truth = self.truth.tokens[position : position + self.width]
        tokens = truth[: 1 + right] + [(token + 1) % BASE.vocab for token in truth[1 + right :]]
        if self.model.pending(view) + len(tokens) > self.model.config.ring_tokens:
            self.model.fold(view)
        pending = self.model.pending(view)
        self.model.draft(view, tokens, position)
        kept = 1 + right
        boundary = (position + kept) // PAGE * PAGE
        if cuts and boundary > position:
            kept = boundary - position
        self.model.keep(view, pending + kept)
        return position + kept

    def store(self, request: Request, view: SequenceView, position: int) -> int | None:
        """Publishes what was filled, and a snapshot where that is legal; everything else is refused first."""
        pending, boundary = self.model.pending(view), position // PAGE * PAGE
        before = dict(self.cache.stats.objects)
        for state_at, state_pending in ((position, pending), (boundary, pending), (boundary, 0)):
            if state_pending or state_at != position or position % PAGE:
                with pytest.raises(StateNotCommitted):
                    self.cache.store(request, computed=position, state_at=state_at, state_pending=state_pending)
                self.refused += 1
        assert self.cache.stats.objects["snapshot.ok"] == before.get("snapshot.ok", 0)
        if position % PAGE:
            self.cache.store(request, computed=position, state_pending=pending)
            return None
        if self.folds:
            self.model.fold(view)
        self.cache.store(request, computed=position, state_at=position)
        return position

    def check(self, pattern: Pattern, boundary: int, *, tier: str) -> None:
        """What ``tier`` gives back goes on as if there had never been a cache, nor a draft."""
        tokens = self.truth.tokens
        request = self.cache.match(tokens, salt=pattern.salt)
        self.cache.prefetch(request)
        self.cache.wait(request)
        restored = self.cache.load(request, timeout_s=5)
        assert restored is not None
        assert restored.tokens == boundary, pattern
        assert restored.by_source[tier] > 0, pattern
        assert self.cache.extend(request, tokens=LENGTH, timeout_s=5)
        view = self.engine.view(request)
        assert same(state_bytes(view), self.truth.boundaries[boundary]), pattern
        for group in self.engine.spec.groups:
            for field in group.fields if isinstance(group, StateGroup) else ():
                held = view.state[field.name][:, view.slot]
                assert not field.transient or not held.contiguous().view(torch.uint8).any(), pattern
        logits = self.model.advance(view, tokens[boundary:], boundary)
        assert same_bits(logits, self.truth.logits), pattern
        assert same(state_bytes(view), state_bytes(self.truth.view)), pattern
        self.cache.release(request)


def patterns(width: int, rounds: int) -> Iterator[Pattern]:
    """Every one of them."""
    for start, right, cuts in product(STARTS, product(range(width), repeat=rounds), (False, True)):
        yield Pattern(start, right, cuts)


@pytest.mark.parametrize(("ring", "width", "rounds"), [(1, 1, 5), (2, 2, 4), (3, 3, 2), (5, 3, 2), (6, 5, 1)])
def test_br_139_every_pattern_of_accepted_drafts_restores_from_every_tier_as_if_there_had_been_no_cache(
    ring: int, width: int, rounds: int, tmp_path: Path
) -> None:
    model = model_of(dataclasses.replace(BASE, ring_tokens=ring))
    settings = {
        "l1_pages": 12,
        "l1_state_slots": 6,
        "l2_bytes": 48 << 20,
        "l3": f"file://{tmp_path}/store",
        "l3_capacity_bytes": 1 << 30,
        "prefetch": PrefetchPolicy("wait_complete", threshold_tokens=0),
    }
    boundaries: dict[Pattern, int] = {}
    with HiCache.open(model.spec(), **settings) as cache:  # type: ignore[arg-type]  # by name
        rig = Rig(model, cache, width)
        for pattern in patterns(width, rounds):
            assert cache.flush(timeout_s=60), "a slot that is still being written down has no room for a snapshot"
            boundaries[pattern] = rig.serve(pattern)
            rig.check(pattern, boundaries[pattern], tier="l1")
        assert cache.flush(timeout_s=60)
        for pattern, boundary in boundaries.items():
            rig.check(pattern, boundary, tier="l2")
        assert rig.refused > 0
    with HiCache.open(model.spec(), **settings) as cache:  # type: ignore[arg-type]  # by name
        rig = Rig(model, cache, width)
        for pattern, boundary in boundaries.items():
            rig.check(pattern, boundary, tier="l3")
    assert len(set(boundaries.values())) > 1, "some patterns passed a boundary that others did not"


def test_a_state_that_is_not_what_the_engine_says_does_not_go_unnoticed() -> None:
    """A positive control: the comparison above finds a snapshot of a state that drafts were not folded into."""
    pattern = Pattern(2 * PAGE, (1, 1), cuts_at_boundaries=False)
    model = model_of(dataclasses.replace(BASE, ring_tokens=4))
    with HiCache.open(model.spec(), l1_pages=12, l1_state_slots=4) as cache:
        rig = Rig(model, cache, 2, folds=False)
        assert rig.serve(pattern) == 3 * PAGE
        with pytest.raises(AssertionError, match="Pattern"):
            rig.check(pattern, 3 * PAGE, tier="l1")
