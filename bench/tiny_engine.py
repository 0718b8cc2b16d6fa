"""An engine's loop around the tiny model: one request at a time through a cache, greedy, with or without drafts.

::

    match, prefetch, wait, load    [0, restored) from the cache
    prefill in chunks              [restored, prompt), store at every chunk end
    decode                         [prompt, prompt + count - 1), store at every page boundary

State snapshots are asked for at chunk ends, at the prompt's last page boundaries (the one that leaves a token to
compute, and the very last), every ``state_interval_tokens`` of decode, and at the last boundary that decode reaches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from bench.tiny_hybrid import SequenceView, TinyHybrid
from bench.tiny_reference import RestoredBytes, copy_restored
from hicache.errors import ConfigError
from hicache.spec import PagedGroup

if TYPE_CHECKING:
    from hicache.cache import HiCache
    from hicache.sequence import Request


# Pages that are just being written down are not free yet; requests come one at a time, so nothing else is waited for.
ROOM_TIMEOUT_S = 5.0


class DraftSource(Protocol):
    """Guesses what comes next. Wrong guesses cost time, never change the output."""

    def propose(self, generated: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that may follow ``generated``."""


@dataclass(frozen=True, slots=True)
class ScriptedDrafts:
    """Knows the answer and gets every token wrong with probability ``wrong_share``, from a seed."""

    answer: Sequence[int]
    wrong_share: float
    vocab: int
    seed: int = 0

    def propose(self, generated: Sequence[int], count: int) -> Sequence[int]:
        """The next tokens of the answer, some of them wrong; always the same ones at one place."""
        rng = random.Random(self.seed * 1_000_003 + len(generated))
        truth = self.answer[len(generated) : len(generated) + count]
        return [(token + 1) % self.vocab if rng.random() < self.wrong_share else token for token in truth]


@dataclass(frozen=True, slots=True)
class Generated:
    """A served request. ``by_source`` counts prompt tokens: those of each tier, and "computed"."""

    tokens: tuple[int, ...]
    ttft_s: float  # from match to the first token, without copying restored bytes for a comparison
    total_s: float
    prompt_tokens: int
    by_source: Mapping[str, int]
    drafts_offered: int
    drafts_accepted: int
    restored: RestoredBytes | None  # when asked for


@dataclass(frozen=True, slots=True)
class Busy:
    """L1 had no room. The request was released; nothing that was computed for it is lost to the cache."""

    computed_tokens: int
    wanted_tokens: int


class TinyEngine:
    """Serves requests one after the other over one cache. Raises ConfigError for settings that do not fit the model."""

    def __init__(
        self,
        model: TinyHybrid,
        cache: HiCache,
        *,
        chunk_tokens: int = 256,
        state_interval_tokens: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.cache = cache
        self.spec = model.spec()
        self.chunk_tokens = _checked_multiple("chunk_tokens", chunk_tokens, self.spec.page_tokens)
        self.state_interval_tokens = _checked_multiple(
            "state_interval_tokens", state_interval_tokens, self.spec.page_tokens
        )
        self.clock = clock

    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        salt: bytes | None = None,
        drafts: DraftSource | None = None,
        copy_restored_bytes: bool = False,
    ) -> Generated | Busy:
        """Greedy decode of ``count`` tokens after ``prompt``; the same tokens whatever was cached or drafted.

        The request is released on every path. Raises what the model or the cache raises.
        """
        assert prompt, "nothing to go on from"
        assert count > 0, "at least one token to generate"
        run = _Run(self, prompt, count, drafts, start_s=self.clock())
        request = self.cache.match(prompt, salt=salt)
        try:
            return run.serve(request, copy_restored_bytes=copy_restored_bytes)
        finally:
            self.cache.release(request)

    def view(self, request: Request) -> SequenceView:
        """Where the request lives in L1, at this moment: page tables change with ``extend`` and ``store``."""
        pages: dict[str, torch.Tensor] = {}
        tables: dict[str, Sequence[int | None]] = {}
        state: Mapping[str, torch.Tensor] = {}
        slot = 0
        for index, group in enumerate(self.spec.groups):
            if isinstance(group, PagedGroup):
                pages[group.name] = self.cache.l1.paged[index]
                tables[group.name] = request.page_table(index)
            else:
                state, slot = self.cache.l1.state[index], request.state_slot(index)
        return SequenceView(pages, tables, state, slot)


class _Run:
    """One request under way."""

    def __init__(
        self, engine: TinyEngine, prompt: Sequence[int], count: int, drafts: DraftSource | None, *, start_s: float
    ) -> None:
        self.engine = engine
        self.model, self.cache = engine.model, engine.cache
        self.prompt = prompt
        self.count = count
        self.drafts = drafts
        self.start_s = start_s
        self.generated: list[int] = []
        self.computed = 0
        self.drafts_offered = 0
        self.drafts_accepted = 0

    def serve(self, request: Request, *, copy_restored_bytes: bool) -> Generated | Busy:
        """Everything between match and release."""
        self.cache.prefetch(request)
        self.cache.wait(request)
        loaded = self.cache.load(request, timeout_s=ROOM_TIMEOUT_S)
        if loaded is None:
            return Busy(0, len(self.prompt))
        self.computed = loaded.tokens
        copying_start_s = self.engine.clock()
        restored = None
        if copy_restored_bytes:
            restored = copy_restored(self.engine.spec, self.engine.view(request), loaded.tokens)
        copying_s = self.engine.clock() - copying_start_s
        if (busy := self._prefill(request)) is not None:
            return busy
        ttft_s = self.engine.clock() - self.start_s - copying_s
        if (busy := self._decode(request)) is not None:
            return busy
        return Generated(
            tokens=tuple(self.generated),
            ttft_s=ttft_s,
            total_s=self.engine.clock() - self.start_s - copying_s,
            prompt_tokens=len(self.prompt),
            by_source={**loaded.by_source, "computed": len(self.prompt) - loaded.tokens},
            drafts_offered=self.drafts_offered,
            drafts_accepted=self.drafts_accepted,
            restored=restored,
        )

    def _prefill(self, request: Request) -> Busy | None:
        """Computes the rest of the prompt, chunk by chunk, and the first token."""
        stops = prefill_stops(
            len(self.prompt),
            restored=self.computed,
            chunk_tokens=self.engine.chunk_tokens,
            page_tokens=self.engine.spec.page_tokens,
        )
        for stop in stops:
            if not self.cache.extend(request, tokens=stop, timeout_s=ROOM_TIMEOUT_S):
                return Busy(self.computed, stop)
            view = self.engine.view(request)
            logits = self.model.advance(view, self.prompt[self.computed : stop], self.computed)
            self.computed = stop
            if stop == len(self.prompt):
                self._take(request, [int(logits.argmax())])
            if stop % self.engine.spec.page_tokens == 0:
                self.cache.store(request, computed=stop, state_at=self._state_at(stop))
        return None

    def _decode(self, request: Request) -> Busy | None:
        """Generates the rest. Stops short of, and then at, every boundary whose state is wanted."""
        boundaries = self._state_boundaries()
        while len(self.generated) < self.count:
            next_boundary = next((boundary for boundary in boundaries if boundary > self.computed), None)
            before = self.computed
            room = min(self.count - len(self.generated), (next_boundary or self.computed + self.count) - self.computed)
            step = self._step_plain if self.drafts is None else self._step_drafts
            if not step(request, room):
                return Busy(self.computed, self.computed + 1)
            self._store(request, before, next_boundary)
        return None

    def _step_plain(self, request: Request, room: int) -> bool:
        """One token. False: no room in L1."""
        if not self.cache.extend(request, tokens=self.computed + 1, timeout_s=ROOM_TIMEOUT_S):
            return False
        logits = self.model.advance(self.engine.view(request), self.generated[-1:], self.computed)
        self.computed += 1
        self._take(request, [int(logits.argmax())])
        return True

    def _step_drafts(self, request: Request, room: int) -> bool:
        """One token and what drafts were right, at most ``room`` in all. False: no room in L1.

        What was accepted stays in the ring until it is full, or a snapshot is wanted.
        """
        assert self.drafts is not None
        guess_count = min(room, self.model.config.ring_tokens) - 1
        guesses = list(self.drafts.propose(tuple(self.generated), guess_count))[:guess_count]
        tokens = [self.generated[-1], *guesses]
        if not self.cache.extend(request, tokens=self.computed + len(tokens), timeout_s=ROOM_TIMEOUT_S):
            return False
        view = self.engine.view(request)
        if self.model.pending(view) + len(tokens) > self.model.config.ring_tokens:
            self.model.fold(view)
        pending = self.model.pending(view)
        choices = self.model.draft(view, tokens, self.computed).argmax(dim=1).tolist()
        accepted = next((i for i, guess in enumerate(guesses) if guess != choices[i]), len(guesses))
        self.model.keep(view, pending + 1 + accepted)
        self.computed += 1 + accepted
        self.drafts_offered += len(guesses)
        self.drafts_accepted += accepted
        self._take(request, [int(choice) for choice in choices[: accepted + 1]])
        return True

    def _store(self, request: Request, before: int, next_boundary: int | None) -> None:
        """Publishes pages that a decode step filled, with the state where one is wanted. Folds the ring at the end."""
        page_tokens = self.engine.spec.page_tokens
        view = self.engine.view(request)
        at_boundary = self.computed == next_boundary
        finished = len(self.generated) == self.count
        if at_boundary or finished:
            self.model.fold(view)
        if self.computed // page_tokens > before // page_tokens:
            state_at = self._state_at(self.computed) if at_boundary else None
            pending = self.model.pending(view)
            self.cache.store(request, computed=self.computed, state_at=state_at, state_pending=pending)

    def _take(self, request: Request, tokens: Sequence[int]) -> None:
        self.generated += tokens
        self.cache.append(request, tokens)

    def _state_at(self, boundary: int) -> int | None:
        return boundary if self.engine.spec.has_state else None

    def _state_boundaries(self) -> list[int]:
        """Where decode wants snapshots: at the interval, and at the last boundary it reaches."""
        end = len(self.prompt) + self.count - 1  # the last token generated is not computed
        interval = self.engine.state_interval_tokens
        page_tokens = self.engine.spec.page_tokens
        wanted = {*range(interval, end + 1, interval), end // page_tokens * page_tokens}
        return sorted(boundary for boundary in wanted if boundary > len(self.prompt))


def prefill_stops(prompt_tokens: int, *, restored: int, chunk_tokens: int, page_tokens: int) -> list[int]:
    """Where prefill stops on ``(restored, prompt_tokens]``: chunk ends, the last boundaries, the end.

    The boundary before the last token is a stop of its own: a repeat of the prompt must leave that token to compute.
    """
    last_usable = (prompt_tokens - 1) // page_tokens * page_tokens
    last_full = prompt_tokens // page_tokens * page_tokens
    stops = {*range(chunk_tokens, prompt_tokens, chunk_tokens), last_usable, last_full, prompt_tokens}
    return sorted(stop for stop in stops if stop > restored)


def _checked_multiple(setting: str, value: int, page_tokens: int) -> int:
    if value < 1 or value % page_tokens:
        raise ConfigError(setting, value, f"a positive multiple of page_tokens = {page_tokens}")
    return value
