"""How much of the distance between a policy and Belady's rule is knowledge: the same policy with other forecasts.

A request's pages are a life, which ends when another request goes on from it. Which lives end, and when, is known
afterwards, whatever was cached. So the policy that decides here can be fed with

- what it learns by itself,
- the chances that a model gives, fitted to the lives of the first half of the trace,
- the truth.

All are scored on the second half alone. The model is a logistic hazard: the chance to end within each age, by bins of
all that is known of a request and of the one before it, and by pairs of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bench.admission.bounds import belady
from bench.admission.replay import TierSpec, replay
from bench.admission.traces import Trace
from hicache.policies.own import Continuation
from hicache.policies.own_forecast import AGES_S, Forecast, Life, worths_of

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

WARM_SHARE = 0.5
TRAITS = ("turn", "new_tokens", "tokens", "gap_s", "group")
FOUR_TRAITS = ("turn", "new_tokens", "tokens")  # and the age: idle time
_BINS = 24
_RIDGE = 2.0  # of each weight: so many observations, about, that say nothing
_STARTS_S = np.array(AGES_S, float)


@dataclass(frozen=True, slots=True)
class Lives:
    """All lives of a trace, in order."""

    started_s: Array
    age_s: Array  # at its end; infinite for one that nobody goes on from
    bins: Array  # [lives, TRAITS]


class _Recorder(Forecast):
    """Keeps what it is told of each life. ``gap_s`` of a turn is the age at which the life before it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: list[Life] = []
        self.ages_s: list[float] = []
        self.bins: list[tuple[int, ...]] = []
        self._gap: tuple[float, float] = (-1.0, 0.0)  # of the life that ended last: when, at what age

    def begin(self, now_s: float, *, tenant: str, kind: str | None, tokens: int, new_tokens: int, turn: int) -> Life:
        life = super().begin(now_s, tenant=tenant, kind=kind, tokens=tokens, new_tokens=new_tokens, turn=turn)
        gap_s = self._gap[1] if turn and self._gap[0] == now_s else 0.0
        self.lives.append(life)
        self.ages_s.append(math.inf)
        bins = (min(turn, 12), _log_bin(new_tokens), _log_bin(tokens), _log_bin(gap_s * 4), life.codes[0] % _BINS)
        self.bins.append(bins)
        return life

    def end(self, life: Life, now_s: float) -> None:
        if not life.ended:
            self.ages_s[life.number] = now_s - life.started_s
            self._gap = (now_s, now_s - life.started_s)
        super().end(life, now_s)


def _log_bin(value: float) -> int:
    return min(_BINS - 1, int(1.5 * math.log2(value + 1)))


def record(trace: Trace) -> Lives:
    """The lives of a trace: they depend on what is asked, not on what is kept."""
    recorder = _Recorder()
    _replay(trace, 1, recorder)
    return Lives(
        np.array([life.started_s for life in recorder.lives]), np.array(recorder.ages_s), np.array(recorder.bins)
    )


class _Known(Forecast):
    """Each life as ``rows`` says, as ``worths_of`` makes them: [lives, 3 * ages]."""

    def __init__(self, rows: Array) -> None:
        super().__init__()
        self._rows = np.concatenate([rows, np.zeros_like(rows[:1])])  # and of what the policy takes for a life later

    def _row(self, life: Life) -> Sequence[float]:
        if life.row_of != 0:
            life.row, life.row_of = self._rows[min(life.number, len(self._rows) - 1)].tolist(), 0
        return life.row

    def _fit(self, now_s: float) -> None:
        pass


class _Truth(Forecast):
    """Each life as it will be."""

    def __init__(self, lives: Lives) -> None:
        super().__init__()
        self._ages_s = np.append(lives.age_s, math.inf)  # and of what the policy takes for a life later

    def rate(self, life: Life, now_s: float) -> float:
        if life.uses_s is not None:
            return super().rate(life, now_s)
        left_s = self._age_s(life) - (now_s - life.started_s)
        return 0.0 if not 0 <= left_s < math.inf else float(1 / (left_s + 1e-3))

    def _age_s(self, life: Life) -> float:
        return float(self._ages_s[min(life.number, len(self._ages_s) - 1)])

    def gain(self, life: Life, saved: float, room_cost: float) -> float:
        if life.uses_s is not None:
            return math.inf
        age_s = self._age_s(life)
        return float(saved - room_cost * age_s) if math.isfinite(age_s) else 0.0

    def _fit(self, now_s: float) -> None:
        pass


def limits(trace: Trace, pages: int) -> dict[str, float]:
    """Shares of GPU time saved on the second half, by what is known; and the AUC of whether a life is gone on from."""
    lives = record(trace)
    middle_s = trace.requests[int(len(trace.requests) * WARM_SHARE)].at_s
    first = lives.started_s < middle_s
    found = {"Belady's rule": belady(trace, pages, warm_share=WARM_SHARE).saved_share}
    found["continuation, told the truth of each life"] = _replay(trace, pages, _Truth(lives))
    for name, traits in (("all traits", TRAITS), ("turn, new tokens, length, idle time", FOUR_TRAITS)):
        chances = hazards(lives, [TRAITS.index(trait) for trait in traits], first, middle_s)
        found[f"continuation, told chances by {name}"] = _replay(trace, pages, _Known(worths_of(chances)))
        ever = 1 - np.prod(1 - chances[~first], axis=1)
        found[f"AUC by {name}"] = auc(ever, np.isfinite(lives.age_s[~first]))
    found["continuation"] = _replay(trace, pages, Forecast())
    for eviction, write in (("lru", "write_through_selective"), ("marconi", "write_through"), ("lru", "write_through")):
        result = replay(trace, [TierSpec("cache", pages, eviction, write)], warm_share=WARM_SHARE)
        found[f"{eviction}+{write}"] = result.gpu_s_saved / result.gpu_s_total
    return found


def _replay(trace: Trace, pages: int, forecast: Forecast) -> float:
    policy = Continuation(forecast=forecast)
    tier = TierSpec("cache", pages, policy.eviction, lambda: policy)
    result = replay(trace, [tier], warm_share=WARM_SHARE)
    return result.gpu_s_saved / result.gpu_s_total


def hazards(lives: Lives, traits: Sequence[int], first: Array, middle_s: float) -> Array:
    """[lives, ages]: the chance of each life to end within each age that it reaches, fitted to those of the first half,
    of which nothing is known that happens after it."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]  # no stubs among the dependencies
    from scipy.sparse import coo_array, csr_array  # type: ignore[import-untyped]

    ages = len(AGES_S)
    columns = _columns(lives.bins[:, list(traits)])  # [lives, features] numbers, dense
    count = int(columns.max()) + 1
    known_s = np.minimum(lives.age_s, middle_s - lives.started_s)
    ended = lives.age_s <= known_s
    rows, seen_ages = np.nonzero(first[:, None] & (known_s[:, None] >= _STARTS_S))
    ends = ended[rows] & (np.searchsorted(_STARTS_S, known_s[rows], side="right") - 1 == seen_ages)

    def matrix(of: Array, age: Array) -> csr_array:
        alone = columns[of, : len(traits)]  # each trait alone counts by age, too
        parts = np.concatenate([columns[of], alone * ages + age[:, None] + count], axis=1)
        parts = np.concatenate([parts, (count * (1 + ages) + age)[:, None]], axis=1)
        place = np.repeat(np.arange(len(of)), parts.shape[1])
        shape = (len(of), count * (1 + ages) + ages)
        return coo_array((np.ones(parts.size), (place, parts.ravel())), shape=shape).tocsr()

    seen = matrix(rows, seen_ages)

    def loss(weights: Array) -> tuple[float, Array]:
        scores = seen @ weights
        gradient = seen.T @ (1 / (1 + np.exp(-scores)) - ends) + _RIDGE * weights
        return float(np.logaddexp(0, scores).sum() - scores[ends].sum() + _RIDGE / 2 * weights @ weights), gradient

    solved = minimize(loss, np.zeros(seen.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 200})
    every = np.arange(len(columns))
    chances = [1 / (1 + np.exp(-(matrix(every, np.full(len(every), age)) @ solved.x))) for age in range(ages)]
    return np.stack(chances, axis=1)


def _columns(bins: Array) -> Array:
    """Each trait, and each pair of them, as numbers of features from 0 on."""
    traits = bins.shape[1]
    parts = [bins[:, trait] for trait in range(traits)]
    parts += [bins[:, one] * _BINS + bins[:, two] for one in range(traits) for two in range(one)]
    columns, start = [], 0
    for part in parts:
        _, column = np.unique(part, return_inverse=True)
        columns.append(column + start)
        start += int(column.max()) + 1
    return np.stack(columns, axis=1)


def auc(scores: Array, is_true: Array) -> float:
    """The chance that one that is true scores higher than one that is not; ties count half."""
    from scipy.stats import rankdata  # type: ignore[import-untyped]  # as above

    true, false = int(is_true.sum()), int((~is_true).sum())
    if not true or not false:
        return 0.5
    return float((rankdata(scores)[is_true].sum() - true * (true + 1) / 2) / (true * false))
