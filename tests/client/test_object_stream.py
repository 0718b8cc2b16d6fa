"""Objects off the bulk socket: whatever comes, only right bytes count, and they lie where they belong."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.checksum import payload_checksum
from hicache.client.bulk_link import BulkLink
from hicache.client.stream import Nonsense, ObjectStream
from hicache.client.transfer import Direction, Transfer
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire.bulk import BULK_ACCEPTED, BULK_CHECKSUM, BULK_OBJECT, BULK_REQUEST, BulkKind, unpack_numbers
from tests.client.support import Answer, key, payload

SIZES = (1, 10, 37, 64)
GAP_BYTES = 8
GAP = b"\xaa" * GAP_BYTES


@dataclass
class Received:
    memory: bytearray
    items: list[L3Item]
    outcomes: list[Outcome | None]
    error: Exception | None

    def bytes_of(self, index: int) -> bytes:
        item = self.items[index]
        return bytes(self.memory[item.offset : item.offset + item.size_bytes])


def items_with_gaps() -> list[L3Item]:
    """Items with GAP_BYTES before, between and behind them: bytes that nobody may touch."""
    items, offset = [], GAP_BYTES
    for number, size in enumerate(SIZES):
        items.append(L3Item(key(number), offset, size))
        offset += size + GAP_BYTES
    return items


def good_object(index: int) -> bytes:
    whole = payload(index, SIZES[index])
    checksum = payload_checksum(key(index), whole)
    return BULK_OBJECT.pack(index, Outcome.OK) + whole + BULK_CHECKSUM.pack(checksum)


def good_objects() -> list[bytes]:
    return [good_object(index) for index in range(len(SIZES))]


def receive(sent: bytes) -> Received:
    """What a get makes of an answer that ends after ``sent``."""
    items = items_with_gaps()
    memory = bytearray(b"\xaa" * (items[-1].offset + items[-1].size_bytes + GAP_BYTES))
    outcomes: list[Outcome | None] = [None] * len(items)
    error: Exception | None = None
    ours, theirs = socket.socketpair()
    with ours, theirs, memoryview(memory) as view:
        theirs.sendall(BULK_ACCEPTED + sent)
        theirs.shutdown(socket.SHUT_WR)
        transfer = Transfer(Direction.GET, items, timeout_s=10, done=Answer())
        try:
            ObjectStream(BulkLink(ours), view, items, transfer).get(outcomes)
        except (Nonsense, ConnectionError) as caught:
            error = caught
    return Received(memory, items, outcomes, error)


def check_nothing_else_was_touched(received: Received) -> None:
    for item in received.items:
        assert received.memory[item.offset - GAP_BYTES : item.offset] == GAP
    assert received.memory[-GAP_BYTES:] == GAP


def test_good_objects_arrive_in_any_order() -> None:
    objects = good_objects()
    for order in (objects, objects[::-1]):
        received = receive(b"".join(order))
        assert received.error is None
        assert received.outcomes == [Outcome.OK] * len(SIZES)
        assert [received.bytes_of(index) for index in range(len(SIZES))] == [
            payload(index, size) for index, size in enumerate(SIZES)
        ]


def test_an_answer_that_is_cut_off_keeps_what_is_whole() -> None:
    received = receive(b"".join(good_objects())[:-1])
    assert received.outcomes == [Outcome.OK, Outcome.OK, Outcome.OK, None]
    assert isinstance(received.error, ConnectionError)
    check_nothing_else_was_touched(received)


def test_an_object_that_comes_twice_ends_the_trust_in_the_connection() -> None:
    objects = good_objects()
    again = objects[1].replace(payload(1, SIZES[1]), b"z" * SIZES[1])
    received = receive(b"".join([*objects[:2], again, *objects[2:]]))
    assert isinstance(received.error, Nonsense)
    assert received.outcomes == [Outcome.OK, Outcome.OK, None, None]
    assert received.bytes_of(1) == payload(1, SIZES[1])


def test_an_object_of_no_item_ends_the_trust_in_the_connection() -> None:
    received = receive(good_object(0) + BULK_OBJECT.pack(4, Outcome.OK) + b"z" * 100)
    assert isinstance(received.error, Nonsense)
    assert received.outcomes == [Outcome.OK, None, None, None]


def test_a_flipped_bit_is_an_error_of_that_object_alone() -> None:
    objects = good_objects()
    flipped = bytearray(objects[2])
    flipped[BULK_OBJECT.size + 5] ^= 1
    received = receive(b"".join([*objects[:2], bytes(flipped), objects[3]]))
    assert received.outcomes == [Outcome.OK, Outcome.OK, Outcome.IO_ERROR, Outcome.OK]


def test_right_bytes_under_a_foreign_key_do_not_verify() -> None:
    checksum = BULK_CHECKSUM.pack(payload_checksum(key(99), payload(0, SIZES[0])))
    objects = good_objects()
    received = receive(b"".join([objects[0][: -BULK_CHECKSUM.size] + checksum, *objects[1:]]))
    assert received.outcomes == [Outcome.IO_ERROR, Outcome.OK, Outcome.OK, Outcome.OK]


def test_an_outcome_that_means_nothing_for_a_get_is_an_error_and_no_bytes_are_expected() -> None:
    sent = [BULK_OBJECT.pack(0, 200), BULK_OBJECT.pack(1, Outcome.EXISTS), BULK_OBJECT.pack(2, Outcome.ABSENT)]
    received = receive(b"".join([*sent, good_object(3)]))
    assert received.outcomes == [Outcome.IO_ERROR, Outcome.IO_ERROR, Outcome.ABSENT, Outcome.OK]


@st.composite
def tampered_answers(draw: st.DrawFn) -> bytes:
    objects = good_objects()
    for _ in range(draw(st.integers(0, 3))):
        position = draw(st.integers(0, len(objects) - 1))
        match draw(st.sampled_from(["drop", "repeat", "swap", "cut", "byte", "index", "outcome"])):
            case "drop" if len(objects) > 1:
                del objects[position]
            case "repeat":
                objects.insert(draw(st.integers(0, len(objects))), objects[position])
            case "swap":
                other = draw(st.integers(0, len(objects) - 1))
                objects[position], objects[other] = objects[other], objects[position]
            case "cut":
                objects[position] = objects[position][: draw(st.integers(1, len(objects[position])))]
            case "byte":
                changed = bytearray(objects[position])
                changed[draw(st.integers(0, len(changed) - 1))] ^= draw(st.integers(1, 255))
                objects[position] = bytes(changed)
            case "index":
                objects[position] = draw(st.integers(0, len(SIZES))).to_bytes(4, "little") + objects[position][4:]
            case "outcome":
                objects[position] = objects[position][:4] + bytes([draw(st.integers(0, 255))]) + objects[position][5:]
    sent = b"".join(objects)
    return sent[: draw(st.integers(0, len(sent)))] if draw(st.booleans()) else sent


@settings(max_examples=200, deadline=None)
@given(tampered_answers())
def test_whatever_comes_ok_means_the_right_bytes_and_no_other_byte_changes(sent: bytes) -> None:
    received = receive(sent)
    check_nothing_else_was_touched(received)
    assert received.error is not None or None not in received.outcomes
    for index, outcome in enumerate(received.outcomes):
        if outcome is Outcome.OK:
            assert received.bytes_of(index) == payload(index, SIZES[index])


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=5), data=st.data())
def test_a_put_sends_what_is_wanted_with_its_checksum_and_nothing_else(sizes: list[int], data: st.DataObject) -> None:
    memory = bytearray(b"".join(payload(number, size) for number, size in enumerate(sizes)))
    items = [L3Item(key(number), sum(sizes[:number]), size) for number, size in enumerate(sizes)]
    known = [data.draw(st.sampled_from([Outcome.OK, Outcome.EXISTS, Outcome.TOO_LARGE])) for _ in sizes]
    stored = [data.draw(st.sampled_from([Outcome.OK, Outcome.CORRUPT, Outcome.DEADLINE])) for _ in sizes]
    outcomes: list[Outcome | None] = [None] * len(items)
    ours, theirs = socket.socketpair()
    with ours, theirs, memoryview(memory) as view:
        theirs.sendall(BULK_ACCEPTED + bytes(known) + BULK_ACCEPTED + bytes(stored))
        transfer = Transfer(Direction.PUT, items, timeout_s=10, done=Answer())
        ObjectStream(BulkLink(ours), view, items, transfer).put(outcomes)
        ours.shutdown(socket.SHUT_WR)
        with theirs.makefile("rb") as reader:
            sent = reader.read()
    header, sent = sent[: BULK_REQUEST.size], sent[BULK_REQUEST.size :]
    assert BULK_REQUEST.unpack(header)[:3] == (BulkKind.PUT, len(key(0)), len(items))
    names, sent = sent[: len(items) * len(key(0))], sent[len(items) * len(key(0)) :]
    assert names == b"".join(item.key for item in items)
    assert unpack_numbers(sent[: 8 * len(items)]) == tuple(sizes)
    wanted = [number for number, outcome in enumerate(known) if outcome is Outcome.OK]
    objects = [payload(number, sizes[number]) for number in wanted]
    checksums = [payload_checksum(key(number), whole) for number, whole in zip(wanted, objects, strict=True)]
    assert sent[8 * len(items) :] == b"".join(
        whole + BULK_CHECKSUM.pack(checksum) for whole, checksum in zip(objects, checksums, strict=True)
    )
    assert outcomes == [late if first is Outcome.OK else first for first, late in zip(known, stored, strict=True)]
