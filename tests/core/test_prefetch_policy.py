"""How long a request waits for L3, in the three modes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy, check_mode

MODES: tuple[PrefetchMode, ...] = ("best_effort", "wait_complete", "timeout")


def test_br_034_a_timeout_knows_no_more_than_the_clock() -> None:
    policy = PrefetchPolicy(base_s=0.1, per_ki_token_s=0.0)
    assert policy.patience_s("timeout", tokens=10**9) == 0.1


def test_best_effort_waits_for_nothing_unless_a_grace_is_set() -> None:
    assert PrefetchPolicy().patience_s("best_effort", tokens=10**6) == 0.0
    assert PrefetchPolicy(grace_s=0.02).patience_s("best_effort", tokens=10**6) == 0.02


def test_br_033_wait_complete_waits_as_long_as_the_hard_cap_allows_however_few_the_tokens() -> None:
    assert PrefetchPolicy(hard_cap_s=7.0).patience_s("wait_complete", tokens=0) == 7.0


@given(
    mode=st.sampled_from(MODES),
    tokens=st.integers(0, 10**9),
    base_s=st.floats(0, 1e6),
    per_ki_token_s=st.floats(0, 1e6),
    hard_cap_s=st.floats(0, 1e6),
    grace_s=st.floats(0, 1e6),
)
def test_no_mode_waits_longer_than_the_hard_cap(mode: PrefetchMode, tokens: int, **settings: float) -> None:
    policy = PrefetchPolicy(mode=mode, **settings)
    assert 0 <= policy.patience_s(mode, tokens=tokens) <= policy.hard_cap_s


@pytest.mark.parametrize("setting", ["base_s", "per_ki_token_s", "hard_cap_s", "grace_s", "threshold_tokens"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_a_wait_that_is_no_length_of_time_is_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"prefetch\.{setting} = {value}: expected a finite number of at least 0"):
        PrefetchPolicy(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["", "wait", "WAIT_COMPLETE"])
def test_an_unknown_mode_is_refused_with_those_that_exist(mode: str) -> None:
    with pytest.raises(ConfigError, match="best_effort, wait_complete, timeout"):
        PrefetchPolicy(mode=mode)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"prefetch\.mode"):
        check_mode(mode)
