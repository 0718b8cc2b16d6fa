"""A real, small cache with the calls that the engine makes: L1 and a dict of copies, nothing else.

Everything that an engine must not rely on is hostile here: pages come in random order, unwritten ones hold NaN, pages
behind a sliding window are taken back at every store, and a fresh state slot has a ring full of rubbish.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bench.tiny_reference import private_view
from hicache.errors import StateNotCommitted, UsageError
from hicache.policies.snapshot import SnapshotPolicy
from hicache.spec import CacheSpec, PagedGroup

Prefix = tuple[bytes | None, tuple[int, ...]]


@dataclass(frozen=True)
class LocalRestored:
    tokens: int
    by_source: dict[str, int]


@dataclass(frozen=True)
class StoreCall:
    computed: int
    state_at: int | None
    state_pending: int
    donate: bool = False


@dataclass(eq=False)
class LocalRequest:
    tokens: list[int]
    salt: bytes | None
    prompt_tokens: int
    tables: dict[int, list[int | None]] = field(default_factory=dict)
    slot: int | None = None

    def page_table(self, group_index: int) -> list[int | None]:
        return list(self.tables[group_index])

    def state_slot(self, group_index: int) -> int:
        assert self.slot is not None, "not loaded"
        return self.slot

    def state_source(self, group_index: int) -> int:
        return self.state_slot(group_index)

    def prefix(self, tokens: int) -> Prefix:
        return self.salt, tuple(self.tokens[:tokens])


class LocalL1:
    def __init__(self, spec: CacheSpec, pages: int, state_slots: int) -> None:
        view = private_view(spec, pages=pages, fill=torch.nan)
        self.paged = {
            index: view.pages[group.name] for index, group in enumerate(spec.groups) if group.name in view.pages
        }
        slots = {name: zeros.repeat(1, state_slots, *[1] * (zeros.dim() - 2)) for name, zeros in view.state.items()}
        self.state = {index: slots for index in range(len(spec.groups)) if index not in self.paged}


class LocalCache:
    def __init__(
        self,
        spec: CacheSpec,
        *,
        pages: int = 64,
        state_slots: int = 2,
        seed: int = 0,
        policy: SnapshotPolicy | None = None,
    ) -> None:
        self.spec = spec
        self.policy = policy or SnapshotPolicy()
        self.l1 = LocalL1(spec, pages, state_slots)
        self.pages: dict[tuple[int, Prefix], torch.Tensor] = {}
        self.snapshots: dict[Prefix, dict[str, torch.Tensor]] = {}
        self.stores: list[StoreCall] = []
        self.live: set[LocalRequest] = set()
        self._rng = random.Random(seed)
        self._free = {index: list(range(pages)) for index in self.l1.paged}
        self._free_slots = list(range(state_slots))

    def match(self, token_ids: Sequence[int], *, salt: bytes | None = None) -> LocalRequest:
        request = LocalRequest(list(token_ids), salt, len(token_ids), {index: [] for index in self.l1.paged})
        self.live.add(request)
        return request

    def prefetch(self, request: LocalRequest) -> None:
        assert request in self.live

    def wait(self, request: LocalRequest) -> bool:
        assert request in self.live
        return True

    def load(self, request: LocalRequest, *, timeout_s: float = 0.0) -> LocalRestored | None:
        if not self._free_slots:
            return None
        tokens = self._usable(request)
        request.slot = self._free_slots.pop()
        snapshot = self.snapshots.get(request.prefix(tokens), {})
        for fields in self.l1.state.values():
            for name, tensor in fields.items():
                tensor[:, request.slot] = snapshot.get(name, 0)
        if not self.extend(request, tokens=tokens):
            return None
        self._leave_window(request, tokens)
        for index, table in request.tables.items():
            for position, page in enumerate(table):
                if page is not None:
                    end = (position + 1) * self.spec.page_tokens
                    self.l1.paged[index][:, page] = self.pages[index, request.prefix(end)]
        return LocalRestored(tokens, {"l1": tokens, "l2": 0, "l3": 0})

    def extend(self, request: LocalRequest, *, tokens: int, timeout_s: float = 0.0) -> bool:
        wanted = -(-tokens // self.spec.page_tokens)
        if any(wanted - len(table) > len(self._free[index]) for index, table in request.tables.items()):
            return False
        for index, table in request.tables.items():
            while len(table) < wanted:
                table.append(self._free[index].pop(self._rng.randrange(len(self._free[index]))))
        return True

    def append(self, request: LocalRequest, tokens: Sequence[int]) -> None:
        request.tokens += tokens

    def next_state_stop(
        self, request: LocalRequest, *, computed: int, until: int, ends_at: int | None = None
    ) -> int | None:
        if not self.spec.has_state:
            return None
        return self.policy.next_stop(
            computed=computed,
            until=until,
            prompt_tokens=request.prompt_tokens,
            page_tokens=self.spec.page_tokens,
            ends_at=ends_at,
        )

    def state_moved(self, request: LocalRequest) -> None:
        assert request in self.live

    def store(
        self,
        request: LocalRequest,
        *,
        computed: int,
        state_at: int | None = None,
        state_pending: int = 0,
        donate: bool = False,
    ) -> None:
        page_tokens = self.spec.page_tokens
        self.stores.append(StoreCall(computed, state_at, state_pending, donate))
        if computed > len(request.tokens):
            raise UsageError(f"{computed} tokens computed of {len(request.tokens)}")
        if state_at is not None:
            if state_pending or state_at != computed or state_at % page_tokens:
                raise StateNotCommitted(f"state at {state_at} of {computed}, {state_pending} pending")
            self.snapshots[request.prefix(state_at)] = {
                name: tensor[:, request.slot].clone()
                for index, fields in self.l1.state.items()
                for name, tensor in fields.items()
                if name in {kept.name for kept in self.spec.groups[index].persistent_fields}
            }
        for index, table in request.tables.items():
            for position, page in enumerate(table[: computed // page_tokens]):
                key = index, request.prefix((position + 1) * page_tokens)
                if page is not None and key not in self.pages:
                    self.pages[key] = self.l1.paged[index][:, page].clone()
        self._leave_window(request, computed)

    def release(self, request: LocalRequest) -> None:
        self.live.remove(request)
        for index, table in request.tables.items():
            for page in table:
                self._give_back(index, page)
        for fields in self.l1.state.values():
            for tensor in fields.values():
                tensor[:, request.slot] = 7
        if request.slot is not None:
            self._free_slots.append(request.slot)

    @property
    def free_pages(self) -> dict[int, int]:
        return {index: len(free) for index, free in self._free.items()}

    def _usable(self, request: LocalRequest) -> int:
        page_tokens = self.spec.page_tokens
        last = (len(request.tokens) - 1) // page_tokens * page_tokens
        return next((end for end in range(last, 0, -page_tokens) if self._is_usable(request, end)), 0)

    def _is_usable(self, request: LocalRequest, end: int) -> bool:
        page_tokens = self.spec.page_tokens
        for index, reach in enumerate(self.spec.reach_pages):
            if index not in self.l1.paged:
                if request.prefix(end) not in self.snapshots:
                    return False
                continue
            first = 0 if reach is None else max(0, end // page_tokens - reach)
            ends = range((first + 1) * page_tokens, end + 1, page_tokens)
            if any((index, request.prefix(stop)) not in self.pages for stop in ends):
                return False
        return True

    def _leave_window(self, request: LocalRequest, tokens: int) -> None:
        for index, table in request.tables.items():
            group = self.spec.groups[index]
            assert isinstance(group, PagedGroup)
            reach = group.reach_pages(self.spec.page_tokens)
            if reach is not None:
                for position in range(max(0, tokens // self.spec.page_tokens - reach)):
                    self._give_back(index, table[position])
                    table[position] = None

    def _give_back(self, index: int, page: int | None) -> None:
        if page is not None:
            self.l1.paged[index][:, page] = torch.nan
            self._free[index].append(page)
