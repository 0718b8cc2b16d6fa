"""The write policies by themselves: what they admit, what they remember, and how they are chosen."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from random import Random

import pytest

from hicache.errors import ConfigError
from hicache.policies.write import (
    WRITE_POLICIES,
    TouchCounts,
    WriteBack,
    WriteThrough,
    WriteThroughSelective,
    write_policy_of,
)


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def keys_of(*numbers: int) -> list[bytes]:
    return list(map(key_of, numbers))


def test_write_through_admits_all_and_write_back_nothing() -> None:
    path = keys_of(*range(5))
    assert WriteThrough().admits(path) == 5
    assert WriteBack().admits(path) == 0
    assert not WriteThrough().touch(path)
    assert not WriteBack().touch(path)


@pytest.mark.parametrize("touches", [1, 2, 3])
def test_selective_admits_a_page_at_its_nth_touch(touches: int) -> None:
    policy = WriteThroughSelective(touches)
    for touch in range(1, touches + 2):
        assert policy.touch(keys_of(1, 2, 3))
        assert policy.admits(keys_of(1, 2, 3)) == (3 if touch >= touches else 0)
    policy.touch(keys_of(1, 2, 9))
    assert policy.admits(keys_of(1, 2, 9)) == (3 if touches == 1 else 2)
    assert policy.admits([]) == 0


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
    policy.touch(keys)
    policy.touch(keys[:20])
    assert policy.admits(keys) == 20


def test_a_policy_is_chosen_by_name_or_given() -> None:
    assert list(WRITE_POLICIES) == ["write_through", "write_through_selective", "write_back"]
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
