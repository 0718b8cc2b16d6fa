"""A budget of bytes becomes slots, all of it accounted for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hicache.errors import ConfigError
from hicache.sizing import l2_slot_counts
from tests.engine.specs import hybrid_spec, paged_spec


def test_state_groups_get_their_share() -> None:
    spec = hybrid_spec()
    full, latent, states = l2_slot_counts(spec, 3 * 1000 * 4096, 0.5)
    assert (full, latent, states) == (750, 750, 1500)


def test_a_share_is_not_taken_where_there_is_only_one_kind() -> None:
    assert l2_slot_counts(paged_spec(), 100 * 4096, 0.9) == (100,)


@pytest.mark.parametrize("state_share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_no_fraction_is_refused(state_share: float) -> None:
    with pytest.raises(ConfigError, match="state_share"):
        l2_slot_counts(hybrid_spec(), 1 << 30, state_share)


def test_too_little_is_refused_with_the_minimum() -> None:
    with pytest.raises(ConfigError, match=r"l2_bytes = 4096: expected at least 73728 bytes \(8 pages of 8192 bytes"):
        l2_slot_counts(hybrid_spec(), 4096, 0.2)


def test_sizing_needs_no_torch() -> None:
    code = "import sys, hicache.sizing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
