"""What policies are told: small frozen structs, the same in the cache and in a replay of a trace."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias

import msgspec

Key: TypeAlias = Hashable  # a block key; the id of a prefix in a replay. Names a page also when that has gone


class RequestFacts(msgspec.Struct, frozen=True):
    """A request, as all that it uses remembers it: one object for all of them."""

    at_s: float
    prompt_tokens: int
    new_tokens: int  # of them, in no tier when it came
    tenant: str = ""
    kind: str | None = None
    turn: int | None = None


class EvictionFacts(msgspec.Struct, frozen=True):
    """What may be evicted: an object of one page, or a state. Of a run of pages those of its last page, which goes
    first."""

    key: Key
    now_s: float
    used_s: float  # when it was last used
    used_at: int  # the order of last uses; of what was used together the deeper one comes first
    born_at: int  # the order of publication in this tier, parents before children
    uses: int  # requests that have used it since then, the first one included
    end_tokens: int  # from the start of the sequence to its end
    tokens: int  # of the page; of a state those that it saves to compute
    bytes: int
    is_state: bool = False
    last: RequestFacts | None = None  # the request that used it last; None where nobody has told


class SuffixFacts(msgspec.Struct, frozen=True):
    """Pages that follow each other in one sequence, are complete, and may go down a tier."""

    now_s: float
    first_page: int  # so many pages of the sequence come before them
    page_tokens: int
    page_bytes: int
    victim: Callable[[], EvictionFacts | None]  # what the tier below would evict for them; None while it has room
    request: RequestFacts | None = None  # that uses them: the object that eviction policies are told of as ``last``
