"""The facade over an L1 that all groups share: every page and state holds its own bytes, whatever lay there before."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from hicache.arena import arena_layout
from hicache.cache import HiCache
from hicache.errors import ConfigError
from hicache.node import Tier
from hicache.pools import ArenaPool
from hicache.spec import CacheSpec
from tests.core.memory_l3 import Objects
from tests.core.small_engine import HYBRID, PAGE, SmallEngine, prompt

SPEC = CacheSpec("m", "r", HYBRID, page_tokens=PAGE)
UNIT_BYTES = arena_layout(SPEC, 1 << 20).unit_bytes
RING = 1234.5  # what the live ring holds, and nothing else ever


class Poisoned(SmallEngine):
    """Before it computes a page, all bytes that nobody holds are poisoned; live rings are full of one value."""

    def write_page(self, request: object, tokens: object, end: int) -> None:
        poison_what_is_free(self)
        super().write_page(request, tokens, end)  # type: ignore[arg-type]
        state = self.spec.group_index("gdn")
        self.cache.l1.state[state]["ring"][:, request.state_slot(state)] = RING  # type: ignore[attr-defined]
        assert holds_ring(self.cache.l1.memory.numpy().tobytes())  # type: ignore[attr-defined]  # a positive control


class Patient(Poisoned):
    """Takes each snapshot when nothing is being written down: that holds its unit, and without room there is none."""

    def write_page(self, request: object, tokens: object, end: int) -> None:
        self.settle()
        super().write_page(request, tokens, end)


def poison_what_is_free(engine: SmallEngine) -> None:
    room, l1 = engine.cache._directory.index.arena, engine.cache.l1
    assert room is not None
    assert isinstance(l1, ArenaPool)
    free = torch.ones(l1.memory.numel(), dtype=torch.bool)
    for group, pool in enumerate(room.arena.pools):
        stride = l1.layout.stride_bytes(group)
        for slot in range(pool.capacity):
            if pool._holders[slot]:
                assert free[slot * stride : (slot + 1) * stride].all(), "two slots share bytes"
                free[slot * stride : (slot + 1) * stride] = False
    l1.memory[free] = 0xA5


@pytest.fixture
def engine() -> Iterator[Poisoned]:
    """A unit holds one page of attention, two of the window, or three states; one long request takes nearly all."""
    engine = Poisoned(l1_bytes=24 * UNIT_BYTES, l2=40, objects={})
    yield engine
    engine.close()


def holds_ring(memory: bytes) -> bool:
    return torch.tensor([RING] * 4).numpy().tobytes() in memory


def test_load_that_shifts_between_many_states_and_many_pages_reads_exactly_what_was_written(engine: Poisoned) -> None:
    rng = random.Random(4)
    long, short = [prompt(14, seed=seed) for seed in range(3)], [prompt(2, seed=10 + seed) for seed in range(8)]
    sources = {"l1": 0, "l2": 0, "l3": 0}
    for phase in (short, long, short, long):
        for _ in range(14):
            restored = engine.serve(rng.choice(phase))  # checks every byte that it restores
            engine.settle()
            for tier in sources:
                sources[tier] += restored.by_source[tier]
    room = engine.cache._directory.index.arena
    assert room is not None
    assert room.units_passed > 10
    assert min(sources["l1"], sources["l2"]) > 0
    evicted = engine.cache._directory.index.evicted[Tier.L1]
    assert all(evicted), "there was pressure on every group"
    assert engine.cache.l2 is not None
    assert engine.l3 is not None
    assert not holds_ring(bytes(engine.cache.l2.buffer))
    assert not any(holds_ring(payload) for _, payload in engine.l3.objects.values())


def test_another_engine_finds_in_l3_what_was_written_under_pressure() -> None:
    objects: Objects = {}
    prompts = [prompt(pages, seed=pages) for pages in (12, 2, 9, 3, 11)]
    writer = Patient(l1_bytes=20 * UNIT_BYTES, l2=40, objects=objects)
    for tokens in prompts:
        writer.serve(tokens)
        writer.settle()
    assert not writer.cache.stats.skipped["snapshot.no_device_capacity"]
    writer.close()
    for units in (20, 60):
        reader = Poisoned(l1_bytes=units * UNIT_BYTES, l2=40, objects=objects)
        for tokens in prompts:
            restored = reader.serve(tokens)
            assert restored.by_source["l3"] + restored.by_source["l2"] + restored.by_source["l1"] == len(tokens) - 1
            reader.settle()
        reader.close()


def test_br_003_a_page_on_its_way_down_keeps_its_bytes_from_the_states(engine: Poisoned) -> None:
    """What is being copied is held until the copy has ended, so its unit is nobody else's."""
    directory = engine.cache._directory
    request = engine.cache.match(prompt(6))
    assert engine.cache.load(request) is not None
    engine.compute(request, prompt(6), 0)
    engine.settle()
    attention = directory.index.pools[Tier.L1][0]
    (entry,) = [node.entries[Tier.L1][0] for node in directory.index.nodes.values() if node.page == 5]
    assert entry is not None
    directory.index.pin(entry)  # as a backup does
    engine.cache.release(request)
    states = directory.index.pools[Tier.L1][2]
    taken = directory.index.acquire(Tier.L1, 2, directory.index.room(Tier.L1, 2))
    assert taken is not None
    assert attention.holders(entry.handle) == 1
    assert directory.index.room(Tier.L1, 2) == 0
    assert states.acquire(1) is None
    directory.index.unpin(entry)
    assert directory.index.room(Tier.L1, 2) == engine.cache.l1.layout.slots_per_unit[2]  # type: ignore[attr-defined]
    directory.index.release(Tier.L1, 2, taken)


@pytest.mark.parametrize("setting", ["l1_pages", "l1_state_slots"])
def test_a_split_and_a_shared_l1_are_refused_together(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = 4: expected 0 with l1_bytes = 1048576"):
        HiCache.open(SPEC, l1_bytes=1 << 20, **{setting: 4})  # type: ignore[arg-type]


def test_an_l1_of_nothing_is_refused_and_so_is_one_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match=r"l1_state_slots = 0: expected at least 1.*or l1_bytes"):
        HiCache.open(SPEC)
    with pytest.raises(ConfigError, match=f"l1_bytes = 100: expected at least {3 * UNIT_BYTES}"):
        HiCache.open(SPEC, l1_bytes=100)
