"""An engine that owns its slots, on real bytes: what it saves comes back, whatever it has itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hicache.errors import ConfigError, UsageError
from hicache.spec import Group
from tests.core.memory_l3 import Objects
from tests.core.slot_engine import SlotEngine, assert_nothing_leaked
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, STATE, WINDOW, prompt

Make = Callable[..., SlotEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[SlotEngine] = []

    def engine(*arguments: object, **settings: object) -> SlotEngine:
        engines.append(SlotEngine(*arguments, **settings))  # type: ignore[arg-type]
        return engines[-1]

    yield engine
    for made in engines:
        made.close()


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, WINDOW), (ATTENTION, STATE), HYBRID, (WINDOW, STATE)])
def test_what_was_saved_is_restored_from_l2_and_from_l3(groups: tuple[Group, ...], make: Make) -> None:
    objects: Objects = {}
    engine = make(groups, objects=objects)
    assert engine.restore(prompt(6)) == 0
    engine.store(prompt(6))
    assert engine.restore(prompt(6)) == 6 * PAGE
    assert_nothing_leaked(engine)
    other = make(groups, objects=objects)
    assert other.restore(prompt(6)) == 6 * PAGE
    assert_nothing_leaked(other)
    stats = other.cache.stats
    assert stats.tokens_by_source["l3"] == 6 * PAGE
    assert stats.prefetch_found == stats.prefetch_used == 6 * PAGE


@pytest.mark.parametrize("groups", [(ATTENTION,), (ATTENTION, WINDOW), (ATTENTION, STATE), HYBRID, (WINDOW, STATE)])
@pytest.mark.parametrize("own", [1, 3, 5])
def test_what_the_engine_has_itself_is_neither_fetched_nor_loaded(
    groups: tuple[Group, ...], own: int, make: Make
) -> None:
    objects: Objects = {}
    make(groups, objects=objects).store(prompt(6))
    engine = make(groups, objects=objects)
    assert engine.restore(prompt(6), own=own) == 6 * PAGE
    stats = engine.cache.stats
    needed = sum(6 - max(own, 6 - (reach or 6)) for reach in engine.spec.reach_pages)
    assert stats.objects["load.ok"] == needed
    assert stats.objects["fetch.ok"] <= needed + len(groups)  # and those of an earlier stop
    assert stats.tokens_by_source == {"l1": own * PAGE, "l2": 0, "l3": (6 - own) * PAGE, "computed": 1}
    assert_nothing_leaked(engine)


def test_other_salts_and_extras_find_nothing(make: Make) -> None:
    engine = make(objects={})
    engine.store(prompt(4), salt=b"a", extras={"lora": 1})
    assert engine.restore(prompt(4), salt=b"b", extras={"lora": 1}) == 0
    assert engine.restore(prompt(4), salt=b"a", extras={"lora": 2}) == 0
    assert engine.restore(prompt(4)) == 0
    assert engine.restore(prompt(4), salt=b"a", extras={"lora": 1}) == 4 * PAGE


def test_what_is_below_already_is_not_copied_again(make: Make) -> None:
    objects: Objects = {}
    engine = make(objects=objects)
    engine.store(prompt(4))
    copies = engine.cache.stats.objects["backup.ok"]
    engine.store(prompt(4))
    assert engine.cache.stats.objects["backup.ok"] == copies
    assert_nothing_leaked(engine)  # evicts all of L2
    request = engine.open(prompt(4))
    engine.cache.prefetch(request, beyond=4 * PAGE)  # the engine has all of it: L3 is asked what it has
    engine.settle()
    table = engine.needed(engine.table(0, 4, states=[3]), 0, 4)
    engine.compute(prompt(4), table)
    assert engine.cache.save(request, table).done
    engine.cache.release(request)
    assert engine.cache.stats.objects["backup.ok"] == copies


def test_a_policy_that_writes_back_is_refused_with_those_that_do(make: Make) -> None:
    with pytest.raises(ConfigError, match="write_through_selective"):
        make(write_policy="write_back")


def test_slots_that_are_missing_taken_or_none_are_refused(make: Make) -> None:
    engine = make((ATTENTION,))
    engine.store(prompt(3))
    request = engine.open(prompt(3))
    assert engine.cache.usable(request, beyond=0) == 3 * PAGE
    for slots, reason in (
        ({0: {0: 1, 1: 2}}, "no slot is named for page 2"),
        ({0: {0: 1, 1: 2, 2: 2}}, "named for two pages"),
        ({0: {0: 1, 1: 2, 2: 64}}, "slots 0 to 63"),
        ({1: {0: 1}}, "1 groups"),
    ):
        with pytest.raises(UsageError, match=reason):
            engine.cache.load(request, beyond=0, tokens=3 * PAGE, slots=slots)
    with pytest.raises(UsageError, match="whole pages"):
        engine.cache.load(request, beyond=0, tokens=3 * PAGE - 1, slots={0: {0: 1, 1: 2, 2: 3}})
    assert not engine.load(request, own=0, tokens=3 * PAGE, table={0: {0: 1, 1: 2, 2: 3}}).failed
    engine.cache.release(request)
    with pytest.raises(UsageError, match="released"):
        engine.cache.release(request)
    assert_nothing_leaked(engine)
