"""What every backend promises of its capacity: when there is no room, and when there is more or less than before."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hicache.backends.base import Backend
from hicache.outcome import Outcome
from tests.backends.payloads import get, get_many, key, payload, put

MIB = 1 << 20
Opener = Callable[..., Backend]


class FullContract:
    """Part of ``BackendContract``. ``reopen(capacity_bytes)`` opens the store anew."""

    def test_a_full_store_refuses_deletes_and_stores_again(self, reopen: Opener) -> None:
        backend = reopen(2 * MIB)
        stored = []
        for number in range(100):
            outcome = put(backend, (key(number), payload(number, 100_000)))[0]
            if outcome is Outcome.NO_SPACE:
                break
            stored.append(number)
        assert 8 <= len(stored) < 100
        assert backend.contains([key(len(stored))]) == [False]
        usage = backend.usage()
        assert usage.stored_bytes <= usage.capacity_bytes
        assert backend.delete([key(number) for number in stored[:4]]) == [Outcome.OK] * 4
        assert put(backend, (key(200), payload(200, 100_000))) == [Outcome.OK]
        assert get(backend, key(200), 100_000) == (Outcome.OK, payload(200, 100_000))
        for number in stored[4:]:
            assert get(backend, key(number), 100_000) == (Outcome.OK, payload(number, 100_000))

    def test_one_item_without_space_does_not_spoil_the_others(self, reopen: Opener) -> None:
        backend = reopen(MIB)
        outcomes = put(backend, (key(1), b"a" * 100), (key(2), bytes(2 * MIB)), (key(3), b"c" * 100))
        assert outcomes == [Outcome.OK, Outcome.NO_SPACE, Outcome.OK]
        assert backend.contains([key(1), key(2), key(3)]) == [True, False, True]

    def test_a_smaller_capacity_keeps_what_is_there_and_takes_no_more(self, reopen: Opener) -> None:
        objects = [(key(number), payload(number, 100_000)) for number in range(20)]
        put(reopen(4 * MIB), *objects)
        backend = reopen(MIB)
        assert get_many(backend, [(name, 100_000) for name, _ in objects]) == [
            (Outcome.OK, content) for _, content in objects
        ]
        assert put(backend, (key(99), b"x")) == [Outcome.NO_SPACE]
        backend.delete([name for name, _ in objects])
        assert put(backend, (key(99), b"x")) == [Outcome.OK]

    def test_a_much_smaller_capacity_works_once_enough_is_deleted(self, reopen: Opener) -> None:
        names = [key(number) for number in range(40)]
        content = payload(1, MIB)
        assert set(put(reopen(48 * MIB), *[(name, content) for name in names])) == {Outcome.OK}
        for _ in range(2):
            backend = reopen(2 * MIB)
            assert get(backend, names[-1], MIB) == (Outcome.OK, content)
        backend.delete(names)
        assert put(backend, (key(99), content)) == [Outcome.OK]
        assert get(backend, key(99), MIB) == (Outcome.OK, content)

    def test_a_larger_capacity_takes_more(self, reopen: Opener) -> None:
        backend = reopen(MIB)
        assert put(backend, (key(1), payload(1, 3 * MIB))) == [Outcome.NO_SPACE]
        backend = reopen(8 * MIB)
        assert put(backend, (key(1), payload(1, 3 * MIB))) == [Outcome.OK]
        assert get(backend, key(1), 3 * MIB) == (Outcome.OK, payload(1, 3 * MIB))

    def test_churn_at_the_brim_neither_leaks_nor_wedges(self, reopen: Opener) -> None:
        backend = reopen(6 * MIB)
        random = Random(11)
        present: dict[int, int] = {}
        for number in range(600):
            size = random.choice([1000, 70_000, 300_000, MIB])
            while put(backend, (key(number), payload(number, size))) == [Outcome.NO_SPACE]:
                victim = random.choice(list(present))
                del present[victim]
                assert backend.delete([key(victim)]) == [Outcome.OK]
            present[number] = size
        usage = backend.usage()
        assert usage.objects == len(present)
        assert usage.stored_bytes == sum(map(backend.stored_bytes, present.values()))
        for number, size in present.items():
            assert get(backend, key(number), size) == (Outcome.OK, payload(number, size))
