"""A forecast: how likely, and how soon, what a request used will be used again, learned from what came before.

A life is what one request used: it begins with it, and ends when another request uses at least half of what is left of
it. Lives are told apart by who and what asked, how many turns came before, how many tokens were new, and how long the
prompt is; for each cell the chance to end is estimated by age, as in a life table: ends over lives at risk. A cell
that has seen little is drawn to the one above it, which knows one trait less::

    all ── tenant and kind ── turns before ── new tokens ── length

A life is worth its uses for the time that it takes room: over all times that one could wait from its age on, the best
of P(used by then) / E(room taken until then). That is the rule of Gittins (1979); where the chance rises with age, as
while a user reads the answer, it keeps what least recently used would drop.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

AGES_S = (0, 15, 30, 60, 120, 240, 480, 960, 1920)
_STARTS_S = np.array(AGES_S, float)
_BORDERS_S = np.append(_STARTS_S, 7500.0)
_WIDTHS_S = np.diff(_BORDERS_S)
_PRIOR_LIVES = 10.0  # so many lives weighs the cell above
_PRIOR_MEDIAN_S = 60.0  # before anything was seen: half of all lives end, half of those within this time
_REMEMBERED = 8192  # lives; a power of two
_SHARED_USES = 8
_SHARED_S = 60.0  # so much longer a shared prefix counts as watched: two uses at once are no rate
_FIT_EVERY = 32
_VALUES = 64  # of each trait


class Life:
    """What one request used, from then on until another one uses it."""

    __slots__ = (
        "codes",
        "ended",
        "number",
        "pages",
        "requests",
        "row",
        "row_of",
        "started_s",
        "tokens",
        "turn",
        "uses_s",
    )

    def __init__(self, number: int, started_s: float, codes: tuple[int, ...], tokens: int, turn: int) -> None:
        self.number = number
        self.started_s = started_s
        self.codes = codes
        self.tokens = tokens  # of the prompt
        self.turn = turn
        self.pages = 0  # that nobody has used since
        self.ended = False
        self.requests: deque[object] = deque()  # kept alive while they are known by their identity
        self.uses_s: deque[float] | None = None  # the last of a shared prefix
        self.row: Sequence[float] = ()
        self.row_of = -1  # the fit that ``row`` is from

    @classmethod
    def shared(cls, life: Life, tokens: int, pages: int) -> Life:
        """A prefix of ``tokens``, with ``pages`` of that life, which has been used as often as that."""
        prefix = cls(-1, life.started_s, (), tokens, life.turn)
        prefix.pages = pages
        prefix.uses_s = deque((life.started_s,) if life.uses_s is None else life.uses_s, maxlen=_SHARED_USES)
        return prefix


class Forecast:
    """Deterministic; remembers the last 8,192 lives, and is fitted to them after each 32, more often at the start."""

    def __init__(self) -> None:
        self._started_s = np.zeros(_REMEMBERED)
        self._ended_s = np.full(_REMEMBERED, np.inf)  # its age then
        self._codes = np.zeros((_REMEMBERED, 4), np.int64)
        self._count = 0
        self._fits = 0
        self._next_fit = 8
        self._groups: dict[tuple[str, str | None], int] = {}
        self._table: dict[int, Sequence[float]] = {}
        self._root: Sequence[float] = ()
        self._fit(0.0)

    def begin(self, now_s: float, *, tenant: str, kind: str | None, tokens: int, new_tokens: int, turn: int) -> Life:
        """A request has used ``tokens``, of which ``new_tokens`` had never been asked for as far as is known."""
        group = self._groups.setdefault((tenant, kind), len(self._groups)) if len(self._groups) < _VALUES else 0
        traits = (group, min(turn, 6), int(2 * math.log2(new_tokens + 1)), int(math.log2(tokens + 1)))
        codes, code = [], 1
        for trait in traits:
            code = code * _VALUES + min(trait, _VALUES - 1)
            codes.append(code)
        life = Life(self._count, now_s, tuple(codes), tokens, turn)
        slot = self._count % _REMEMBERED
        self._started_s[slot], self._ended_s[slot], self._codes[slot] = now_s, np.inf, codes
        self._count += 1
        if self._count >= self._next_fit:
            self._fit(now_s)
            self._next_fit = self._count + max(8, min(_FIT_EVERY, self._count // 16))
        return life

    def end(self, life: Life, now_s: float) -> None:
        """Another request uses what this one has left."""
        if not life.ended and self._count - life.number <= _REMEMBERED:
            self._ended_s[life.number % _REMEMBERED] = now_s - life.started_s
        life.ended = True

    def rate(self, life: Life, now_s: float) -> float:
        """Uses to come per second of room, at best. What is left of a life that has ended counts like one that has not,
        as a second branch may follow."""
        if life.uses_s is not None:
            return len(life.uses_s) / (now_s - life.uses_s[0] + _SHARED_S)
        row, age_s = self._row(life), max(0.0, now_s - life.started_s)
        age = bisect_right(AGES_S, age_s) - 1
        if age == len(AGES_S) - 1:
            return row[age]
        passed = (age_s - AGES_S[age]) / (AGES_S[age + 1] - AGES_S[age])
        return row[age] * (1 - passed) + row[age + 1] * passed

    def gain(self, life: Life, saved: float, room_cost: float) -> float:
        """What keeping a life that begins is worth at best: ``saved`` if it is used, less ``room_cost`` a second."""
        if life.uses_s is not None:
            return math.inf
        row, ages = self._row(life), len(AGES_S)
        return max(saved * row[ages + age] - room_cost * row[2 * ages + age] for age in range(ages))

    def _row(self, life: Life) -> Sequence[float]:
        if life.row_of != self._fits:
            known = (self._table[code] for code in reversed(life.codes) if code in self._table)
            life.row, life.row_of = next(known, self._root), self._fits
        return life.row

    def _fit(self, now_s: float) -> None:
        lives = min(self._count, _REMEMBERED)
        ended_s = self._ended_s[:lives]
        ended = np.isfinite(ended_s)
        age_s = np.where(ended, ended_s, now_s - self._started_s[:lives])
        at_risk = np.clip((age_s[:, None] - _STARTS_S) / _WIDTHS_S, 0, 1)  # [lives, ages], the share of each age
        ends = np.zeros_like(at_risk)
        who = np.nonzero(ended)[0]
        ends[who, np.searchsorted(_STARTS_S, age_s[who], side="right") - 1] = 1
        at_risk[ends > 0] = 1
        alive = 1 - 0.5 * _BORDERS_S / (_PRIOR_MEDIAN_S + _BORDERS_S)
        prior = 1 - alive[1:] / alive[:-1]
        chance = (ends.sum(0) + prior) / (at_risk.sum(0) + 1)
        self._root = worths_of(chance[None])[0].tolist()
        self._table = {}
        above = np.tile(chance, (lives, 1))
        for level in range(4 if lives else 0):
            codes, first, cell = np.unique(self._codes[:lives, level], return_index=True, return_inverse=True)
            ends_of, risk_of = _sums(ends, cell, len(codes)), _sums(at_risk, cell, len(codes))
            chances = (ends_of + _PRIOR_LIVES * above[first]) / (risk_of + _PRIOR_LIVES)
            self._table.update(zip(codes.tolist(), worths_of(chances).tolist(), strict=True))
            above = chances[cell]
        self._fits += 1


def _sums(rows: Array, cell: Array, cells: int) -> Array:
    """``rows``: [lives, ages]. Returns [cells, ages]: of the lives of each cell."""
    place = (cell[:, None] * rows.shape[1] + np.arange(rows.shape[1])).ravel()
    return np.bincount(place, rows.ravel(), cells * rows.shape[1]).reshape(cells, -1)


def worths_of(chances: Array) -> Array:
    """``chances``: [cells, ages], to end within that age when it is reached. Returns [cells, 3 * ages]: the best rate
    from each age on; the chance to have ended by the end of each age; and the seconds of room taken until then."""
    cells, ages = chances.shape
    worths = np.zeros((cells, 3, ages))
    for start in reversed(range(ages)):
        alive, used, room_s = np.ones(cells), np.zeros(cells), np.zeros(cells)
        for age in range(start, ages):
            ends = alive * chances[:, age]
            used, room_s = used + ends, room_s + _WIDTHS_S[age] * (alive - ends / 2)
            alive = alive - ends
            worths[:, 0, start] = np.maximum(worths[:, 0, start], used / room_s)
            worths[:, 1, age], worths[:, 2, age] = used, room_s
    return worths.reshape(cells, 3 * ages)
