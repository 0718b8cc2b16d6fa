"""A scheduler's half of the vLLM connector, its requests, and the blocks that they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache.connectors.vllm_pages import Geometry
from hicache.connectors.vllm_scheduler import Identity, SchedulerSide, StepPlan
from hicache.connectors.vllm_spec import BlockGroup
from tests.connectors.vllm_fakes import FakeCache, Request

PAGE = 8
DENSE = (BlockGroup(0, 0, 1, is_state=False),)
HYBRID = (BlockGroup(0, 0, 1, is_state=True), BlockGroup(1, 0, 1, is_state=False))


class World:
    """One scheduler, its requests, and the blocks that they have."""

    def __init__(self, groups: Sequence[BlockGroup] = DENSE, *, hash_tokens: int = PAGE, **options: Any) -> None:
        states = [index for index, group in enumerate(groups) if group.is_state]
        self.cache = FakeCache(PAGE, groups=len(groups), states=states)
        geometry = Geometry(tuple(groups), page_tokens=PAGE, hash_tokens=hash_tokens)
        options.setdefault("identity_of", lambda request: Identity())
        self.side = SchedulerSide(self.cache, geometry, **options)
        self.hash_tokens = hash_tokens
        self.blocks: dict[str, tuple[list[int], ...]] = {}

    def request(self, name: str, tokens: Sequence[int], **fields: Any) -> Request:
        request = Request(name, list(tokens), self.hash_tokens, **fields)
        self.side.opened(request, 0)
        return request

    def plan(self, scheduled: dict[str, int] | None = None, **states: Any) -> StepPlan:
        return self.side.plan(scheduled or {}, self.blocks.get, states, ())

    def compute(self, request: Request, tokens: int, *, first_block: int = 10, states: Sequence[Any] = ()) -> StepPlan:
        """One step of a request whose blocks are numbered on from ``first_block``."""
        count = -(-(request.num_computed_tokens + tokens) // PAGE)
        ids = list(range(first_block, first_block + count))
        self.blocks[request.request_id] = ([0] * (count - 1) + ids[-1:], ids) if len(self.groups) > 1 else (ids,)
        plan = self.plan({request.request_id: tokens}, **({request.request_id: states} if states else {}))
        request.num_computed_tokens += tokens
        return plan

    @property
    def groups(self) -> tuple[BlockGroup, ...]:
        return self.side._geometry.groups

    def logged(self, kind: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.cache.log if entry[0] == kind]


def saved_pages(world: World, group: int = 0) -> list[int]:
    return [page for _, slots in world.logged("save") for page in slots.get(group, {})]


def computed(world: World, tokens: Sequence[int], name: str = "a") -> None:
    """A request that has been computed and has ended: its pages are in the store."""
    request = world.request(name, tokens)
    world.compute(request, len(tokens))
    world.side.finished(request)
