"""Every parser meets bytes that are nearly right, and others, some hundred at each run; `python -m tests.security.fuzz`
goes on for as long as it is told to."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.fuzz.mutation import mutated
from tests.security.fuzz.parsers import PARSERS, Target

EXAMPLES = 40
NAMES = [target.name for target in PARSERS]


@pytest.mark.parametrize("target", PARSERS, ids=NAMES)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(number=st.integers(0, 1 << 64), plain=st.binary(max_size=200))
def test_a_parser_refuses_in_its_own_way_whatever_it_is_given(target: Target, number: int, plain: bytes) -> None:
    random = Random(number)
    for _ in range(10):
        target.run(mutated(random, target.seeds))
    target.run(plain)


@pytest.mark.parametrize("target", PARSERS, ids=NAMES)
def test_the_seeds_of_a_target_reach_what_it_checks(target: Target) -> None:
    assert target.seeds
    for seed in target.seeds:
        target.run(seed)
