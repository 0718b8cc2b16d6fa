"""Which prefixes can be restored: the rule, beside a model that tries each one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hicache.connectors.sglang_hits import PoolPages, leading, prefix_hits

presence = st.lists(st.booleans(), max_size=12)


def model(kv_pages: int, pools: list[PoolPages]) -> list[int]:
    def is_legal(boundary: int) -> bool:
        for pool in pools:
            needed = boundary if pool.trailing_pages is None else min(pool.trailing_pages, boundary)
            pages = list(pool.present[:boundary])
            if len(pages) < boundary or not all(pages[boundary - needed :]):
                return False
        return True

    return [boundary for boundary in range(1, kv_pages + 1) if is_legal(boundary)]


@given(presence, st.lists(st.tuples(presence, st.one_of(st.none(), st.integers(1, 4))), max_size=3))
def test_boundaries_are_exactly_those_at_which_every_pool_can_go_on(
    kv: list[bool], sides: list[tuple[list[bool], int | None]]
) -> None:
    pools = [PoolPages(f"pool {number}", pages, trailing) for number, (pages, trailing) in enumerate(sides)]
    hits = prefix_hits(leading(kv), pools)
    assert list(hits.boundaries) == model(leading(kv), pools)
    for pool in pools:
        assert hits.pages_of[pool.name] == max(model(leading(kv), [pool]), default=0)


def test_a_state_is_needed_at_the_boundary_itself_and_leaves_holes() -> None:
    state = PoolPages("mamba", [False, True, False, True, True], 1)
    assert prefix_hits(4, [state]).boundaries == (2, 4)


def test_a_window_is_needed_whole_and_at_the_start_as_far_as_there_are_pages() -> None:
    window = PoolPages("swa", [True, False, True, True, True], 3)
    assert prefix_hits(5, [window]).boundaries == (1, 5)


def test_leading_pages_end_at_the_first_gap() -> None:
    assert leading([]) == 0
    assert leading([True, True, False, True]) == 2
    assert leading([True]) == 1
