"""An engine's loop around the tiny model: requests through a cache, greedy, with or without drafts.

::

    match, prefetch, wait, load    [0, restored) from the cache
    prefill in chunks              [restored, prompt), store at every stop
    decode                         [prompt, prompt + count - 1), store at every page boundary

Before each step the cache is asked where the state is wanted, and the step ends there. Steps read the state from
``state_source`` and write it to ``state_slot``, so that the engine runs with and without double buffering.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

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


Steps: TypeAlias = Generator[None, None, Generated | Busy]


class TinyEngine:
    """Serves requests over one cache. Raises ConfigError for settings that do not fit the model.

    ``donate``: the state slot of a request that ends on a page boundary becomes the snapshot. ``tells_prefill``: the
    cache is told how long prefills take, and loads what takes less. Off, everything that is found is loaded.
    """

    def __init__(
        self,
        model: TinyHybrid,
        cache: HiCache,
        *,
        chunk_tokens: int = 256,
        donate: bool = True,
        tells_prefill: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.cache = cache
        self.spec = model.spec()
        self.chunk_tokens = chunk_tokens
        self.donate = donate
        self.tells_prefill = tells_prefill
        self.clock = clock
        if chunk_tokens < 1 or chunk_tokens % self.spec.page_tokens:
            raise ConfigError(
                "chunk_tokens", chunk_tokens, f"a positive multiple of page_tokens = {self.spec.page_tokens}"
            )

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
        steps = self.steps(prompt, count, salt=salt, drafts=drafts, copy_restored_bytes=copy_restored_bytes)
        while True:
            try:
                next(steps)
            except StopIteration as over:
                result: Generated | Busy = over.value
                return result

    def steps(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        salt: bytes | None = None,
        drafts: DraftSource | None = None,
        copy_restored_bytes: bool = False,
    ) -> Steps:
        """The same, one step of the model at a time, so that requests can take turns. Closing it aborts the request."""
        assert prompt, "nothing to go on from"
        assert count > 0, "at least one token to generate"
        run = _Run(self, prompt, count, drafts, start_s=self.clock())
        request = self.cache.match(prompt, salt=salt)
        try:
            return (yield from run.serve(request, copy_restored_bytes=copy_restored_bytes))
        finally:
            self.cache.release(request)

    def view(self, request: Request) -> SequenceView:
        """Where the request lives in L1, at this moment: page tables change with ``extend`` and ``store``."""
        pages: dict[str, torch.Tensor] = {}
        tables: dict[str, Sequence[int | None]] = {}
        state: Mapping[str, torch.Tensor] = {}
        slot = source = 0
        for index, group in enumerate(self.spec.groups):
            if isinstance(group, PagedGroup):
                pages[group.name] = self.cache.l1.paged[index]
                tables[group.name] = request.page_table(index)
            else:
                state = self.cache.l1.state[index]
                slot, source = request.state_slot(index), request.state_source(index)
        return SequenceView(pages, tables, state, slot, source)


class _Run:
    """One request under way."""

    def __init__(
        self, engine: TinyEngine, prompt: Sequence[int], count: int, drafts: DraftSource | None, *, start_s: float
    ) -> None:
        self.engine = engine
        self.model, self.cache = engine.model, engine.cache
        self.prompt = prompt
        self.count = count
        self.end = len(prompt) + count - 1  # the last token generated is not computed
        self.drafts = drafts
        self.start_s = start_s
        self.generated: list[int] = []
        self.computed = 0
        self.drafts_offered = 0
        self.drafts_accepted = 0

    def serve(self, request: Request, *, copy_restored_bytes: bool) -> Steps:
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
        copied_s = self.engine.clock()
        copying_s = copied_s - copying_start_s
        if (busy := (yield from self._prefill(request))) is not None:
            return busy
        first_token_s = self.engine.clock()
        ttft_s = first_token_s - self.start_s - copying_s
        if self.engine.tells_prefill:
            self.cache.tell_prefill(loaded.tokens, len(self.prompt), seconds=first_token_s - copied_s)
        if (busy := (yield from self._decode(request))) is not None:
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

    def _prefill(self, request: Request) -> Generator[None, None, Busy | None]:
        """Computes the rest of the prompt, chunk by chunk, and the first token."""
        chunk_tokens = self.engine.chunk_tokens
        while self.computed < len(self.prompt):
            chunk_end = min((self.computed // chunk_tokens + 1) * chunk_tokens, len(self.prompt))
            state_stop = self._next_state_stop(request, chunk_end)
            stop = state_stop or chunk_end
            if not self.cache.extend(request, tokens=stop, timeout_s=ROOM_TIMEOUT_S):
                return Busy(self.computed, stop)
            view = self.engine.view(request)
            logits = self.model.advance(view, self.prompt[self.computed : stop], self.computed)
            self.cache.state_moved(request)
            before, self.computed = self.computed, stop
            if stop == len(self.prompt):
                self._take(request, [int(logits.argmax())])
            self._store(request, before, state_stop)
            yield
        return None

    def _decode(self, request: Request) -> Generator[None, None, Busy | None]:
        """Generates the rest. Stops short of, and then at, every boundary whose state is wanted."""
        step = self._step_plain if self.drafts is None else self._step_drafts
        step_tokens = 1 if self.drafts is None else self.model.config.ring_tokens
        while len(self.generated) < self.count:
            until = min(self.computed + step_tokens, self.end)
            state_stop = self._next_state_stop(request, until)
            before = self.computed
            if not step(request, (state_stop or until) - before):
                return Busy(self.computed, self.computed + 1)
            self._store(request, before, state_stop)
            yield
        return None

    def _next_state_stop(self, request: Request, until: int) -> int | None:
        return self.cache.next_state_stop(request, computed=self.computed, until=until, ends_at=self.end)

    def _step_plain(self, request: Request, room: int) -> bool:
        """One token. False: no room in L1."""
        if not self.cache.extend(request, tokens=self.computed + 1, timeout_s=ROOM_TIMEOUT_S):
            return False
        logits = self.model.advance(self.engine.view(request), self.generated[-1:], self.computed)
        self.cache.state_moved(request)
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
            self._fold(request)
            view = self.engine.view(request)
        pending = self.model.pending(view)
        choices = self.model.draft(view, tokens, self.computed).argmax(dim=1).tolist()
        accepted = next((i for i, guess in enumerate(guesses) if guess != choices[i]), len(guesses))
        self.model.keep(view, pending + 1 + accepted)
        self.computed += 1 + accepted
        self.drafts_offered += len(guesses)
        self.drafts_accepted += accepted
        self._take(request, [int(choice) for choice in choices[: accepted + 1]])
        return True

    def _store(self, request: Request, before: int, state_stop: int | None) -> None:
        """Publishes pages that a step filled, with the state where it is wanted; the ring is folded there."""
        page_tokens = self.engine.spec.page_tokens
        at_stop = self.computed == state_stop
        finished = len(self.generated) == self.count
        if at_stop or finished:
            self._fold(request)
        if self.computed // page_tokens > before // page_tokens:
            self.cache.store(
                request,
                computed=self.computed,
                state_at=self.computed if at_stop else None,
                state_pending=self.model.pending(self.engine.view(request)),
                donate=at_stop and finished and self.engine.donate,
            )

    def _fold(self, request: Request) -> None:
        view = self.engine.view(request)
        if self.model.pending(view):
            self.model.fold(view)
            self.cache.state_moved(request)

    def _take(self, request: Request, tokens: Sequence[int]) -> None:
        self.generated += tokens
        self.cache.append(request, tokens)
