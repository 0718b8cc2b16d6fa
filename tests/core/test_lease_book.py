"""Which leases are of use no more."""

from __future__ import annotations

import pytest

from hicache import lease_book
from hicache.lease_book import LeaseBook


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_lease_is_over_with_the_last_of_its_keys(clock: Clock) -> None:
    book = LeaseBook(clock=clock)
    book.note(1, [b"a", b"b"], lease_s=5.0)
    book.note(2, [b"b", b"c"], lease_s=5.0)
    assert book.settle([b"b", b"x"]) == []
    assert book.settle([b"a"]) == [1]
    assert book.settle([b"a", b"c"]) == [2]
    assert len(book) == 0


def test_only_leases_on_what_is_needed_that_end_soon_are_renewed_and_once(clock: Clock) -> None:
    book = LeaseBook(clock=clock)
    book.note(1, [b"a"], lease_s=5.0)
    book.note(2, [b"b"], lease_s=5.0)
    assert book.renew([b"a"], ending_within_s=2.5, lease_s=5.0) == []
    clock.now_s = 3.0
    assert book.renew([b"a"], ending_within_s=2.5, lease_s=5.0) == [1]
    assert book.renew([b"a"], ending_within_s=2.5, lease_s=5.0) == []
    clock.now_s = 5.0
    assert book.renew([b"b"], ending_within_s=2.5, lease_s=5.0) == [], "it has ended"


def test_leases_that_have_ended_are_forgotten_and_there_is_a_bound(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_book, "LEASES_MAX", 2)
    book = LeaseBook(clock=clock)
    for number in range(3):
        book.note(number, [b"a"], lease_s=5.0)
    assert len(book) == 2
    clock.now_s = 5.0
    book.note(9, [b"a"], lease_s=5.0)
    assert book.settle([b"a"]) == [9]
