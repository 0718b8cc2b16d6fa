"""Residents against a model in plain Python, and what the model cannot see: growth and ties."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache.backends import key_index, key_table, residents, victims
from hicache.backends.base import StoredBatch
from hicache.backends.key_rows import KeyHash, PackedKeys
from hicache.backends.key_table import NO_SLOT, Slots
from hicache.backends.residents import TICK_S, Residents
from hicache.backends.tenant_usage import TenantUsage
from hicache.tenancy import TENANT_BYTES

TENANTS = (b"a" * TENANT_BYTES, b"b" * TENANT_BYTES, b"c" * TENANT_BYTES)
T0_S = 1.75e9


def stored_bytes(size_bytes: int) -> int:
    return -(-size_bytes // 8) * 8


def keep_none(key: bytes) -> bool:
    return False


def long_and_short_keys() -> list[bytes]:
    """Of all tenants, of lengths at the borders, with bytes that padding could be taken for."""
    suffixes = [b"\0", b"\0\0", b"x", b"x\0", b"y" * 36, b"z" * 46, b"z" * 47, b"z" * 48, b"q" * 112]
    return [tenant + suffix for tenant in TENANTS for suffix in suffixes] + [b"\0", b"s", b"\0\0"]


KEYS = long_and_short_keys()
SOME_KEYS = st.lists(st.sampled_from(KEYS), max_size=30)


@dataclass(slots=True)
class ModelObject:
    size_bytes: int
    used_at_s: float
    is_aside: bool = False


@dataclass(slots=True)
class ModelHold:
    keys: list[bytes]
    real: Slots


class ResidentsMachine(RuleBasedStateMachine):
    """The model is a dict whose objects are sorted whenever victims are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[bytes, ModelObject] = {}
        self.now_s = T0_S
        self.newest_s = -math.inf
        self.touched: set[bytes] = set()
        self.holds: list[ModelHold] = []
        self.held_sizes: dict[bytes, int] = {}  # the last that each held key had

    def is_held(self, key: bytes) -> bool:
        return any(key in hold.keys for hold in self.holds)

    @initialize(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def start(self, keys: list[bytes]) -> None:
        """The first key was used in the future, which counts as now."""
        times_s = [T0_S + 99, *(T0_S - number for number in range(1, len(keys)))]
        stored = list(zip(keys, range(1, len(keys) + 1), times_s, strict=False))
        parts = [StoredBatch.of(stored[::-2]), StoredBatch.of(stored[-2::-2])]
        self.real = Residents(parts, stored_bytes=stored_bytes, now_s=T0_S)
        self.model = {name: ModelObject(size_bytes, min(used_at_s, T0_S)) for name, size_bytes, used_at_s in stored}
        self.newest_s = max((found.used_at_s for found in self.model.values()), default=-math.inf)

    def use_now(self) -> float:
        self.newest_s = max(self.newest_s + TICK_S, math.floor(self.now_s / TICK_S) * TICK_S)
        return self.newest_s

    @rule(step_s=st.sampled_from([-5.0, 0.0, 0.25, 3.0]))
    def pass_time(self, step_s: float) -> None:
        self.now_s += step_s

    @rule(key=st.sampled_from(KEYS), size_bytes=st.integers(1, 100))
    def add(self, key: bytes, size_bytes: int) -> None:
        self.real.add(key, size_bytes, now_s=self.now_s)
        self.model[key] = ModelObject(size_bytes, self.use_now())
        self.touched.discard(key)
        if self.is_held(key):
            self.held_sizes[key] = size_bytes

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=24), size_bytes=st.integers(1, 100))
    def add_many(self, keys: list[bytes], size_bytes: int) -> None:
        self.real.add_many(keys, range(size_bytes, size_bytes + len(keys)), now_s=self.now_s)
        for place in reversed(range(len(keys))):
            self.model[keys[place]] = ModelObject(size_bytes + place, self.use_now())
            self.touched.discard(keys[place])
            if self.is_held(keys[place]):
                self.held_sizes[keys[place]] = size_bytes + place

    @rule(key=st.sampled_from(KEYS))
    def add_expired(self, key: bytes) -> None:
        self.discard(key)
        if any(found.used_at_s == -math.inf for found in self.model.values()):
            return  # which of two goes first is not promised
        self.real.add(key, 3, now_s=self.now_s, is_expired=True)
        self.model[key] = ModelObject(3, -math.inf)
        if self.is_held(key):
            self.held_sizes[key] = 3

    @rule(
        keys=SOME_KEYS,
        tenant=st.sampled_from([*TENANTS, b"\0"]),
        bytes_max=st.sampled_from([0, 100, 10_000]),
        tenant_bytes_max=st.sampled_from([0, 60, 10_000]),
    )
    def hold(self, keys: list[bytes], tenant: bytes, bytes_max: int, tenant_bytes_max: int) -> None:
        keys = [key for key in keys if key[:TENANT_BYTES] == tenant]
        is_full = False
        held: list[bytes] = []
        for key in dict.fromkeys(key for key in keys if key in self.model):
            if not self.is_held(key):
                size_bytes = self.model[key].size_bytes
                own = [size for other, size in self.held_sizes.items() if other[:TENANT_BYTES] == tenant]
                is_full |= sum(map(stored_bytes, (*self.held_sizes.values(), size_bytes))) > bytes_max
                is_full |= sum(map(stored_bytes, (*own, size_bytes))) > tenant_bytes_max
                if is_full:
                    continue
                self.held_sizes[key] = size_bytes
            held.append(key)
        real = self.real.hold(self.real.slots(keys), bytes_max=bytes_max, tenant_bytes_max=tenant_bytes_max)
        assert len(real) == len(held)
        self.holds.append(ModelHold(held, real))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.real.release(hold.real)
        free = [key for key in hold.keys if not self.is_held(key)]
        for key in free:
            del self.held_sizes[key]
        self._put_back(free)

    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: bytes) -> None:
        gone = self.model.pop(key, None)
        assert self.real.discard(key) == (gone.size_bytes if gone else None)
        self.touched.discard(key)

    @rule(keys=SOME_KEYS, age_s=st.sampled_from([math.inf, 0.0, 1.0]))
    def find(self, keys: list[bytes], age_s: float) -> None:
        since_s = self.now_s - age_s
        assert self.real.find(keys, used_since_s=since_s) == [self._is_since(key, since_s) for key in keys]

    def _is_since(self, key: bytes, since_s: float) -> bool:
        found = self.model.get(key)
        return found is not None and (found.is_aside or found.used_at_s >= since_s or self.is_held(key))

    @rule(keys=SOME_KEYS, age_s=st.sampled_from([math.inf, 0.0, 1.0]))
    def use(self, keys: list[bytes], age_s: float) -> None:
        since_s = self.now_s - age_s
        is_found = [self._is_since(key, since_s) for key in keys]
        assert (self.real.use(keys, now_s=self.now_s, used_since_s=since_s) != NO_SLOT).tolist() == is_found
        self._use([key for key, found in zip(keys, is_found, strict=True) if found])

    def _use(self, keys: list[bytes]) -> None:
        for number, key in enumerate(reversed(keys)):
            used_at_s = self.use_now() if number == 0 else self.newest_s + TICK_S
            self.newest_s = used_at_s
            self.model[key].used_at_s = used_at_s
            self.model[key].is_aside = False
            self.touched.add(key)

    @rule(keys=SOME_KEYS)
    def put_back(self, keys: list[bytes]) -> None:
        self.real.put_back(keys)
        self._put_back(keys)

    def _put_back(self, keys: list[bytes]) -> None:
        for key in reversed([key for key in keys if key in self.model and self.model[key].is_aside]):
            self.newest_s += TICK_S
            self.model[key].used_at_s = self.newest_s
            self.touched.add(key)
        for key in keys:
            if key in self.model:
                self.model[key].is_aside = False

    @rule(
        enough_bytes=st.sampled_from([0, 1, 100, 10_000]),
        count_max=st.sampled_from([0, 1, 5, 99]),
        kept=st.sets(st.sampled_from(KEYS)),
        tenant=st.sampled_from([None, *TENANTS, b"\0", b"nobody"]),
        age_s=st.sampled_from([-math.inf, 0.0, 1.0]),
    )
    def take_victims(
        self, enough_bytes: int, count_max: int, kept: set[bytes], tenant: bytes | None, age_s: float
    ) -> None:
        before_s = self.now_s - age_s
        expected: list[tuple[bytes, int]] = []
        freed_bytes = 0
        for key in sorted(self.model, key=lambda key: self.model[key].used_at_s):
            found = self.model[key]
            if freed_bytes >= enough_bytes or len(expected) >= count_max or found.used_at_s >= before_s:
                break
            if found.is_aside or (tenant is not None and key[:TENANT_BYTES] != tenant):
                continue
            if key in kept or self.is_held(key):
                found.is_aside = True
                continue
            expected.append((key, found.size_bytes))
            freed_bytes += stored_bytes(found.size_bytes)
        victims: list[tuple[bytes, int]] = []
        while (left_bytes := enough_bytes - sum(stored_bytes(size) for _, size in victims)) > 0:
            more = self.real.take_victims(
                left_bytes,
                count_max=count_max - len(victims),
                is_kept=kept.__contains__,
                tenant=tenant,
                used_before_s=before_s,
            )
            if more == []:
                break
            victims += more or []
        assert victims == expected
        for key, _ in expected:
            del self.model[key]
            self.touched.discard(key)

    @rule(count_max=st.integers(1, 40))
    def take_touched(self, count_max: int) -> None:
        taken: list[tuple[bytes, float]] = []
        start: int | None = 0
        while start is not None:
            some, start = self.real.take_touched(start, count_max=count_max)
            assert len(some) <= count_max
            taken += some
        assert {key for key, _ in taken} == self.touched
        assert all(self.model[key].is_aside or self.model[key].used_at_s == used_at_s for key, used_at_s in taken)
        self.touched.clear()

    @invariant()
    def usage_is_that_of_the_model(self) -> None:
        if not hasattr(self, "real"):
            return
        assert len(self.real) == len(self.model)
        assert self.real.held_count == len(self.held_sizes)
        assert {*self.real.tenants()} == {key[:TENANT_BYTES] for key in self.model}
        for tenant in (*TENANTS, b"\0"):
            sizes = [found.size_bytes for key, found in self.model.items() if key[:TENANT_BYTES] == tenant]
            usage = TenantUsage(sum(sizes), sum(map(stored_bytes, sizes)), len(sizes))
            assert self.real.tenant_usage(tenant) == usage
        assert [self.real.size_bytes(key) for key in KEYS] == [
            self.model[key].size_bytes if key in self.model else None for key in KEYS
        ]


@pytest.mark.parametrize("scale", ["tiny", "real"])
def test_residents_do_what_the_model_does(scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if scale == "tiny":  # so that a few keys take many scans, trims, queues, splits and the dict of what fits nowhere
        monkeypatch.setattr(victims, "SCAN_SLOTS", 4)
        monkeypatch.setattr(residents, "SCAN_SLOTS", 4)
        monkeypatch.setattr(victims, "QUEUE_MIN", 2)
        monkeypatch.setattr(residents, "EXAMINED_MAX", 3)
        monkeypatch.setattr(key_index, "ONE_BY_ONE_MAX", 2)
        monkeypatch.setattr(residents, "ONE_BY_ONE_MAX", 2)
        monkeypatch.setattr(key_table, "_FIRST_BUCKETS", 1)
        monkeypatch.setattr(key_table, "_SPLIT_BUCKETS", 1)
        monkeypatch.setattr(KeyHash, "of_row", lambda hasher, row: (row[0] % 2) << 60 | row[1] % 2)
        monkeypatch.setattr(
            KeyHash, "of_rows", lambda hasher, rows: np.array([hasher.of_row(row.tobytes()) for row in rows], np.uint64)
        )
    run_state_machine_as_test(
        ResidentsMachine,
        settings=settings(max_examples=40, stateful_step_count=40, deadline=None),
    )


def many(count: int) -> PackedKeys:
    raw = np.random.default_rng(count).integers(0, 256, size=(count, 36), dtype=np.uint8)
    return PackedKeys(raw.tobytes(), 36, prefix=TENANTS[0])


def test_many_objects_are_all_found_and_go_in_the_order_of_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims, "SCAN_SLOTS", 1000)
    monkeypatch.setattr(victims, "QUEUE_MIN", 100)
    keys = many(15_000)
    found = Residents(stored_bytes=stored_bytes)
    order = np.random.default_rng(1).permutation(len(keys))
    half = len(keys) // 2
    found.load(keys[:half], np.full(half, 8), order[:half].astype(float), now_s=T0_S)
    for key, at_s in zip(keys[half:], order[half:], strict=True):
        found.load([key], [8], [float(at_s)]) if at_s % 2 else found.add(key, 8, now_s=T0_S)
    assert all(found.find(keys))
    assert not any(found.find(many(15_001)))
    expected = sorted((int(at_s), place) for place, at_s in enumerate(order) if place < half or at_s % 2)
    gone: list[bytes] = []
    while len(gone) < len(expected):
        some = found.take_victims(2**62, count_max=len(expected) - len(gone), is_kept=lambda key: False)
        gone += [key for key, _ in some or ()]
    assert gone == [keys[place] for _, place in expected]
    assert found.tenant_usage(TENANTS[0]) == TenantUsage(*[8 * (len(keys) - len(gone))] * 2, len(keys) - len(gone))


def test_objects_that_were_all_used_at_the_same_time_go_once_each() -> None:
    keys = many(20_000)
    found = Residents(stored_bytes=stored_bytes)
    found.load(keys, np.ones(len(keys)), np.zeros(len(keys)))
    gone: list[bytes] = []
    while (victims := found.take_victims(2**62, count_max=500, is_kept=lambda key: False)) != []:
        gone += [key for key, _ in victims or ()]
    assert sorted(gone) == sorted(keys)
    assert len(found) == 0


@pytest.mark.parametrize("used_at_s", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_makes_an_object_the_oldest(used_at_s: float) -> None:
    stored = StoredBatch.of([(KEYS[0], 1, T0_S), (KEYS[1], 1, used_at_s)])
    found = Residents([stored], stored_bytes=stored_bytes)
    victims = None
    while victims is None:
        victims = found.take_victims(1, count_max=1, is_kept=lambda key: False)
    assert victims == [(KEYS[1], 1)]


def test_a_key_that_is_told_twice_at_the_start_counts_once() -> None:
    stored = StoredBatch.of([(KEYS[0], 5, 1.0), (KEYS[1], 6, 2.0), (KEYS[0], 7, 3.0)])
    found = Residents([stored], stored_bytes=stored_bytes)
    assert (len(found), found.size_bytes(KEYS[0])) == (2, 5)


def test_keys_that_no_backend_stores_are_absent_and_cannot_be_added() -> None:
    found = Residents(stored_bytes=stored_bytes)
    wrong = [b"", b"x" * 129]
    assert found.find(wrong) == [False, False]
    assert found.find(wrong * 20 + KEYS) == [False] * (40 + len(KEYS))
    assert [found.discard(key) for key in wrong] == [None, None]
    for key in wrong:
        with pytest.raises(ValueError, match="1 to 128 bytes"):
            found.add(key, 1, now_s=T0_S)


def test_one_call_looks_at_a_bounded_part_and_says_when_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims, "SCAN_SLOTS", 100)
    found = Residents(stored_bytes=stored_bytes)
    found.load(many(1050), np.ones(1050), np.arange(1050.0))

    def ask() -> list[tuple[bytes, int]] | None:
        return found.take_victims(2**62, count_max=3, is_kept=lambda key: False)

    assert [ask() for _ in range(10)] == [None] * 10
    assert ask() == [(key, 1) for key in many(1050)[:3]]
