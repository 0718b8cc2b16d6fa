"""A budget of bytes becomes slots, all of it accounted for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.sizing import PAGED_SLOTS_MIN, STATE_SLOTS_MIN, l2_size_bytes, l2_slot_counts, l2_strides, slot_stride
from hicache.spec import CacheSpec, PagedGroup, StateField, StateGroup
from tests.engine.specs import hybrid_spec, paged_spec

GROUPS = {
    "pages": PagedGroup("pages", (0, 1), heads=2, head_dim=64, dtype="bfloat16"),
    "tiny": PagedGroup("tiny", (2,), heads=1, head_dim=1, dtype="int8"),
    "state": StateGroup("state", (3,), (StateField("temporal", (64, 130), "float32"),)),
    "small state": StateGroup("small state", (4,), (StateField("conv", (3,), "int8"),)),
}


@given(
    names=st.lists(st.sampled_from(sorted(GROUPS)), min_size=1, unique=True),
    l2_bytes=st.integers(1, 1 << 33),
    state_share=st.floats(0, 1),
    page_tokens=st.sampled_from([1, 4, 16, 33, 64, 528, 3584]),
)
def test_br_090_slots_never_take_more_than_was_given_and_leave_less_than_one_of_each(
    names: list[str], l2_bytes: int, state_share: float, page_tokens: int
) -> None:
    spec = CacheSpec("m", "1", tuple(GROUPS[name] for name in names), page_tokens=page_tokens)
    states = [isinstance(group, StateGroup) for group in spec.groups]
    try:
        counts = l2_slot_counts(spec, l2_bytes, state_share)
    except ConfigError as error:
        (minimum,) = re.findall(r"at least (\d+) bytes", str(error))
        assert l2_bytes < int(minimum)
        l2_slot_counts(spec, int(minimum), state_share)  # what it tells is enough
        return
    strides = [slot_stride(size) for size in spec.object_bytes]
    one_of_each = sum(stride for stride, is_state in zip(strides, states, strict=True) if not is_state or all(states))
    assert l2_bytes - one_of_each < l2_size_bytes(spec.rank(), counts) <= l2_bytes
    for kind, minimum_slots in ((False, PAGED_SLOTS_MIN), (True, STATE_SLOTS_MIN)):
        of_kind = {count for count, is_state in zip(counts, states, strict=True) if is_state is kind}
        assert len(of_kind) <= 1
        assert all(count >= minimum_slots for count in of_kind)


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


REPLICA = CacheSpec(
    "m",
    "1",
    (GROUPS["pages"], GROUPS["tiny"], GROUPS["state"], GROUPS["small state"]),
    tp_size=2,
    tp_lcm=2,
    pp_layers=(2, 2, 1),  # pages of one group | of the other, and a state | the other state alone
)


@given(l2_bytes=st.integers(1, 1 << 33), state_share=st.floats(0, 1))
def test_br_090_every_rank_of_a_replica_has_equally_many_slots_and_takes_no_more_than_was_given(
    l2_bytes: int, state_share: float
) -> None:
    try:
        counts = l2_slot_counts(REPLICA, l2_bytes, state_share)
    except ConfigError as error:
        (minimum,) = re.findall(r"at least (\d+) bytes", str(error))
        assert l2_bytes < int(minimum)
        l2_slot_counts(REPLICA, int(minimum), state_share)
        return
    assert counts[0] == counts[1] >= PAGED_SLOTS_MIN
    assert counts[2] == counts[3] >= STATE_SLOTS_MIN
    sizes = [l2_size_bytes(REPLICA.rank(rank), counts) for rank in range(6)]
    assert max(sizes) <= l2_bytes
    strides = [l2_strides(REPLICA.rank(rank)) for rank in range(6)]
    more_pages = [size + sum(stride[:2]) for size, stride in zip(sizes, strides, strict=True)]
    assert max(more_pages) > l2_bytes, "one page more would not fit on some rank"


def test_too_little_is_refused_with_the_minimum() -> None:
    with pytest.raises(ConfigError, match=r"l2_bytes = 4096: expected at least 73728 bytes \(8 pages of 8192 bytes"):
        l2_slot_counts(hybrid_spec(), 4096, 0.2)


def test_sizing_needs_no_torch() -> None:
    code = "import sys, hicache.sizing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
