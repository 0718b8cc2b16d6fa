"""The write policies by themselves: what they admit, what they remember, and how they are chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from random import Random

import pytest
from msgspec import structs

from hicache.errors import ConfigError
from hicache.policies.facts import EvictionFacts, SuffixFacts
from hicache.policies.touches import TouchCounts
from hicache.policies.write import (
    WRITE_POLICIES,
    ByteBudget,
    DepthCut,
    TinyLfu,
    WriteBack,
    WriteThrough,
    WriteThroughSelective,
    write_policy_of,
)

FACTS = SuffixFacts(now_s=0.0, first_page=0, page_tokens=16, page_bytes=1000, victim=lambda: None)


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def page_of(number: int) -> EvictionFacts:
    return EvictionFacts(
        key_of(number), now_s=0.0, used_s=0.0, used_at=0, born_at=0, uses=1, end_tokens=16, tokens=16, bytes=1000
    )


def keys_of(*numbers: int) -> list[bytes]:
    return list(map(key_of, numbers))


def test_write_through_admits_all_and_write_back_nothing() -> None:
    path = keys_of(*range(5))
    assert WriteThrough().admits(path, FACTS) == 5
    assert WriteBack().admits(path, FACTS) == 0
    assert not WriteThrough().touch(path, FACTS)
    assert not WriteBack().touch(path, FACTS)


@pytest.mark.parametrize("touches", [1, 2, 3])
def test_selective_admits_a_page_at_its_nth_touch(touches: int) -> None:
    policy = WriteThroughSelective(touches)
    for touch in range(1, touches + 2):
        assert policy.touch(keys_of(1, 2, 3), FACTS)
        assert policy.admits(keys_of(1, 2, 3), FACTS) == (3 if touch >= touches else 0)
    policy.touch(keys_of(1, 2, 9), FACTS)
    assert policy.admits(keys_of(1, 2, 9), FACTS) == (3 if touches == 1 else 2)
    assert policy.admits([], FACTS) == 0


def test_a_count_is_never_too_low_and_seldom_too_high() -> None:
    """Against exact counts of the last ``remembered`` touches, and of the last two times as many."""
    remembered = 4096
    counts, random = TouchCounts(remembered), Random(1)
    touched: list[int] = []
    too_high = asked = 0
    for _ in range(60):
        path = random.sample(range(40_000), random.randrange(1, 900))
        counts.touch(keys_of(*path))
        touched += path
        surely, at_most = Counter(touched[-remembered:]), Counter(touched[-2 * remembered :])
        for number in random.sample(range(40_000), 100):
            count = counts.count(key_of(number))
            assert count >= surely[number]
            too_high += count > at_most[number]
            asked += 1
    assert too_high <= 0.005 * asked


def test_a_key_that_was_touched_once_long_ago_is_forgotten() -> None:
    counts = TouchCounts(256)
    counts.touch(keys_of(0))
    counts.touch(keys_of(*range(1, 256)))
    assert counts.count(key_of(0)) == 1
    counts.touch(keys_of(*range(256, 768)))
    assert counts.count(key_of(0)) == 0


def test_keys_that_share_cells_do_not_take_each_others_counts_away() -> None:
    """Sixteen cells and many keys: every count is too high, and none is too low."""
    counts, random = TouchCounts(4), Random(2)
    for _ in range(50):
        path = random.sample(range(100), 4)
        before = [counts.count(key_of(number)) for number in path]
        counts.touch(keys_of(*path))
        assert all(counts.count(key_of(number)) >= 1 for number in path)
        assert all(count <= 2 * 255 for count in before)


def test_a_key_that_is_touched_very_often_does_not_overflow() -> None:
    counts = TouchCounts(1000)
    for _ in range(900):
        counts.touch(keys_of(7))
    assert counts.count(key_of(7)) == 255


def test_short_keys_are_counted_apart() -> None:
    policy = WriteThroughSelective()
    keys = [blake2b(bytes([n]), digest_size=16).digest() for n in range(50)]
    policy.touch(keys, FACTS)
    policy.touch(keys[:20], FACTS)
    assert policy.admits(keys, FACTS) == 20


def test_a_policy_is_chosen_by_name_or_given() -> None:
    assert list(WRITE_POLICIES)[:3] == ["write_through", "write_through_selective", "write_back"]
    assert isinstance(write_policy_of("write_through_selective"), WriteThroughSelective)
    mine = WriteBack(ahead_share=0.5)
    assert write_policy_of(mine) is mine


@pytest.mark.parametrize("choice", ["write_around", "", None, 7, WriteThrough])
def test_anything_else_is_refused_with_what_would_be_right(choice: object) -> None:
    with pytest.raises(ConfigError, match="write_through, write_through_selective, write_back"):
        write_policy_of(choice)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: WriteBack(ahead_share=0.0), "ahead_share"),
        (lambda: WriteBack(ahead_share=0.6), "ahead_share"),
        (lambda: WriteThroughSelective(0), "touches"),
        (lambda: WriteThroughSelective(101), "touches"),
        (lambda: WriteThroughSelective(1.5), "touches"),
        (lambda: WriteThroughSelective("2"), "touches"),
        (lambda: WriteThroughSelective(remembered_pages=1e6), "remembered_pages"),
        (lambda: WriteBack(ahead_share="0.1"), "ahead_share"),
        (lambda: WriteThroughSelective(remembered_pages=0), "remembered_pages"),
    ],
)
def test_settings_of_policies_are_checked(make: object, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        make()  # type: ignore[operator]


def test_a_duel_is_lost_by_the_end_of_a_path_that_is_used_less_than_what_would_go_for_it() -> None:
    policy = TinyLfu()
    policy.touch(keys_of(1, 2, 3), FACTS)
    policy.touch(keys_of(1, 2), FACTS)
    policy.touch(keys_of(8), FACTS)
    policy.touch(keys_of(8), FACTS)
    assert policy.admits(keys_of(1, 2, 3), FACTS) == 3, "there is room"
    assert policy.admits(keys_of(1, 2, 3), structs.replace(FACTS, victim=lambda: page_of(8))) == 2
    assert policy.admits(keys_of(1, 2, 3), structs.replace(FACTS, victim=lambda: page_of(9))) == 3


def test_a_budget_of_bytes_takes_the_first_pages_and_fills_up_with_time() -> None:
    policy = ByteBudget(bytes_per_s=500.0, burst_bytes=3000.0)
    path = keys_of(*range(5))
    assert policy.admits(path, FACTS) == policy.admits(path, FACTS) == 3, "asking costs nothing"
    policy.wrote(3000)
    assert policy.admits(path[3:], structs.replace(FACTS, first_page=3)) == 0
    assert policy.admits(path[3:], structs.replace(FACTS, first_page=3, now_s=2.0)) == 1
    policy.wrote(1500)
    assert policy.admits(path[4:], structs.replace(FACTS, first_page=4, now_s=2.0)) == 0, "states weigh, too"
    assert policy.admits(path, structs.replace(FACTS, now_s=1000.0)) == 3, "no more than the burst is saved up"


def test_a_depth_cut_admits_the_head_of_a_sequence_alone() -> None:
    policy = DepthCut(depth_tokens=64)
    assert policy.admits(keys_of(*range(6)), FACTS) == 4
    assert policy.admits(keys_of(*range(6)), structs.replace(FACTS, first_page=3)) == 1
    assert policy.admits(keys_of(*range(6)), structs.replace(FACTS, first_page=9)) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: ByteBudget(bytes_per_s=0.0),
        lambda: ByteBudget(burst_bytes=float("inf")),
        lambda: DepthCut(depth_tokens=0),
    ],
)
def test_a_setting_out_of_range_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()
