"""The memory of one rank: what an engine's pages and states live in, in GPU memory (L1) and host memory (L2)."""

from hicache.pools.arena import ArenaPool, open_l1
from hicache.pools.l1 import L1Pool
from hicache.pools.l2 import L2Pool
from hicache.sizing import l2_slot_counts

__all__ = ["ArenaPool", "L1Pool", "L2Pool", "l2_slot_counts", "open_l1"]
