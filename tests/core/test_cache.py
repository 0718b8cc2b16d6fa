"""The facade with real pools and a real executor: the life of a request, tenants, and misuse."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from hicache.cache import HiCache
from hicache.errors import ConfigError, StateNotCommitted, UsageError
from hicache.policies.prefetch import PrefetchPolicy
from hicache.sequence import Hit
from hicache.spec import CacheSpec, Group
from tests.core.memory_l3 import Objects
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, STATE, WINDOW, Make, by_source, prompt


@pytest.mark.parametrize(
    "groups",
    [(ATTENTION,), (ATTENTION, WINDOW), (ATTENTION, STATE), HYBRID, (STATE,)],
    ids=lambda groups: "+".join(group.name for group in groups),
)
def test_a_prefix_is_computed_once_and_comes_from_l1_then_l2_then_l3(groups: tuple[Group, ...], make: Make) -> None:
    objects: Objects = {}
    first = make(*groups, l1=8, objects=objects)
    assert first.serve(prompt(5)).by_source == by_source(computed=5 * PAGE + 1)
    first.settle()
    assert first.serve(prompt(5)).by_source == by_source(l1=5 * PAGE)
    for seed in range(1, 5):
        first.serve(prompt(5, seed=seed), snapshot=True)
        first.settle()
    assert first.serve(prompt(5)).by_source == by_source(l2=5 * PAGE)
    first.settle()
    first.close()
    second = make(*groups, objects=objects)
    assert second.serve(prompt(5)).by_source == by_source(l3=5 * PAGE)
    second.settle()
    assert second.cache.stats.prefetch_used == 5 * PAGE
    assert second.cache.stats.prefetch_in_flight == 0


def test_without_l2_and_l3_there_is_l1(make: Make) -> None:
    engine = make(l2=0)
    engine.serve(prompt(3))
    assert engine.serve(prompt(3)).by_source == by_source(l1=3 * PAGE)
    assert engine.cache.stats.prefetch_declined == {"no_l3": 2}
    engine.settle()


def test_match_tells_what_is_here_before_anything_is_loaded(make: Make) -> None:
    engine = make(objects={})
    request = engine.cache.match(prompt(3))
    assert request.hit == Hit(0, 0)
    engine.cache.release(request)
    engine.serve(prompt(3))
    request = engine.cache.match(np.array(prompt(5), dtype=np.int32))
    assert request.hit == Hit(3 * PAGE, 0)
    assert request.token_count == 5 * PAGE + 1
    engine.cache.release(request)


def test_a_conversation_goes_on_with_what_was_decoded(make: Make) -> None:
    engine = make(objects={})
    turn = prompt(2)
    request = engine.cache.match(turn)
    restored = engine.cache.load(request)
    assert restored is not None
    engine.compute(request, turn, 0)
    answer = [7, 8, 9, 10, 11, 12, 13, 14]
    for token in answer:  # one at a time, as decoding does
        engine.cache.append(request, [token])
    whole = turn + answer
    engine.compute(request, whole, 2 * PAGE)
    assert request.token_count == len(whole)
    engine.cache.release(request)
    follow_up = [*whole, 15, 16, 17]
    assert engine.serve(follow_up).by_source == by_source(l1=4 * PAGE, computed=4)


def test_a_branch_starts_from_the_snapshot_of_the_last_common_page(make: Make) -> None:
    engine = make(objects={})
    engine.serve(prompt(4))
    branch = prompt(4)[: 2 * PAGE + 1] + [99] * 6
    assert engine.serve(branch).tokens == 2 * PAGE
    assert engine.serve(prompt(4)).tokens == 4 * PAGE


def test_decoding_may_extend_beyond_the_prompt(make: Make) -> None:
    engine = make(l1=4)
    request = engine.cache.match(prompt(1))
    assert engine.cache.load(request) is not None
    assert engine.cache.extend(request, tokens=4 * PAGE)
    assert not engine.cache.extend(request, tokens=4 * PAGE + 1)
    assert [len(request.page_table(group)) for group in range(2)] == [4, 4]
    engine.cache.release(request)


def test_transient_fields_reach_neither_l2_nor_l3(make: Make) -> None:
    objects: Objects = {}
    engine = make(STATE, objects=objects)
    engine.serve(prompt(2))
    engine.settle()
    kept = sum(2 * 4 * size for size in (6, 5))
    assert [len(payload) for _, payload in objects.values()] == [kept, kept]
    other = make(STATE, objects=objects)
    assert other.serve(prompt(2)).tokens == 2 * PAGE  # which checks that the ring is empty


def test_br_017_salts_keep_tenants_apart_in_every_tier(make: Make) -> None:
    objects: Objects = {}
    engine = make(l1=8, objects=objects)
    salts = (b"a", b"b", b"", None)
    for salt in salts:
        assert engine.serve(prompt(4), salt=salt).tokens == 0
        engine.settle()
    assert engine.serve(prompt(4), salt=b"a").by_source == by_source(l2=4 * PAGE)  # the positive control
    engine.settle()
    keys = len(objects)
    other = make(objects=objects)
    assert [other.serve(prompt(4), salt=salt).by_source["l3"] for salt in salts] == [4 * PAGE] * 4
    assert other.serve(prompt(4), salt=b"c").tokens == 0
    other.settle()
    assert len(objects) == keys // 4 * 5  # every tenant has objects of its own


def test_the_salt_of_the_cache_counts_unless_the_request_brings_one(make: Make) -> None:
    objects: Objects = {}
    salted = make(objects=objects, salt=b"a")
    salted.serve(prompt(4))
    assert salted.serve(prompt(4), salt=b"b").tokens == 0
    assert salted.serve(prompt(4), salt=b"a").tokens == 4 * PAGE
    salted.settle()
    assert make(objects=objects).serve(prompt(4)).tokens == 0
    assert make(objects=objects).serve(prompt(4), salt=b"a").tokens == 4 * PAGE


def test_extras_are_part_of_what_a_prompt_is(make: Make) -> None:
    engine = make(objects={})
    engine.serve(prompt(4), extras={"lora": "x"})
    assert engine.serve(prompt(4)).tokens == 0
    assert engine.serve(prompt(4), extras={"lora": "y"}).tokens == 0
    assert engine.serve(prompt(4), extras={"lora": "x"}).tokens == 4 * PAGE


@pytest.mark.parametrize("tokens", [[1.5], "abc", [[1]], None, [True]], ids=repr)
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(tokens: object, make: Make) -> None:
    engine = make(objects={})
    with pytest.raises(UsageError, match="token ids"):
        engine.cache.match(tokens)  # type: ignore[arg-type]
    request = engine.cache.match([1, 2, 3])
    with pytest.raises(UsageError, match="token ids"):
        engine.cache.append(request, tokens)  # type: ignore[arg-type]
    assert request.token_count == 3
    engine.cache.release(request)


def test_calls_out_of_order_are_refused_and_change_nothing(make: Make) -> None:
    engine = make(objects={})
    cache = engine.cache
    request = cache.match(prompt(2))
    with pytest.raises(UsageError, match="not loaded"):
        cache.extend(request, tokens=4)
    with pytest.raises(UsageError, match="not loaded"):
        cache.store(request, computed=0)
    with pytest.raises(UsageError, match="group 2 has no live state"):
        request.state_slot(2)
    assert cache.load(request) is not None
    with pytest.raises(UsageError, match="group 0 has no live state"):
        request.state_slot(0)
    with pytest.raises(UsageError, match="computed = 8: the request has tokens and pages for 0 to 0"):
        cache.store(request, computed=8)
    assert cache.load(request) is not None  # a second time it is the same
    cache.release(request)
    for misuse in (
        lambda: cache.release(request),
        lambda: cache.load(request),
        lambda: cache.prefetch(request),
        lambda: cache.extend(request, tokens=4),
        lambda: cache.store(request, computed=0),
    ):
        with pytest.raises(UsageError, match="released"):
            misuse()
    assert engine.serve(prompt(2)).tokens == 0


@pytest.mark.parametrize(
    ("computed", "state_at", "pending"), [(2 * PAGE, 2 * PAGE, 1), (2 * PAGE, PAGE, 0), (2 * PAGE + 1, 2 * PAGE + 1, 0)]
)
def test_a_state_that_is_not_committed_is_not_snapshotted(
    computed: int, state_at: int, pending: int, make: Make
) -> None:
    engine = make(objects={})
    request = engine.cache.match(prompt(2))
    assert engine.cache.load(request) is not None
    assert engine.cache.extend(request, tokens=computed)
    with pytest.raises(StateNotCommitted):
        engine.cache.store(request, computed=computed, state_at=state_at, state_pending=pending)
    engine.settle()
    assert engine.cache.match(prompt(2)).hit == Hit(0, 0)
    engine.cache.release(request)


def test_the_caller_is_told_when_l1_has_no_room(make: Make) -> None:
    engine = make(ATTENTION, STATE, l1=3)
    held = [engine.cache.match(prompt(1, seed=seed)) for seed in range(4)]
    assert [engine.cache.load(request) is not None for request in held] == [True, True, True, False]
    engine.cache.release(held[0])
    assert engine.cache.load(held[3]) is not None
    for request in held[1:]:
        engine.cache.release(request)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"l3": "unix:///nowhere", "l2_bytes": 0}, "l2_bytes = 0: expected more than 0"),
        ({"l1_state_slots": 0}, "l1_state_slots = 0"),
        ({"l3": "http://x", "l2_bytes": 1 << 24}, "l3 = 'http://x': expected unix://"),
        ({"l2_bytes": 4096}, "l2_bytes = 4096: expected at least"),
        ({"l1_pages": 0}, "l1_pages = 0"),
    ],
)
def test_settings_that_contradict_each_other_stop_the_start(settings: dict[str, object], named: str) -> None:
    spec = CacheSpec("m", "r", HYBRID, page_tokens=PAGE)
    with pytest.raises(ConfigError, match=named):
        HiCache.open(spec, **({"l1_pages": 4, "l1_state_slots": 4} | settings))  # type: ignore[arg-type]


def test_an_engine_that_is_interrupted_in_a_load_goes_on_and_leaves_nothing_behind(make: Make) -> None:
    engine = make(objects={})
    engine.serve(prompt(4))
    engine.settle()
    copies = engine.cache._replica.executor._copies
    restore = copies.restore

    def interrupt(group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise KeyboardInterrupt

    request = engine.cache.match(prompt(4))
    copies.restore = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.cache.load(request)
    copies.restore = restore  # type: ignore[method-assign]
    engine.cache.release(request)
    engine.settle()
    assert engine.serve(prompt(4)).by_source == by_source(l1=4 * PAGE)


def test_pages_that_are_being_written_down_are_waited_for(make: Make) -> None:
    engine = make(l1=4)
    copies = engine.cache._replica.executor._copies
    may_copy = threading.Event()
    backup = copies.backup

    def held_up(group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert may_copy.wait(20)
        backup(group, sources, targets)

    copies.backup = held_up  # type: ignore[method-assign]
    engine.serve(prompt(4))
    request = engine.cache.match(prompt(3, seed=1))
    assert engine.cache.load(request) is not None
    assert not engine.cache.extend(request, tokens=3 * PAGE)
    threading.Timer(0.05, may_copy.set).start()
    assert engine.cache.extend(request, tokens=3 * PAGE, timeout_s=20)
    engine.cache.release(request)


def test_the_wait_for_room_ends(make: Make) -> None:
    engine = make(l1=2)
    running = engine.cache.match(prompt(2))
    assert engine.cache.load(running) is not None
    assert engine.cache.extend(running, tokens=2 * PAGE)
    another = engine.cache.match(prompt(2, seed=1))
    assert engine.cache.load(another, timeout_s=0.01) is not None
    assert not engine.cache.extend(another, tokens=PAGE, timeout_s=0.01)


def test_a_request_of_another_cache_is_refused_and_nobody_is_disturbed(make: Make) -> None:
    owner, other = make(), make()
    request, bystander = owner.cache.match(prompt(2)), other.cache.match(prompt(2, seed=1))
    for engine, mine in ((owner, request), (other, bystander)):
        assert engine.cache.load(mine) is not None
        assert engine.cache.extend(mine, tokens=2 * PAGE)
    table = bystander.page_table(0)
    for call in (
        lambda: other.cache.prefetch(request),
        lambda: other.cache.wait(request),
        lambda: other.cache.load(request),
        lambda: other.cache.extend(request, tokens=2 * PAGE),
        lambda: other.cache.append(request, [1]),
        lambda: other.cache.store(request, computed=2 * PAGE),
        lambda: other.cache.release(request),
    ):
        with pytest.raises(UsageError, match="another HiCache"):
            call()
    assert request.token_count == 2 * PAGE + 1
    assert bystander.page_table(0) == table
    owner.cache.release(request)
    other.cache.release(bystander)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("l1_pages", 1.5),
        ("l1_pages", "3"),
        ("l1_pages", None),
        ("l1_pages", True),
        ("l1_state_slots", -1),
        ("l2_bytes", 1.5e6),
        ("l3", 5),
        ("token", b"x"),
        ("salt", "x"),
        ("device", "nowhere"),
        ("l2_state_share", "half"),
        ("l3_capacity_bytes", "1G"),
        ("prefetch", "timeout"),
        ("prefetch", PrefetchPolicy),
        ("snapshot_policy", "every_page"),
        ("snapshot_policy", {"ends": True}),
        ("double_buffering", "yes"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(setting: str, value: object) -> None:
    settings: dict[str, object] = {"l1_pages": 4, "l1_state_slots": 4, setting: value}
    spec = CacheSpec("m", "r", HYBRID, page_tokens=PAGE)
    with pytest.raises(ConfigError, match=setting):
        HiCache.open(spec, **settings)  # type: ignore[arg-type]
