"""The table of ranks: it compares what it says it does, and would tell if it were otherwise."""

from __future__ import annotations

from bench import hybrid_ranks
from bench.hybrid_ranks import _daemon, _replica, _restore, _spec, _store, _Workload
from bench.rank_patterns import Slot


def test_a_row_says_what_was_restored_and_that_it_is_equal() -> None:
    workload = _Workload(prompts=1, pages=2, jobs=3)
    with _daemon(8) as (address, folder):
        _store(_spec(tp=2, lcm=4), address, folder, workload)
        row = _restore(_spec(lcm=4), address, folder, workload)
        assert row.restored_tokens == 2 * hybrid_ranks.PAGE_TOKENS
        assert row.is_equal
        assert row.is_stored_once
        assert row.objects == 2 * (4 + 1) + 4
        assert row.bytes_compared == 2 * sum(_spec().object_bytes[:2]) + _spec().object_bytes[2]
        nothing = _restore(_spec(tp=2), address, folder, workload)  # a control: slices of another namespace
        assert (nothing.restored_tokens, nothing.objects, nothing.is_stored_once) == (0, 0, False)
        with _replica(_spec(tp=2, lcm=4), address, folder, workload) as replica:
            [tokens] = workload.tokens
            request, restored = replica.restore(tokens)
            assert not replica.differing(request, tokens, restored.tokens)
            page = request.page_table(0)[0]
            assert page is not None
            replica.step([Slot(0, page, 1)])
            assert sorted(replica.differing(request, tokens, restored.tokens)) == [0, 1]
            replica.cache.release(request)
