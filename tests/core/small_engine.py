"""An engine around a HiCache: it makes up pages and states from the tokens alone, so that every byte can be checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch

from hicache.cache import HiCache
from hicache.connect import open_l3
from hicache.l3 import L3
from hicache.policies.prefetch import PrefetchPolicy
from hicache.pools import ArenaPool, L1Pool, L2Pool
from hicache.sequence import Request, Restored
from hicache.spec import CacheSpec, Group, PagedGroup, StateField, StateGroup
from tests.core.memory_l3 import MemoryL3, Objects

PAGE = 4
STORE_BYTES = 64 * 1024 * 1024
ATTENTION = PagedGroup("attn", (0, 2), heads=2, head_dim=3, dtype="float32")
WINDOW = PagedGroup("swa", (1,), heads=1, head_dim=5, dtype="float32", window_tokens=6)
STATE = StateGroup(
    "gdn",
    (3, 4),
    (
        StateField("conv", (2, 3), "float32"),
        StateField("ring", (4,), "float32", transient=True),
        StateField("ssm", (5,), "float32"),
    ),
)
HYBRID: tuple[Group, ...] = (ATTENTION, WINDOW, STATE)


def seed_of(tokens: Sequence[int], name: str) -> float:
    """A number for a prefix and what is kept of it."""
    digest = blake2b(",".join(map(str, tokens)).encode(), key=name.encode(), digest_size=3).digest()
    return float(int.from_bytes(digest, "little") + 1)


def pattern(tokens: Sequence[int], name: str, shape: Sequence[int]) -> torch.Tensor:
    """What a page or state of this prefix holds: no two elements alike."""
    return (seed_of(tokens, name) + torch.arange(torch.Size(shape).numel()) / 64).reshape(tuple(shape))


class SmallEngine:
    """One engine process. ``objects`` is what its L3 shares with other engines, or ``address`` names its L3.

    With ``l1_bytes`` all groups share L1, and ``l1``, the slots of each, is of no account.
    """

    def __init__(
        self,
        groups: tuple[Group, ...] = HYBRID,
        *,
        l1: int = 32,
        l1_bytes: int = 0,
        l2: int = 32,
        objects: Objects | None = None,
        address: str | None = None,
        token: str = "",
        prefetch: PrefetchPolicy | None = None,
        model: str = "m",
        revision: str = "r",
        **settings: object,
    ) -> None:
        self.spec = CacheSpec(model, revision, groups, page_tokens=PAGE)
        pool = L2Pool(self.spec, [l2] * len(groups)) if l2 else None
        self.l3: MemoryL3 | None = None if objects is None or pool is None else MemoryL3(pool, objects)
        l3: L3 | None = self.l3
        if address is not None and pool is not None:
            l3 = open_l3(address, spec=self.spec, memory=pool, token=token, capacity_bytes=STORE_BYTES)
        self.cache = HiCache(
            self.spec,
            l1=(ArenaPool.allocate(self.spec, l1_bytes) if l1_bytes else L1Pool(self.spec, pages=l1, state_slots=l1)),
            l2=pool,
            l3=l3,
            prefetch=prefetch or PrefetchPolicy("wait_complete", threshold_tokens=0),
            **settings,  # type: ignore[arg-type]
        )

    def serve(self, tokens: Sequence[int], *, snapshot: bool = True, **identity: object) -> Restored:
        """A whole request: restored as far as possible, checked, computed to its end, stored and released."""
        request = self.cache.match(tokens, **identity)  # type: ignore[arg-type]
        self.cache.prefetch(request)
        self.cache.wait(request)
        restored = self.cache.load(request)
        assert restored is not None
        self.check(request, tokens, restored.tokens)
        self.compute(request, tokens, restored.tokens, snapshot=snapshot)
        self.cache.release(request)
        return restored

    def compute(self, request: Request, tokens: Sequence[int], start: int, *, snapshot: bool = True) -> None:
        """Page by page from ``start`` to the last full page."""
        for end in range(start + PAGE, len(tokens) + 1, PAGE):
            if not self.cache.extend(request, tokens=end):  # pages that are just being written down are in the way
                self.settle()
                assert self.cache.extend(request, tokens=end)
            self.write_page(request, tokens, end)
            self.cache.state_moved(request)
            self.cache.store(request, computed=end, state_at=end if snapshot and self.spec.has_state else None)

    def write_page(self, request: Request, tokens: Sequence[int], end: int) -> None:
        """What the model does to L1 when it computes the page that ends at ``end``."""
        for index, group in enumerate(self.spec.groups):
            if isinstance(group, PagedGroup):
                slot = request.page_table(index)[end // PAGE - 1]
                page = self.cache.l1.paged[index][:, slot]
                page.copy_(pattern(tokens[:end], group.name, page.shape))
            else:
                for name, field in self.cache.l1.state[index].items():
                    state = field[:, request.state_slot(index)]
                    state.copy_(pattern(tokens[:end], f"{group.name}.{name}", state.shape))

    def check(self, request: Request, tokens: Sequence[int], restored: int) -> None:
        """The restored prefix holds, byte for byte, what was computed for these tokens, and nothing transient."""
        for index, group in enumerate(self.spec.groups):
            if isinstance(group, PagedGroup):
                for page, slot in enumerate(request.page_table(index)[: restored // PAGE]):
                    if slot is None:
                        reach = group.reach_pages(PAGE)
                        assert reach is not None
                        assert page < restored // PAGE - reach
                        continue
                    held = self.cache.l1.paged[index][:, slot]
                    assert torch.equal(held, pattern(tokens[: (page + 1) * PAGE], group.name, held.shape))
            else:
                for field in group.fields:
                    slot = request.state_slot(index) if field.transient else request.state_source(index)
                    held = self.cache.l1.state[index][field.name][:, slot]
                    if restored and not field.transient:
                        assert torch.equal(held, pattern(tokens[:restored], f"{group.name}.{field.name}", held.shape))
                    else:
                        assert not held.any()

    def settle(self) -> None:
        """Wait until everything has been written down."""
        assert self.cache.flush(timeout_s=20)

    def close(self) -> None:
        self.cache.close()


Make = Callable[..., SmallEngine]


def prompt(pages: int, *, seed: int = 0) -> list[int]:
    return [1000 * seed + token for token in range(pages * PAGE + 1)]


def fill(engine: SmallEngine, *prompts: list[int]) -> None:
    """L3 gets these prompts, from another engine that is gone then."""
    assert engine.l3 is not None
    writer = SmallEngine(engine.spec.groups, objects=engine.l3.objects)
    for tokens in prompts:
        writer.serve(tokens)
    writer.settle()
    writer.close()


def by_source(**tokens: int) -> dict[str, int]:
    return {"l1": 0, "l2": 0, "l3": 0, "computed": 1} | tokens
