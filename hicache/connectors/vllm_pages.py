"""How vLLM's blocks and hashes make pages, and what the scheduler's half reads of vLLM and asks of SlotCache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from hicache.connectors.vllm_spec import BlockGroup
from hicache.stats import DirectoryStats

_NULL_BLOCK = 0  # vLLM's number for "no block here"

BlockIds: TypeAlias = Sequence[Sequence[int]]  # by vLLM group, in the order of the sequence
Slots: TypeAlias = dict[int, dict[int, int]]  # by group of the spec, by page


class VllmRequest(Protocol):
    """What is read of vLLM's Request."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]


class Load(Protocol):
    """See SlotCache."""

    @property
    def done(self) -> bool: ...

    @property
    def failed(self) -> bool: ...


class Step(Protocol):
    """See SlotCache: the number of a step, and the copies that it begins after."""

    @property
    def number(self) -> int: ...

    @property
    def after(self) -> Sequence[int]: ...


class Cache(Protocol):
    """What is used of SlotCache; its requests are opaque here."""

    def open(
        self, page_hashes: Sequence[bytes], *, token_count: int, salt: bytes | None, extras: Mapping[str, Any] | None
    ) -> Any: ...
    def prefetch(self, request: Any, *, beyond: int) -> None: ...
    def is_ready(self, request: Any) -> bool: ...
    def usable(self, request: Any, *, beyond: int) -> int: ...
    def attention(self, request: Any) -> int: ...
    def load(self, request: Any, *, beyond: int, tokens: int, slots: Slots) -> Load: ...
    def append(self, request: Any, page_hashes: Sequence[bytes], *, token_count: int) -> None: ...
    def save(self, request: Any, slots: Slots) -> Any: ...
    def tell_step(self, parts: Sequence[tuple[int, int]], *, seconds: float) -> None: ...
    def step(self, *, reuses: Mapping[int, Sequence[int]] | None) -> Step: ...
    def release(self, request: Any) -> None: ...
    def settle(self, *, timeout_s: float) -> bool: ...

    @property
    def stats(self) -> DirectoryStats: ...

    def close(self) -> Any: ...


class Events(Protocol):
    """See StoreEvents."""

    def name_pages(self, request: Any, keys: Sequence[bytes], page_hashes: Sequence[bytes], first: int) -> None: ...
    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Geometry:
    """How vLLM's blocks and hashes make pages."""

    groups: tuple[BlockGroup, ...]
    page_tokens: int
    hash_tokens: int  # of one entry of ``block_hashes``

    @property
    def has_state(self) -> bool:
        """Whether a prefix ends only where a state is."""
        return any(group.is_state for group in self.groups)

    def page_hashes(self, block_hashes: Sequence[bytes], first: int) -> list[bytes]:
        """The hashes of the full pages from ``first`` on: each that of its last block."""
        ratio = self.page_tokens // self.hash_tokens
        return [bytes(each) for each in block_hashes[(first + 1) * ratio - 1 :: ratio]]

    def tokens_known(self, request: VllmRequest, pages: int) -> int:
        """Tokens of a request of which ``pages`` full pages have their hash."""
        return min(request.num_tokens, (pages + 1) * self.page_tokens - 1)

    def attention_slots(self, block_ids: BlockIds, pages: range) -> Slots:
        """The blocks of pages, where vLLM has them: a sliding window has let go of some."""
        found: Slots = {}
        for index, group in enumerate(self.groups):
            if group.is_state:
                continue
            blocks = block_ids[group.group]
            for page in pages:
                position = group.block_index(page)
                if position < len(blocks) and blocks[position] != _NULL_BLOCK:
                    found.setdefault(index, {})[page] = blocks[position]
        return found

    def state_slots(self, block_ids: BlockIds, page: int) -> Slots:
        """The blocks of the states at the end of ``page``."""
        return {
            index: {page: block_ids[group.group][group.block_index(page)]}
            for index, group in enumerate(self.groups)
            if group.is_state
        }
