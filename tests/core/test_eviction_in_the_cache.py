"""Every eviction policy in the directory: nothing breaks, and it decides what a policy of its name should."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.index import Index
from hicache.node import Tier
from hicache.policies.choice import policies_of
from hicache.policies.eviction_choice import EVICTION_POLICIES, eviction_policy_of
from hicache.policies.facts import RequestFacts
from hicache.spec import CacheSpec
from tests.core.live import PAGE
from tests.core.world import FULL

SPEC = CacheSpec("m", "r", (FULL,), page_tokens=PAGE)


def index_of(eviction: str, *, pages: int) -> Index:
    return Index(SPEC, ((pages,), (0,)), eviction=eviction_policy_of(eviction))


def request(index: Index, *pages: bytes, at_s: float) -> int:
    """A request for these pages, which publishes what it does not find. Returns how many it found."""
    keys = [b"/".join(pages[: end + 1]) for end in range(len(pages))]
    found = index.match(keys)
    index.now_s = at_s
    keep = index.keep(keys, found)
    index.note_use(keep, facts := RequestFacts(at_s, len(keys) * PAGE, (len(keys) - found) * PAGE))
    index.expire()
    for page in range(found, len(keys)):
        slots = index.acquire(Tier.L1, 0, 1)
        if slots is None:
            break
        node = index.obtain(keys, page)
        index.publish(node, Tier.L1, 0, slots[0], request=facts)
        index.hold(keep, node)
    index.touch_path(keep.path)
    index.let_go(keep)
    return found


def orphans(index: Index) -> list[bytes]:
    return [node.key for node in index.nodes.values() if node.parent is not None and not node.parent.resident]


@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
def test_no_page_is_kept_without_those_before_it(eviction: str) -> None:
    index = index_of(eviction, pages=12)
    for number in range(200):
        name = b"%d" % (number * 7919 % 13)
        request(index, b"system", *[name + b"%d" % page for page in range(1 + number % 5)], at_s=float(number))
        assert orphans(index) == []
        assert sum(node.resident for node in index.nodes.values()) == 12 - index.pools[Tier.L1][0].free_count
    assert index.evicted[Tier.L1][0] > 50
    assert request(index, b"system", at_s=200.0) == 1, "what every request uses is here"


def test_what_is_used_often_outlives_what_was_used_last_under_lfu_and_not_under_lru() -> None:
    for eviction, found in (("lfu", 1), ("lru", 0)):
        index = index_of(eviction, pages=3)
        for second in range(3):
            request(index, b"often", at_s=second)
        for second, name in enumerate((b"a", b"b", b"c"), start=3):
            request(index, name, at_s=second)
        assert request(index, b"often", at_s=6.0) == found


def test_what_came_first_goes_first_under_fifo_however_it_is_used() -> None:
    index = index_of("fifo", pages=2)
    request(index, b"first", at_s=0.0)
    request(index, b"second", at_s=1.0)
    request(index, b"first", at_s=2.0)
    request(index, b"third", at_s=3.0)
    assert request(index, b"second", at_s=4.0) == 1
    assert request(index, b"first", at_s=5.0) == 0


def test_what_is_idle_for_too_long_goes_though_there_is_room() -> None:
    index = index_of("ttl", pages=10)
    request(index, b"idle", b"deeper", at_s=0.0)
    request(index, b"used", at_s=1.0)
    request(index, b"used", at_s=500.0)
    assert request(index, b"idle", b"deeper", at_s=600.0) == 2
    assert request(index, b"other", at_s=1150.0) == 0
    assert index.resident(b"used") == 0
    assert index.resident(b"idle/deeper") == 1
    assert index.pools[Tier.L1][0].free_count == 7


def test_a_page_is_not_idle_while_a_request_has_it() -> None:
    index = index_of("ttl", pages=10)
    request(index, b"long", at_s=0.0)
    keep = index.keep([b"long"], 1)
    index.now_s = 900.0
    index.touch_path(keep.path)
    index.let_go(keep)
    assert request(index, b"other", at_s=1400.0) == 0
    assert index.resident(b"long") == 1
    request(index, b"other", at_s=1501.0)
    assert index.resident(b"long") == 0


def test_the_way_to_a_page_that_is_not_idle_stays_and_so_does_that() -> None:
    index = index_of("ttl", pages=10)
    request(index, b"way", at_s=0.0)
    index.now_s = 400.0  # a copy of the next page lands, of a request long gone
    slots = index.acquire(Tier.L1, 0, 1)
    assert slots is not None
    index.publish(index.obtain([b"way", b"way/late"], 1), Tier.L1, 0, slots[0])
    request(index, b"other", at_s=700.0)
    assert index.resident(b"way") == index.resident(b"way/late") == 1
    request(index, b"other", at_s=1001.0)
    assert index.resident(b"way") == index.resident(b"way/late") == 0


def test_a_page_becomes_the_end_of_a_prompt_when_a_shorter_one_uses_it() -> None:
    index = Index(SPEC, ((5,), (0,)), eviction=tail_trim)
    request(index, b"a", b"b", b"c", at_s=0.0)
    request(index, b"x", b"y", at_s=1.0)
    request(index, b"a", b"b", at_s=2.0)  # b is the end of what was asked for last
    for at_s, name in enumerate((b"new", b"newer"), 3):
        request(index, name, at_s=float(at_s))
    assert index.resident(b"x/y") == index.resident(b"a/b/c") == 0, (
        "ends go, the one that was used least recently first"
    )
    request(index, b"newest", at_s=5.0)
    assert index.resident(b"a/b") == 0
    assert index.resident(b"x") == index.resident(b"a") == 1


def test_the_ends_of_prompts_go_first_under_tail_trim() -> None:
    index = Index(SPEC, ((4,), (0,)), eviction=tail_trim)
    request(index, b"old", b"end", at_s=0.0)
    request(index, b"young", b"end", at_s=1.0)
    request(index, b"new", at_s=2.0)
    assert index.resident(b"old") == 1
    assert index.resident(b"old/end") == 0
    request(index, b"newer", at_s=3.0)
    assert index.resident(b"old") == 1
    assert index.resident(b"young/end") == 0


def tail_trim(items: object) -> object:
    from hicache.policies.eviction_kinds import TailTrim

    return TailTrim(items, budget_tokens=PAGE, turn_tokens=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", ["least_recently", 3, None])
def test_an_unknown_policy_is_refused_with_those_there_are(choice: object) -> None:
    with pytest.raises(ConfigError, match="s3_fifo"):
        eviction_policy_of(choice)  # type: ignore[arg-type]


def test_a_copy_in_another_tier_is_known_by_the_request_that_used_what_it_was_made_of() -> None:
    index = Index(SPEC, ((4,), (4,)), eviction=eviction_policy_of("continuation"))
    request(index, b"page", at_s=5.0)
    node = index.nodes[b"page"]
    handles = index.acquire(Tier.L2, 0, 1)
    assert handles is not None
    copy = index.publish(node, Tier.L2, 0, handles[0])
    source = node.entries[Tier.L1][0]
    assert source is not None
    assert copy.last is source.last is not None


def test_continuation_for_both_is_one_object_and_alone_it_is_not() -> None:
    eviction, write = policies_of("continuation", "continuation")
    assert eviction == write.eviction  # type: ignore[attr-defined]  # the method of that object
    for others in (("continuation", "write_through"), ("lru", "continuation")):
        eviction, write = policies_of(*others)
        assert eviction == eviction_policy_of(others[0])
    with pytest.raises(ConfigError, match="eviction"):
        policies_of("continuations", "write_through")


def test_the_page_that_would_go_is_told_of_with_its_facts() -> None:
    index = Index(SPEC, ((4,), (1,)), eviction=eviction_policy_of("lru"))
    request(index, b"page", at_s=5.0)
    assert index.victim() is None, "there is room"
    handles = index.acquire(Tier.L2, 0, 1)
    assert handles is not None
    index.publish(index.nodes[b"page"], Tier.L2, 0, handles[0])
    victim = index.victim()
    assert victim is not None
    assert (victim.key, victim.end_tokens) == (b"page", PAGE)
