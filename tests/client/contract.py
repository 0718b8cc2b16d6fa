"""What every L3 does, whatever serves it. Each implementation inherits this class and gives the two fixtures."""

from __future__ import annotations

import threading
import time

import pytest

from hicache.l3 import L3, L3Item
from hicache.outcome import Outcome
from tests.client.memory import SmallMemory
from tests.client.support import Answer, get, key, payload, put

SIZE = 5000
MEMORY_BYTES = 12 << 20


class L3Contract:
    """Fixtures to give: ``contract_memory`` (MEMORY_BYTES), ``l3`` on it, and ``other_l3``, a second client."""

    @pytest.fixture
    def contract_memory(self) -> SmallMemory:
        raise NotImplementedError

    @pytest.fixture
    def l3(self, contract_memory: SmallMemory) -> L3:
        raise NotImplementedError

    def test_what_was_put_is_found_and_comes_back_byte_for_byte(self, l3: L3, contract_memory: SmallMemory) -> None:
        items = [L3Item(key(number), number * SIZE, SIZE) for number in range(20)]
        for number, item in enumerate(items):
            contract_memory.buffer[item.offset : item.offset + SIZE] = payload(number, SIZE)
        assert l3.lookup([item.key for item in items], timeout_s=10) == [Outcome.ABSENT] * 20
        assert put(l3, items) == [Outcome.OK] * 20
        assert l3.lookup([item.key for item in items], timeout_s=10) == [Outcome.OK] * 20
        targets = [L3Item(item.key, MEMORY_BYTES - (number + 1) * SIZE, SIZE) for number, item in enumerate(items)]
        assert get(l3, targets) == [Outcome.OK] * 20
        for number, target in enumerate(targets):
            assert contract_memory.buffer[target.offset : target.offset + SIZE] == payload(number, SIZE)

    def test_an_absent_object_is_absent_and_does_not_hold_the_others(
        self, l3: L3, contract_memory: SmallMemory
    ) -> None:
        contract_memory.buffer[:SIZE] = payload(1, SIZE)
        assert put(l3, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
        items = [L3Item(key(2), 2 * SIZE, SIZE), L3Item(key(1), SIZE, SIZE), L3Item(key(3), 3 * SIZE, SIZE)]
        assert get(l3, items) == [Outcome.ABSENT, Outcome.OK, Outcome.ABSENT]
        assert contract_memory.buffer[SIZE : 2 * SIZE] == payload(1, SIZE)

    def test_a_second_put_says_exists_and_the_first_bytes_stay(self, l3: L3, contract_memory: SmallMemory) -> None:
        contract_memory.buffer[:SIZE] = payload(1, SIZE)
        assert put(l3, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
        contract_memory.buffer[:SIZE] = payload(2, SIZE)
        assert put(l3, [L3Item(key(1), 0, SIZE)]) == [Outcome.EXISTS]
        assert get(l3, [L3Item(key(1), SIZE, SIZE)]) == [Outcome.OK]
        assert contract_memory.buffer[SIZE : 2 * SIZE] == payload(1, SIZE)

    def test_an_object_of_another_size_is_not_read(self, l3: L3) -> None:
        assert put(l3, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
        assert get(l3, [L3Item(key(1), 0, SIZE - 1)]) == [Outcome.SIZE_MISMATCH]

    def test_a_range_outside_of_the_memory_is_refused_for_that_item_alone(self, l3: L3) -> None:
        items = [
            L3Item(key(1), MEMORY_BYTES - SIZE + 1, SIZE),
            L3Item(key(2), 0, SIZE),
            L3Item(key(3), -1, SIZE),
            L3Item(key(4), 0, 0),
        ]
        outcomes = [Outcome.BAD_RANGE, Outcome.OK, Outcome.BAD_RANGE, Outcome.BAD_RANGE]
        assert put(l3, items) == outcomes
        assert get(l3, items) == outcomes

    def test_nothing_to_do_is_done_at_once(self, l3: L3) -> None:
        assert l3.lookup([], timeout_s=10) == []
        assert put(l3, []) == []
        assert get(l3, []) == []

    @pytest.mark.parametrize("size_bytes", [1, 4095, 4096, (1 << 20) - 1, 1 << 20, (4 << 20) - 1, (4 << 20) + 1])
    def test_objects_of_every_size_come_back(self, l3: L3, contract_memory: SmallMemory, size_bytes: int) -> None:
        contract_memory.buffer[:size_bytes] = payload(1, size_bytes)
        assert put(l3, [L3Item(key(1), 0, size_bytes)]) == [Outcome.OK]
        assert get(l3, [L3Item(key(1), 5 << 20, size_bytes)]) == [Outcome.OK]
        assert contract_memory.buffer[5 << 20 : (5 << 20) + size_bytes] == payload(1, size_bytes)

    def test_ten_thousand_keys_are_one_lookup(self, l3: L3) -> None:
        assert put(l3, [L3Item(key(9_999), 0, SIZE)]) == [Outcome.OK]
        outcomes = l3.lookup([key(number) for number in range(10_000)], timeout_s=10)
        assert outcomes == [Outcome.ABSENT] * 9_999 + [Outcome.OK]

    def test_an_object_that_another_client_stored_is_seen_by_the_next_lookup(self, l3: L3, other_l3: L3) -> None:
        assert l3.lookup([key(1)], timeout_s=10) == [Outcome.ABSENT]
        assert put(other_l3, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
        assert l3.lookup([key(1)], timeout_s=10) == [Outcome.OK]

    def test_no_time_at_all_is_no_reason_to_wait_or_to_raise(self, l3: L3) -> None:
        started_s = time.monotonic()
        late = {Outcome.DEADLINE, Outcome.OK, Outcome.ABSENT}
        assert set(l3.lookup([key(1)], timeout_s=0)) <= late
        assert set(put(l3, [L3Item(key(1), 0, SIZE)], timeout_s=0)) <= late
        assert set(get(l3, [L3Item(key(1), 0, SIZE)], timeout_s=-1)) <= late
        assert time.monotonic() - started_s < 5

    def test_many_threads_each_get_their_own_bytes(self, l3: L3, contract_memory: SmallMemory) -> None:
        def work(number: int) -> None:
            item = L3Item(key(number), number * SIZE, SIZE)
            for turn in range(5):
                mine = L3Item(key(number * 100 + turn), item.offset, SIZE)
                contract_memory.buffer[mine.offset : mine.offset + SIZE] = payload(number * 100 + turn, SIZE)
                results.append(put(l3, [mine]))
                contract_memory.buffer[mine.offset : mine.offset + SIZE] = bytes(SIZE)
                results.append(get(l3, [mine]))
                same = contract_memory.buffer[mine.offset : mine.offset + SIZE] == payload(number * 100 + turn, SIZE)
                results.append([Outcome.OK] if same else [Outcome.CORRUPT])

        results: list[list[Outcome]] = []
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [[Outcome.OK]] * (8 * 5 * 3)

    def test_a_done_that_raises_harms_nobody(self, l3: L3) -> None:
        def raise_error() -> None:
            raise RuntimeError("a mistake of the caller")

        l3.put([L3Item(key(1), 0, SIZE)], timeout_s=10, done=Answer(on_done=raise_error))
        assert get(l3, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]

    def test_after_close_every_call_is_cancelled_and_told_so(self, l3: L3) -> None:
        assert put(l3, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
        l3.close()
        l3.close()
        assert l3.lookup([key(1)], timeout_s=10) == [Outcome.CANCELLED]
        assert get(l3, [L3Item(key(1), 0, SIZE)]) == [Outcome.CANCELLED]
        assert put(l3, [L3Item(key(2), 0, SIZE)]) == [Outcome.CANCELLED]
