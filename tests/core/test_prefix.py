"""The usable prefix against the definition, word by word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.prefix import PrefixRule
from hicache.spec import CacheSpec, Group, PagedGroup, StateField, StateGroup

PAGE = 4


def attn(name: str = "attn") -> PagedGroup:
    return PagedGroup(name, (0,), 1, 1, "float32")


def window(tokens: int, name: str = "swa") -> PagedGroup:
    return PagedGroup(name, (1,), 1, 1, "float32", window_tokens=tokens)


def state(name: str = "state") -> StateGroup:
    return StateGroup(name, (2,), (StateField("s", (1,), "float32"),))


def rule_of(*groups: Group) -> PrefixRule:
    return PrefixRule(CacheSpec("m", "r", groups, page_tokens=PAGE))


def masks_of(*rows: str) -> list[int]:
    """One row per group, one character per page: ``x`` is there, ``.`` is not."""
    return [sum(1 << group for group, row in enumerate(rows) if row[page] == "x") for page in range(len(rows[0]))]


@st.composite
def models(draw: st.DrawFn) -> tuple[Group, ...]:
    kinds = draw(st.lists(st.sampled_from(["attn", "state", 1, 2, 4, 5, 9, 13, 40]), min_size=1, max_size=4))
    groups: list[Group] = []
    for index, kind in enumerate(kinds):
        name = f"g{index}"
        groups.append(attn(name) if kind == "attn" else state(name) if kind == "state" else window(kind, name))
    return tuple(groups)


def is_legal(spec: CacheSpec, masks: list[int], n: int) -> bool:
    """Paged groups have pages 0 to n-1 (of a window: what the next token attends to), states a snapshot at n."""
    for index, group in enumerate(spec.groups):
        if isinstance(group, StateGroup):
            pages = {n - 1}
        else:
            reached = n * PAGE if group.window_tokens is None else group.window_tokens - 1
            pages = {token // PAGE for token in range(max(0, n * PAGE - reached), n * PAGE)}
        if not all(masks[page] >> index & 1 for page in pages):
            return False
    return True


@given(data=st.data(), groups=models())
def test_the_legal_stops_are_those_of_the_definition(data: st.DataObject, groups: tuple[Group, ...]) -> None:
    spec = CacheSpec("m", "r", groups, page_tokens=PAGE)
    rule = PrefixRule(spec)
    everything = (1 << len(groups)) - 1
    page = st.one_of(st.just(everything), st.integers(0, everything))
    masks = data.draw(st.lists(page, max_size=12))
    legal = [n for n in range(1, len(masks) + 1) if is_legal(spec, masks, n)]
    assert rule.legal_stops(masks) == legal
    assert rule.legal_stops(iter(masks)) == legal
    assert rule.usable(masks) == max(legal, default=0)
    has_attention = [mask & rule.full_mask == rule.full_mask for mask in masks]
    reachable = masks[: has_attention.index(False)] if False in has_attention else masks
    assert rule.longest(len(reachable), reversed(reachable)) == max(legal, default=0)


@given(data=st.data(), groups=models(), pages=st.integers(0, 12))
def test_what_a_prefix_needs_is_what_makes_it_legal_and_nothing_more(
    data: st.DataObject, groups: tuple[Group, ...], pages: int
) -> None:
    spec = CacheSpec("m", "r", groups, page_tokens=PAGE)
    rule = PrefixRule(spec)
    needed = rule.needed(pages)
    assert needed == sorted(set(needed))
    masks = [0] * pages
    for page, group in needed:
        masks[page] |= 1 << group
    assert pages == 0 or is_legal(spec, masks, pages)
    if needed:
        page, group = data.draw(st.sampled_from(needed))
        masks[page] &= ~(1 << group)
        assert not is_legal(spec, masks, pages)


@given(data=st.data(), groups=models())
def test_the_fitting_stops_are_those_that_lack_no_more_than_there_is_room_for(
    data: st.DataObject, groups: tuple[Group, ...]
) -> None:
    rule = rule_of(*groups)
    everything = (1 << len(groups)) - 1
    masks = data.draw(st.lists(st.integers(0, everything), max_size=10))
    room = data.draw(st.lists(st.integers(0, 6), min_size=len(groups), max_size=len(groups)))
    stops = list(range(len(masks) + 1))

    def lacks(stop: int, group: int) -> int:
        return sum(1 for page, of in rule.needed(stop) if of == group and not masks[page] >> group & 1)

    expected = [stop for stop in stops if all(lacks(stop, group) <= room[group] for group in range(len(groups)))]
    assert rule.fitting(stops, masks, room) == expected
    assert 0 in expected


def test_the_picture_in_the_docstring_is_true() -> None:
    rule = rule_of(attn(), window(2 * PAGE), state())
    assert rule.legal_stops(masks_of("xxxxx.", ".xx.x.", "..x.x.")) == [3]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (("x" * 10, "x" * 10, "." * 9 + "x"), 10),
        (("x" * 10, "xxxxx.xxxx", "....x....x"), 5),  # the sidecar lacks page 5: back to the state before it
        (("x" * 10, "xxxxx.xxxx", "." * 9 + "x"), 0),  # and there is none
        (("x" * 10, "x" * 10, "." * 10), 0),
        (("xxxxxx....", "x" * 10, "..x......x"), 3),
        (("." + "x" * 9, "x" * 10, "x" * 10), 0),
    ],
)
def test_br_138_the_prefix_is_the_least_over_all_pools_and_contiguous(rows: tuple[str, ...], expected: int) -> None:
    assert rule_of(attn(), attn("sidecar"), state()).usable(masks_of(*rows)) == expected


def test_br_141_a_joint_length_is_a_boundary_that_every_group_has() -> None:
    rule = rule_of(attn(), state())
    # attention ends at pages 2 and 4, states exist at 2 and 3: page 4 has no state, and cutting to 3 would be no help
    # if the rule took the least of 4 and 3; with attention up to 4, 3 is legal, with attention up to 2 only 2 is
    assert rule.usable(masks_of("xxxx", ".xx.")) == 3
    assert rule.usable(masks_of("xx..", ".xx.")) == 2
    assert rule.usable(masks_of("xx..", "..x.")) == 0


@pytest.mark.parametrize("pages", [1, 7, 8, 20])
def test_br_144_a_state_is_taken_from_the_page_that_its_boundary_ends(pages: int) -> None:
    rule = rule_of(attn(), state())
    assert [page for page, group in rule.needed(pages) if group == 1] == [pages - 1]


def test_br_146_the_nearest_earlier_snapshot_serves_when_the_last_page_has_none() -> None:
    rule = rule_of(attn(), state())
    states = "".join("x" if page in (7, 31, 63) else "." for page in range(100))
    assert rule.usable(masks_of("x" * 100, states)) == 64
    assert rule.usable(masks_of("x" * 60, states[:60])) == 32


@pytest.mark.parametrize("windows", [(5, 13), (2, 40), (4, 64, 3584)])
def test_br_149_windows_of_unrelated_lengths_live_together(windows: tuple[int, ...]) -> None:
    rule = rule_of(attn(), *(window(tokens, f"w{tokens}") for tokens in windows), state())
    everything = (1 << (len(windows) + 2)) - 1
    masks = [everything] * 1000
    assert rule.usable(masks) == 1000
    for group, tokens in enumerate(windows, start=1):
        reach = -(-(tokens - 1) // PAGE)
        missing = list(masks)
        missing[1000 - reach] &= ~(1 << group)  # the first page that the last boundary needs
        assert rule.usable(missing) == (1000 - reach if reach < 1000 else 0)
        assert rule.first_needed(group, 1000) == 1000 - reach


def test_a_window_of_one_token_needs_no_page() -> None:
    assert rule_of(window(1)).needed(5) == []
    assert rule_of(window(2)).needed(5) == [(4, 0)]
