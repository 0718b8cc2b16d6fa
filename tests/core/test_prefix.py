"""The usable prefix against the definition, word by word."""

from __future__ import annotations

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


def test_a_window_of_one_token_needs_no_page() -> None:
    assert rule_of(window(1)).needed(5) == []
    assert rule_of(window(2)).needed(5) == [(4, 0)]
