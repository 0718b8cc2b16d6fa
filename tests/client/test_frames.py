"""Frames off a stream: whatever comes, only right bytes count, and they lie where they belong."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.checksum import payload_checksum
from hicache.client.stream import FrameAssembly, FrameSource
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as wire
from tests.client.support import key, payload

SIZES = (1, 10, 37, 64)
FRAME_BYTES = 16
GAP_BYTES = 8
GAP = b"\xaa" * GAP_BYTES


@dataclass
class Received:
    memory: bytearray
    items: list[L3Item]
    outcomes: list[Outcome | None]

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


def good_frames() -> list[wire.Frame]:
    frames = []
    for index, size in enumerate(SIZES):
        whole = payload(index, size)
        parts = [
            wire.Frame(index=index, payload=whole[start : start + FRAME_BYTES]) for start in range(0, size, FRAME_BYTES)
        ]
        parts[-1].last, parts[-1].checksum = True, payload_checksum(key(index), whole)
        frames += parts
    return frames


def receive(frames: list[wire.Frame]) -> Received:
    items = items_with_gaps()
    memory = bytearray(b"\xaa" * (items[-1].offset + items[-1].size_bytes + GAP_BYTES))
    with memoryview(memory) as view:
        assembly = FrameAssembly(view, items)
        for frame in frames:
            if not assembly.take(frame):
                break
        return Received(memory, items, assembly.outcomes(when_missing=Outcome.IO_ERROR))


def check_nothing_else_was_touched(received: Received) -> None:
    for item in received.items:
        assert received.memory[item.offset - GAP_BYTES : item.offset] == GAP
    assert received.memory[-GAP_BYTES:] == GAP


def test_good_frames_make_good_objects_in_any_order_of_the_objects() -> None:
    frames = good_frames()
    for order in (frames, sorted(frames, key=lambda frame: -frame.index)):
        received = receive(order)
        assert received.outcomes == [Outcome.OK] * len(SIZES)
        assert [received.bytes_of(index) for index in range(len(SIZES))] == [
            payload(index, size) for index, size in enumerate(SIZES)
        ]


def test_frames_of_one_object_in_the_wrong_order_spoil_that_object_alone() -> None:
    frames = good_frames()
    first = next(position for position, frame in enumerate(frames) if frame.index == 2)
    frames[first], frames[first + 1] = frames[first + 1], frames[first]
    assert receive(frames).outcomes == [Outcome.OK, Outcome.OK, Outcome.IO_ERROR, Outcome.OK]


def test_an_object_that_is_cut_short_by_the_next_one_is_lost_alone() -> None:
    frames = [frame for frame in good_frames() if not (frame.index == 2 and frame.last)]
    assert receive(frames).outcomes == [Outcome.OK, Outcome.OK, Outcome.IO_ERROR, Outcome.OK]


def test_a_frame_too_many_never_overruns_into_the_neighbour() -> None:
    frames = good_frames()
    frames.insert(1, wire.Frame(index=1, payload=b"z" * 11))
    received = receive(frames)
    assert received.outcomes == [Outcome.OK, Outcome.IO_ERROR, Outcome.OK, Outcome.OK]
    check_nothing_else_was_touched(received)


def test_an_object_that_comes_twice_is_not_written_twice() -> None:
    again = wire.Frame(index=1, payload=b"z" * SIZES[1], last=True, checksum=1)
    received = receive([*good_frames(), again])
    assert received.outcomes == [Outcome.OK] * len(SIZES)
    assert received.bytes_of(1) == payload(1, SIZES[1])


def test_a_flipped_bit_is_an_error_of_that_object_alone() -> None:
    frames = good_frames()
    frames[0].payload = bytes([frames[0].payload[0] ^ 1])
    assert receive(frames).outcomes == [Outcome.IO_ERROR, Outcome.OK, Outcome.OK, Outcome.OK]


def test_right_bytes_under_a_foreign_key_do_not_verify() -> None:
    frames = good_frames()
    frames[0].checksum = payload_checksum(key(99), payload(0, SIZES[0]))
    assert receive(frames).outcomes[0] is Outcome.IO_ERROR


def test_a_frame_about_no_object_of_the_batch_ends_the_trust_in_the_stream() -> None:
    frames = good_frames()
    assert receive([frames[0], wire.Frame(index=4, payload=b"z"), *frames[1:]]).outcomes == [
        Outcome.OK,
        Outcome.IO_ERROR,
        Outcome.IO_ERROR,
        Outcome.IO_ERROR,
    ]


def test_an_outcome_that_this_version_does_not_know_is_an_error() -> None:
    outcomes = receive([wire.Frame(index=0, outcome=200), wire.Frame(index=1, outcome=70_000)]).outcomes
    assert outcomes[:2] == [Outcome.IO_ERROR, Outcome.IO_ERROR]


@st.composite
def tampered_frames(draw: st.DrawFn) -> list[wire.Frame]:
    frames = good_frames()
    for _ in range(draw(st.integers(0, 4))):
        position = draw(st.integers(0, len(frames) - 1))
        match draw(st.sampled_from(["drop", "repeat", "swap", "index", "payload", "last", "outcome", "checksum"])):
            case "drop" if len(frames) > 1:
                del frames[position]
            case "repeat":
                frames.insert(draw(st.integers(0, len(frames))), frames[position])
            case "swap":
                other = draw(st.integers(0, len(frames) - 1))
                frames[position], frames[other] = frames[other], frames[position]
            case field:
                changed = wire.Frame()
                changed.CopyFrom(frames[position])
                if field == "index":
                    changed.index = draw(st.integers(0, len(SIZES)))
                elif field == "payload":
                    changed.payload = draw(st.binary(max_size=80))
                elif field == "last":
                    changed.last = not changed.last
                elif field == "outcome":
                    changed.outcome = draw(st.integers(0, 13))
                elif field == "checksum":
                    changed.checksum = draw(st.integers(0, 2**64 - 1))
                frames[position] = changed
    return frames[: draw(st.integers(0, len(frames)))] if draw(st.booleans()) else frames


@settings(max_examples=300, deadline=None)
@given(tampered_frames())
def test_whatever_a_stream_says_ok_means_the_right_bytes_and_no_other_byte_changes(frames: list[wire.Frame]) -> None:
    received = receive(frames)
    check_nothing_else_was_touched(received)
    for index, outcome in enumerate(received.outcomes):
        if outcome is Outcome.OK:
            assert received.bytes_of(index) == payload(index, SIZES[index])


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=5), frame_bytes_max=st.integers(1, 40))
def test_sent_frames_are_bounded_and_carry_every_byte(sizes: list[int], frame_bytes_max: int) -> None:
    memory = bytearray(b"".join(payload(number, size) for number, size in enumerate(sizes)))
    items = [L3Item(key(number), sum(sizes[:number]), size) for number, size in enumerate(sizes)]
    with memoryview(memory) as view:
        frames = list(FrameSource(view, items, session_secret=b"s" * 32, frame_bytes_max=frame_bytes_max))
    assert [frame.session_secret for frame in frames] == [b"s" * 32] + [b""] * (len(frames) - 1)
    assert max(len(frame.payload) for frame in frames) <= frame_bytes_max
    for number, item in enumerate(items):
        own = [frame for frame in frames if frame.index == number]
        assert b"".join(frame.payload for frame in own) == payload(number, item.size_bytes)
        assert [frame.last for frame in own] == [False] * (len(own) - 1) + [True]
        assert (own[0].key, own[0].size) == (item.key, item.size_bytes)
        assert own[-1].checksum == payload_checksum(item.key, payload(number, item.size_bytes))


def test_a_stopped_source_reads_the_memory_no_more() -> None:
    memory = bytearray(100)
    view = memoryview(memory)
    source = FrameSource(view, [L3Item(key(1), 0, 100)], session_secret=b"s", frame_bytes_max=10)
    next(source)
    source.stop()
    view.release()  # a further read would raise ValueError
    assert list(source) == []
