"""What each write policy writes and loses, and what survives a crash."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from hicache.jobs import Job, StoreJob
from hicache.node import Node, Tier
from hicache.outcome import Outcome
from hicache.policies.facts import SuffixFacts
from hicache.policies.write import WriteBack, WriteThroughSelective
from tests.core.simulated_executor import Fault, no_fault
from tests.core.situations import HYBRID, evict_all, prompt, resident
from tests.core.world import FULL, MODELS, PAGE, POLICIES, World

POLICY_NAMES = list(POLICIES)
Objects = set[tuple[bytes, int]]  # block key, group


def in_l3(world: World) -> Objects:
    return {(key, group) for key, group, rank in world.executor.l3 if rank == 0}


def objects_of(world: World, *prompts: list[int], groups: Sequence[int] = (0, 1)) -> Objects:
    """What serving these prompts whole computes: every page, and with the helper's habit a state after each."""
    return {(key, group) for tokens in prompts for key in world.page_keys(tokens) for group in groups}


def stream(seed: int, *, requests: int = 40) -> list[list[int]]:
    """Prompts of three conversations that share beginnings, and others that nobody asks for again."""
    rng = random.Random(seed)
    trunks = [prompt(6, seed=number) for number in range(3)]
    return [
        prompt(rng.randrange(1, 5), seed=100 + number)
        if rng.random() < 0.4
        else rng.choice(trunks)[: rng.randrange(2, 6 * PAGE + 2)]
        for number in range(requests)
    ]


def serve_all(world: World, prompts: list[list[int]]) -> Counter[tuple[bytes, int]]:
    """Serve them one after the other. Returns how many requests used each object of a full page."""
    touches: Counter[tuple[bytes, int]] = Counter()
    for tokens in prompts:
        world.serve(tokens, patient=True)
        world.check()
        touches.update(objects_of(world, tokens))
    return touches


def usable_from_l3(world: World, tokens: list[int]) -> int:
    """The pages that an engine with nothing but L3 can restore of a prompt, by brute force."""
    keys = world.page_keys(tokens)
    masks = [sum(1 << g for g in range(len(world.spec.groups)) if (key, g) in in_l3(world)) for key in keys]
    return world.directory.index.rule.usable(masks)


# -- the same stream under each policy -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_write_through_writes_everything_at_once_and_loses_nothing(seed: int) -> None:
    world = World(HYBRID, l1=12, l2=12, policy=POLICIES["write_through"], store_l2_share=1.0)
    touches = serve_all(world, stream(seed))
    assert in_l3(world) == set(touches)
    assert world.directory.stats.tokens_lost == {}
    world.wind_up()


@pytest.mark.parametrize("seed", range(3))
def test_selective_writes_exactly_what_was_used_twice_wherever_it_was(seed: int) -> None:
    """L1 is so small that most pages are gone before they are used again."""
    policy = lambda: WriteThroughSelective(2, remembered_pages=4096)  # noqa: E731
    world = World(HYBRID, l1=12, l2=12, policy=policy, store_l2_share=1.0)
    touches = serve_all(world, stream(seed))
    assert in_l3(world) == {part for part, count in touches.items() if count >= 2}
    evict_all(world, Tier.L1)
    never_written = Counter(part[1] for part, count in touches.items() if count == 1)
    recomputed = Counter(part[1] for part, count in touches.items() if count >= 2)
    lost = world.directory.stats.tokens_lost
    for group, name in enumerate(("l1.attn", "l1.gdn")):
        assert never_written[group] * PAGE <= lost[name] <= (never_written[group] + recomputed[group]) * PAGE
    assert set(lost) == {"l1.attn", "l1.gdn"}
    world.wind_up()


@pytest.mark.parametrize("seed", range(3))
def test_write_back_writes_what_is_evicted_and_the_rest_when_it_is_flushed(seed: int) -> None:
    world = World(HYBRID, l1=16, l2=16, policy=lambda: WriteBack(ahead_share=0.5), store_l2_share=1.0)
    touches = serve_all(world, stream(seed))
    everything = resident(world, Tier.L1) | resident(world, Tier.L2) | in_l3(world)
    assert everything == set(touches)
    assert world.directory.stats.tokens_lost == {}
    assert in_l3(world) < everything
    world.directory.flush()
    world.run_all()
    assert world.directory.is_all_written
    assert in_l3(world) == everything
    world.check()
    world.wind_up()
    assert world.directory.stats.tokens_lost == {}


def test_write_back_writes_nothing_while_there_is_room() -> None:
    world = World(HYBRID, l1=16, l2=16, policy=POLICIES["write_back"])
    world.serve(prompt(6))
    world.serve(prompt(4, seed=1))
    assert resident(world, Tier.L2) == set()
    assert in_l3(world) == set()
    world.wind_up()


def test_write_back_copies_to_l2_exactly_what_would_be_evicted_first() -> None:
    """L1 has 8 pages, of which 2 are to be free or written down; children are written before their parents."""
    world = World((FULL,), l1=8, l2=16, policy=lambda: WriteBack(ahead_share=0.25))
    world.serve(prompt(4))
    world.serve(prompt(2, seed=1))
    assert resident(world, Tier.L2) == set()
    world.serve(prompt(2, seed=2), patient=True)
    first = world.page_keys(prompt(4))
    assert resident(world, Tier.L2) == {(first[3], 0), (first[2], 0)}
    assert in_l3(world) == set()
    world.serve(prompt(2, seed=3), patient=True)
    assert resident(world, Tier.L2) == {(key, 0) for key in first}
    assert {(key, 0) for key in first[:2]} < resident(world, Tier.L1)
    assert world.serve(prompt(4), patient=True).record.by_source == {
        "l1": 2 * PAGE,
        "l2": 2 * PAGE,
        "l3": 0,
        "computed": 1,
    }
    assert world.directory.stats.tokens_lost == {}
    world.wind_up()


# -- counting independent of residence -------------------------------------------------------------------------------


class BoundToResidence(WriteThroughSelective):
    """Counts in what is here, as in a tree whose nodes are dropped when they are evicted."""

    def __init__(self, world: Callable[[], World]) -> None:
        super().__init__()
        self.world = world
        self.counts: Counter[Node | None] = Counter()

    def touch(self, keys: Sequence[bytes], facts: SuffixFacts) -> bool:
        self.counts.update(filter(None, map(self.world().directory.index.nodes.get, keys)))
        return True

    def admits(self, keys: Sequence[bytes], facts: SuffixFacts) -> int:
        return sum(self.counts[self.world().directory.index.nodes.get(key)] >= 2 for key in keys)


@pytest.mark.parametrize("is_bound", [False, True], ids=["by key", "control: by residence"])
def test_a_page_that_was_evicted_and_computed_again_has_been_used_twice(is_bound: bool) -> None:
    worlds: list[World] = []
    policy = (lambda: BoundToResidence(lambda: worlds[0])) if is_bound else WriteThroughSelective
    world = World(HYBRID, l1=6, l2=6, policy=policy)
    worlds.append(world)
    for turn in range(3):
        world.serve(prompt(4))
        evict_all(world, Tier.L1)
        evict_all(world, Tier.L2)
        written = in_l3(world)
        assert written == (set() if is_bound or turn == 0 else objects_of(world, prompt(4)))
    world.wind_up()


@pytest.mark.parametrize("tier", ["l1", "l2", "l3"])
def test_a_page_that_is_found_has_been_used_again(tier: str) -> None:
    """With three touches: computed, found once in some tier, found once more."""
    world = World(HYBRID, l1=8, l2=8, policy=lambda: WriteThroughSelective(3))
    if tier == "l3":  # another engine has stored it, and L3 has lost the last page since
        world.fill_l3(prompt(4))
        world.serve(prompt(4))
    else:
        world.serve(prompt(4))
    if tier == "l2":
        nodes = [world.directory.index.nodes[key] for key in world.page_keys(prompt(4))]
        world.writer.send_down(nodes)
        world.run_all()
        world.executor.l3.clear()
        for node in nodes:
            world.directory.index.gone_from_l3(node, 3)
        evict_all(world, Tier.L1)
    assert world.serve(prompt(4)).record.by_source["computed"] == 1
    world.executor.l3.clear()
    for key in world.page_keys(prompt(4)):
        world.directory.index.gone_from_l3(world.directory.index.nodes[key], 3)
    world.is_l3_whole = False
    assert in_l3(world) == set()
    assert world.serve(prompt(4)).record.by_source["computed"] == 1
    assert objects_of(world, prompt(4), groups=[0]) < in_l3(world)
    assert usable_from_l3(world, prompt(4)) == 4
    world.wind_up()


def test_one_request_uses_a_page_once_however_often_it_stores() -> None:
    world = World(HYBRID, l1=16, l2=16, policy=WriteThroughSelective)
    live = world.open(prompt(6))
    world.load_whole(live)
    for _ in range(6):  # chunks, decoding, the end
        world.compute(live, pages=1, snapshot=True)
        world.compute(live, pages=0, snapshot=True)
    world.release(live)
    world.run_all()
    assert in_l3(world) == set()
    assert world.directory.stats.skipped["backup.not_admitted"] == 6
    world.serve(prompt(6))
    assert in_l3(world) == objects_of(world, prompt(6))
    world.wind_up()


def test_a_request_that_computes_nothing_of_a_page_counts_when_it_is_released() -> None:
    world = World(HYBRID, l1=16, l2=16, policy=WriteThroughSelective)
    world.serve(prompt(4))
    live = world.open(prompt(4))
    world.load_whole(live)
    assert live.record.loaded_pages == 4
    world.release(live)
    world.run_all()
    assert in_l3(world) == objects_of(world, prompt(4))
    world.wind_up()


def test_a_request_that_is_given_up_before_it_used_anything_does_not_count() -> None:
    world = World(HYBRID, l1=16, l2=16, policy=WriteThroughSelective)
    for _ in range(3):
        world.release(world.open(prompt(4)))
    world.serve(prompt(4))
    assert in_l3(world) == set()
    world.wind_up()


def test_a_snapshot_is_worth_writing_when_its_page_is() -> None:
    """A second request goes on through the first one's pages and takes snapshots at new boundaries."""
    world = World(HYBRID, l1=20, l2=20, policy=WriteThroughSelective)
    world.serve(prompt(4), snapshot=False)
    assert in_l3(world) == set()
    keys = world.page_keys(prompt(6))
    evict_all(world, Tier.L1)
    world.serve(prompt(6), snapshot=True)
    assert in_l3(world) == objects_of(world, prompt(4))
    assert usable_from_l3(world, prompt(6)) == 4
    world.serve(prompt(6))
    assert in_l3(world) == {(key, group) for key in keys for group in (0, 1)}
    world.wind_up()


# -- crashes and storms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_l3_alone_is_always_a_legal_prefix_and_what_survives_a_crash(policy: str, seed: int) -> None:
    """At any moment, with anything failing, the engine dies: the next one restores what L3 has, and no wrong byte."""
    rng = random.Random(seed)
    world = World(rng.choice(MODELS), l1=14, l2=10, policy=POLICIES[policy], seconds_per_request=25.0)
    prompts = stream(seed, requests=12)
    for round_ in range(6):
        for tokens in rng.sample(prompts, 6):
            world.serve(tokens, fault=some_fail(rng) if round_ % 2 else no_fault)
        live = world.open(prompts[0])
        world.load_whole(live)
        world.compute(live, pages=2, snapshot=True)
        for _ in range(rng.randrange(8)):
            world.run(rng.randrange(100))
        survives = dict(world.executor.l3)
        world.restart()
        assert world.executor.l3 == survives
        for tokens in prompts:
            usable = usable_from_l3(world, tokens[: (len(tokens) - 1) // PAGE * PAGE])
            live = world.open(tokens)
            world.prefetch(live)
            world.run_all()
            world.load_whole(live)
            assert live.record.loaded_pages >= min(usable, 4)  # half of L2 for a prefetch
            world.check()
            world.release(live)
            world.restart()
        no_state_without_attention(world)


def some_fail(rng: random.Random) -> Fault:
    bits = rng.getrandbits(16) & rng.getrandbits(16)

    def fault(job: Job, item: int) -> Outcome | None:
        return Outcome.IO_ERROR if bits >> (item + job.job_id) % 16 & 1 else None

    return fault


def no_state_without_attention(world: World) -> None:
    """A state is in L3 only where the attention of its page is, or was put with it and failed on the way."""
    full = world.directory.index.rule.full_mask
    if world.is_l3_whole and full:
        for key, _ in in_l3(world):
            assert all((key, group) in in_l3(world) for group in range(len(world.spec.groups)) if full >> group & 1)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_crash_loses_what_is_only_in_l1_and_l2(policy: str) -> None:
    world = World(HYBRID, l1=16, l2=16, policy=POLICIES[policy], prefetch_l2_share=1.0)
    world.serve(prompt(4))
    world.serve(prompt(4))
    world.serve(prompt(3, seed=1))
    world.restart()
    expected = {
        "write_through": [4, 3],
        "write_through_selective": [4, 0],
        "write_back": [0, 0],
    }[policy]
    assert [usable_from_l3(world, prompt(4)), usable_from_l3(world, prompt(3, seed=1))] == expected
    restored = [world.serve(tokens).record.by_source["l3"] // PAGE for tokens in (prompt(4), prompt(3, seed=1))]
    assert restored == expected
    world.wind_up()


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("l3_fault", [Outcome.NO_SPACE, Outcome.REFUSED, Outcome.UNAVAILABLE])
def test_an_eviction_storm_with_an_l3_that_takes_nothing_stops_nobody(policy: str, l3_fault: Outcome) -> None:
    def fault(job: Job, item: int) -> Outcome | None:
        return l3_fault if isinstance(job, StoreJob) else None

    world = World(HYBRID, l1=12, l2=12, policy=POLICIES[policy])
    for number in range(40):
        live = world.serve(prompt(5, seed=number), fault=fault)
        assert live.computed == 5 * PAGE
        world.check()
    assert in_l3(world) == set()
    lost = world.directory.stats.tokens_lost
    assert lost["l2.attn" if policy == "write_back" else "l1.attn"] > 0 or policy == "write_through"
    world.wind_up()


def test_write_back_tries_again_when_l3_takes_again() -> None:
    world = World((FULL,), l1=8, l2=8, policy=lambda: WriteBack(ahead_share=0.25), seconds_per_request=0.25)
    refuses = {"store"}

    def fault(job: Job, item: int) -> Outcome | None:
        return Outcome.NO_SPACE if refuses and isinstance(job, StoreJob) else None

    for number in range(20):
        world.serve(prompt(3, seed=number), fault=fault)
    refused = world.directory.stats.objects["store.no_space"]
    assert 0 < refused < 20 * 3  # not at every step
    refuses.clear()
    for number in range(20, 40):
        world.serve(prompt(3, seed=number), fault=fault)
    assert len(in_l3(world)) > 20
    world.wind_up()
