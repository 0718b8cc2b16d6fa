"""Replicas of several ranks in real processes, on a small hybrid model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicache.ranks.settings import Ranks
from hicache.spec import CacheSpec, HeadSplit, PagedGroup, StateField, StateGroup

if TYPE_CHECKING:
    from bench.rank_replica import Replica

PAGE = 4
ATTENTION = PagedGroup("attn", (0, 3), heads=4, head_dim=8, dtype="bfloat16")
LATENT = PagedGroup.mla("mla", layers=(4,), latent_dim=6, rope_dim=2, dtype="float32")
STATE = StateGroup(
    "gdn",
    (1, 2),
    (
        StateField("conv", (3, 24), "bfloat16", split=HeadSplit(1, ((4, 2), (4, 2), (4, 2)))),
        StateField("temporal", (4, 5, 3), "float32", split=HeadSplit(0)),
        StateField("ring", (4, 6), "float32", transient=True, split=HeadSplit(0)),
    ),
)

MakeReplica = Callable[..., "Replica"]


def spec_of(tp: int = 1, pp: tuple[int, ...] | None = None, *, lcm: int | None = None) -> CacheSpec:
    """Attention, MLA and a recurrent state over five layers."""
    return CacheSpec("m", "r", (ATTENTION, LATENT, STATE), page_tokens=PAGE, tp_size=tp, tp_lcm=lcm, pp_layers=pp)


def prompt(pages: int, *, seed: int = 0) -> list[int]:
    """Of so many pages, and one token more."""
    return [1000 * seed + token for token in range(pages * PAGE + 1)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeReplica]:
    """Makes replicas that are gone at the end, with every process."""
    from bench.rank_replica import Replica, ranks_in  # torch is loaded only where it is used

    replicas: list[Replica] = []

    def replica(
        spec: CacheSpec, *, ranks: Ranks | None = None, timeouts: dict[str, float] | None = None, **settings: object
    ) -> Replica:
        sizes = {"l1_pages": 32, "l1_state_slots": 24, "l2_bytes": 2 << 20}
        ranks = ranks or ranks_in(tmp_path, **({"start_timeout_s": 60.0} | (timeouts or {})))
        replicas.append(Replica(spec, ranks, **(sizes | settings)))
        return replicas[-1]

    yield replica
    for made in replicas:
        made.kill()
