"""One sequence as the engine holds it: its page tables and states, and what was found and restored of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hicache.errors import UsageError
from hicache.keys import BlockKeys
from hicache.request import RequestRecord
from hicache.slots import slot_of

if TYPE_CHECKING:  # which makes Requests
    from hicache.cache import HiCache


@dataclass(frozen=True, slots=True)
class Hit:
    """Tokens of the prompt that were found in this engine, by the tier that they would be loaded from."""

    l1_tokens: int
    l2_tokens: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The restored prefix. ``by_source`` gives tokens by ``l1``, ``l2``, ``l3`` and ``computed`` (left to compute)."""

    tokens: int
    by_source: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """What another engine can load of a request: ``tokens`` of its usable prefix, acknowledged by L3.

    ``is_complete``: as much as this engine itself could restore, and nothing was under way at the deadline.
    """

    tokens: int
    is_complete: bool


class Request:
    """One sequence, from ``HiCache.match`` to ``HiCache.release``. Used by one thread at a time."""

    def __init__(
        self, cache: HiCache, tokens: NDArray[np.int64], keys: BlockKeys, root: bytes, record: RequestRecord
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._root = root
        self._record = record
        self._count = len(tokens)
        self._tail: list[int] = tokens[len(record.keys) * keys.page_tokens :].tolist()  # of the last, partial page
        self.hit = Hit(record.local_tokens["l1"], record.local_tokens["l2"])
        self.prefetch_deadline_s = 0.0  # by the cache's clock

    @property
    def token_count(self) -> int:
        """Tokens of the sequence so far."""
        return self._count

    def page_table(self, group: int) -> list[int | None]:
        """The L1 page of every page of the sequence; None where a sliding window needs none."""
        return [None if handle is None else slot_of(handle) for handle in self._record.tables[group]]

    def state_slot(self, group: int) -> int:
        """The L1 slot that the state of a group is written to: the request's own until it is released or donated."""
        if group not in self._record.live:
            raise UsageError(
                f"group {group} has no live state: it is paged, or the request is not loaded or has donated it"
            )
        return slot_of(self._record.live[group])

    def state_source(self, group: int) -> int:
        """The L1 slot that the next step reads the state of a group from: ``state_slot``, except with double buffering
        after a load or a snapshot, until ``HiCache.state_moved``. Others may read it, too: it is not to be written to.

        The transient fields are those of ``state_slot`` always.
        """
        own = self.state_slot(group)
        source = self._record.sources.get(group)
        return own if source is None else slot_of(source.handle)

    def _append(self, tokens: NDArray[np.int64]) -> list[bytes]:
        """Takes the tokens in; returns the keys of the pages that they fill."""
        self._tail += tokens.tolist()
        self._count += len(tokens)
        parent = self._record.keys[-1] if self._record.keys else self._root
        keys = self._keys.chain(self._tail, parent=parent)
        del self._tail[: len(keys) * self._keys.page_tokens]
        return keys


def found_tokens(request: Request) -> Mapping[str, int]:
    """What a span tells of a match."""
    return {
        "hicache.tokens": request.token_count,
        "hicache.l1_tokens": request.hit.l1_tokens,
        "hicache.l2_tokens": request.hit.l2_tokens,
    }


def restored_tokens(restored: Restored | None) -> Mapping[str, int]:
    """What a span tells of a load; nothing where there was no room."""
    return (
        {} if restored is None else {f"hicache.{source}_tokens": count for source, count in restored.by_source.items()}
    )
