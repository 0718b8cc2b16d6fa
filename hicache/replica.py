"""A replica as its leader sees it: the executor of its own rank, if it has one, and the links to all others."""

from __future__ import annotations

from collections.abc import Callable

from hicache.errors import ConfigError
from hicache.executor import Executor
from hicache.job_times import JobTimes
from hicache.jobs import Completion
from hicache.l3 import L3
from hicache.pools import L1Pool, L2Pool
from hicache.pump import Decides, Pump
from hicache.ranks.leader import open_links
from hicache.ranks.messages import Hello
from hicache.ranks.settings import Ranks
from hicache.spec import CacheSpec


class Replica:
    """Waits for all ranks when it is made, and does what a directory decides from ``start`` on."""

    def __init__(
        self,
        spec: CacheSpec,
        *,
        l1: L1Pool | None,
        l2: L2Pool | None,
        l3: L3 | None,
        ranks: Ranks | None,
        copies: str = "auto",
    ) -> None:
        """The pools are those of rank 0; None for all three where the leader has no rank.

        Takes ``l2`` and ``l3`` over, but for when it raises: ConfigError when ranks have not come in time.
        """
        if l1 is None and (l2 is not None or l3 is not None):
            raise ConfigError("l1", l1, "a pool beside l2 and l3, or none of the three: see HiCache.lead")
        if l1 is not None and l1.rank.rank != 0:
            raise ConfigError("l1.rank", l1.rank.rank, "the pool of rank 0, which the leader is")
        self._times = JobTimes(spec)
        self._l2 = l2
        self._pump: Pump | None = None
        self._is_memory_ours = True
        self.executor = None if l1 is None else Executor(spec, l1, l2, l3, on_complete=self._complete, copies=copies)
        try:
            self._links = open_links(spec, ranks, l1=l1, l2=l2, has_l3=l3 is not None)
        except BaseException:
            if self.executor is not None:
                self.executor.close()
            raise

    @property
    def common(self) -> Hello:
        """What all ranks together have said of themselves."""
        return self._links.common

    @property
    def load_timeout_s(self) -> float:
        """How long copies into L1 can take until every rank has done them, or is lost."""
        return self._links.load_timeout_s

    def start(self, directory: Decides, *, clock: Callable[[], float]) -> Pump:
        """Begin to do what ``directory`` decides."""
        self._pump = Pump(directory, self.executor, self._links, times=self._times, clock=clock)
        self._links.start(on_complete=self._pump.complete, on_lost=self._pump.lose)
        return self._pump

    def compute_here(self) -> None:
        """The calling thread computes in its current stream on the rank that is here, if one is."""
        if self.executor is not None:
            self.executor.compute_here()

    def close(self) -> None:
        """Give up what is under way, hang up on the ranks, and free L2."""
        self.give_up()
        if self._l2 is not None and self._is_memory_ours:  # else hicached may still write there: it is left to it
            self._l2.close()

    def give_up(self) -> None:
        """The same, but L2 stays its owner's."""
        self._links.close()
        self._is_memory_ours = self.executor is None or self.executor.close()

    def _complete(self, completion: Completion) -> None:
        assert self._pump is not None, "jobs come from the directory"
        self._pump.complete(0, completion)
