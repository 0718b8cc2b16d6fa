"""Snapshot policy: where a request stops so that its state can be kept, and which snapshots of a path go again."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, fields

from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """At which page boundaries the state of a sequence is kept, and how many snapshots of one path at most.

    - ``chunk_ends``: where the engine stops in a prompt anyway.
    - ``branch_points``: where the attention that is known of a prompt ends, though no snapshot makes it usable.
    - ``ends``: the last boundary that a repeat of the prompt can use, and the last ones of prompt and sequence.
    - ``prefill_interval_tokens``, ``state_interval_tokens``: so often in the prompt, and in what is decoded after it,
      rounded up to whole pages; None for never.
    - ``cap_per_path``: one more, and another one goes (see ``surplus``); None for no limit.
    """

    chunk_ends: bool = True
    branch_points: bool = True
    ends: bool = True
    prefill_interval_tokens: int | None = None
    state_interval_tokens: int | None = 256
    cap_per_path: int | None = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ConfigError(f"snapshot_policy.{field.name}", value, "True or False")
            elif value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"snapshot_policy.{field.name}", value, "a whole number of at least 1, or None")

    def next_stop(
        self,
        *,
        computed: int,
        until: int,
        prompt_tokens: int,
        page_tokens: int,
        branch_at: int | None = None,
        ends_at: int | None = None,
    ) -> int | None:
        """The first boundary in ``(computed, until]`` that the policy wants; None when there is none.

        ``until`` is where the engine stops anyway, ``branch_at`` where the attention that is known ends, ``ends_at``
        where the sequence does, if that is known.
        """
        wanted = self._wanted(computed, until, prompt_tokens, page_tokens, branch_at, ends_at)
        boundaries = (tokens // page_tokens * page_tokens for tokens in wanted)
        return min((boundary for boundary in boundaries if computed < boundary <= until), default=None)

    def _wanted(
        self,
        computed: int,
        until: int,
        prompt_tokens: int,
        page_tokens: int,
        branch_at: int | None,
        ends_at: int | None,
    ) -> Iterator[int]:
        if self.chunk_ends and until <= prompt_tokens and until % page_tokens == 0:
            yield until
        if self.branch_points and branch_at is not None:
            yield branch_at
        if self.ends:
            yield from (prompt_tokens - 1, prompt_tokens)
            if ends_at is not None:
                yield ends_at
        if self.prefill_interval_tokens is not None:
            stop = _next_multiple(self.prefill_interval_tokens, page_tokens, after=computed)
            if stop <= prompt_tokens:
                yield stop
        if self.state_interval_tokens is not None:
            yield _next_multiple(self.state_interval_tokens, page_tokens, after=max(computed, prompt_tokens))


def _next_multiple(interval_tokens: int, page_tokens: int, *, after: int) -> int:
    step = -(-interval_tokens // page_tokens) * page_tokens
    return (after // step + 1) * step


def surplus(pages: Sequence[int], *, cap: int, in_use: Container[int] = (), branches: Container[int] = ()) -> list[int]:
    """Which snapshots of one path go so that ``cap`` are left. ``pages``: how long the prefix of each is, ascending.

    The one goes whose two neighbours are nearest to each other as seen from the end of the path: by the ratio of their
    distances. What is kept thins out with the distance, so that going back d pages costs some share of d at every
    scale, with O(log n) snapshots of n. The start of the path is the neighbour of the first one: the empty state.

    ``branches`` go only when nothing else is left; the last one and those ``in_use`` never, so more than ``cap`` can
    stay.

        distances from the end   16      8   7   4   2 1     neighbours of 7: 8 and 4; of 8: 16 and 7
        one more page            17      9   8   5   3 2 1   5 : 9 is nearer to 1 than 8 : 17, so 8 goes
    """
    left = list(pages)
    gone: list[int] = []
    while len(left) > cap:
        candidates = [place for place, page in enumerate(left[:-1]) if page not in in_use]
        if not candidates:
            break
        victim = min(candidates, key=lambda place: (left[place] in branches, -_nearness(left, place)))
        gone.append(left.pop(victim))
    return gone


def _nearness(pages: Sequence[int], place: int) -> float:
    """The neighbours' distances from just behind the end: the nearer one's, as a part of the farther one's."""
    end = pages[-1] + 1
    before = pages[place - 1] if place else 0
    return (end - pages[place + 1]) / (end - before)
