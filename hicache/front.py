"""What the caches that an engine imports have in common: keys, a replica behind a lock, and an end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from hicache.costs.measured import MeasuredCosts, tell_prefill
from hicache.errors import UsageError
from hicache.keys import BlockKeys, FieldValue
from hicache.l3 import L3
from hicache.policies import policy_of
from hicache.policies.prefetch import PrefetchPolicy
from hicache.pump import Decides
from hicache.ranks.messages import Hello
from hicache.replica import Replica
from hicache.spec import CacheSpec


class MeasuredDirectory(Decides, Protocol):
    """A directory that learns what loads and prefills take."""

    costs: MeasuredCosts


D = TypeVar("D", bound=MeasuredDirectory)


class CacheFront(Generic[D]):
    """Made when every rank is there; thread-safe from then on, by the lock ``_changed``."""

    def __init__(
        self,
        spec: CacheSpec,
        keys: BlockKeys,
        replica: Callable[[], Replica],
        directory: Callable[[Hello, PrefetchPolicy], D],
        *,
        l3: L3 | None,
        salt: bytes | None,
        prefetch: PrefetchPolicy | None,
        clock: Callable[[], float],
    ) -> None:
        """``directory`` is made of what all ranks have in common. Raises ConfigError; the ranks are given up then."""
        self.spec = spec
        self.l3 = l3
        self._salt = salt
        self._clock = clock
        self._prefetch_policy = policy_of("prefetch", prefetch, PrefetchPolicy)
        self._keys = keys
        self._closed = False
        self._replica = replica()
        try:
            self._directory = directory(self._replica.common, self._prefetch_policy)
        except BaseException:
            self._replica.give_up()
            raise
        self._pump = self._replica.start(self._directory, clock=clock)
        self._changed = self._pump.changed

    def tell_prefill(self, start: int, end: int, *, seconds: float) -> None:
        """The tokens ``[start, end)`` of a prompt, with all before them restored or computed, took so long to compute.

        Tell it once for each request, or each chunk that was computed alone: the read policy compares loads with it.
        Without it everything that is found is loaded. Raises UsageError unless ``0 <= start < end``.
        """
        self.tell_step([(start, end)], seconds=seconds)

    def tell_step(self, parts: Sequence[tuple[int, int]], *, seconds: float) -> None:
        """One step computed these ``[start, end)`` of as many prompts: ``tell_prefill`` for those who batch them.
        Steps that mostly decode say little of prefills: leave them out. Raises UsageError likewise, and for no parts.
        """
        with self._changed:
            tell_prefill(self._directory.costs, parts, seconds)

    def close(self) -> None:
        """Give up what is under way, disconnect, and free L2. Idempotent. No tensor of ``l2`` may be used after."""
        with self._changed:
            if self._closed:
                return
            self._closed = self._pump.is_closed = True
            self._changed.notify_all()
        self._replica.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _root(self, salt: bytes | None, extras: Mapping[str, FieldValue] | None) -> bytes:
        """The parent of a sequence's first page. Raises UsageError for a salt that is none."""
        if not isinstance(salt, bytes | None):
            raise UsageError(f"salt is a {type(salt).__name__}: expected bytes, or None for the cache's own")
        return self._keys.root(salt=self._salt if salt is None else salt, extras=extras)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the cache has been closed")
