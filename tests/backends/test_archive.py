"""The format of exports: what is written is read, whatever is damaged is told, and no length in a file is believed."""

from __future__ import annotations

import io
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.backends.archive import (
    ArchiveEnd,
    ArchiveError,
    ArchiveHeader,
    ArchiveReader,
    encode_end,
    encode_header,
    encode_object_head,
)

HEADER = ArchiveHeader(namespace=b"n" * 32, descriptor=b"\x80", model="m", source="lmdb 00", hicache_version="1")
Objects = list[tuple[bytes, bytes]]
objects_of = st.lists(st.tuples(st.binary(min_size=1, max_size=112), st.binary(min_size=1, max_size=300)), max_size=5)


def written(objects: Objects) -> bytes:
    parts = [encode_header(HEADER)]
    for key, payload in objects:
        parts += [encode_object_head(key, memoryview(payload)), payload]
    return b"".join([*parts, encode_end(ArchiveEnd(len(objects), sum(len(payload) for _, payload in objects)))])


def read(raw: bytes, **settings: int) -> tuple[list[tuple[bytes, bytes | None]], ArchiveReader]:
    reader = ArchiveReader(io.BytesIO(raw), **settings)
    return [(found.key, None if found.payload is None else bytes(found.payload)) for found in reader], reader


@given(objects_of)
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read(objects: Objects) -> None:
    found, reader = read(written(objects))
    assert found == objects
    assert reader.header == HEADER
    assert reader.end == ArchiveEnd(len(objects), sum(len(payload) for _, payload in objects))


@given(objects_of, st.data())
@settings(max_examples=150, deadline=None)
def test_a_changed_byte_is_an_error_or_an_object_that_does_not_verify(objects: Objects, data: st.DataObject) -> None:
    raw = bytearray(written(objects))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found, _ = read(bytes(raw))
    except ArchiveError:
        return
    changed = [(key, payload) for key, payload in found if (key, payload) not in objects]
    assert [payload for _, payload in changed] == [None], "all but one object are as they were, and that one is told"


@given(objects_of, st.data())
@settings(max_examples=60, deadline=None)
def test_a_file_that_was_cut_short_is_told(objects: Objects, data: st.DataObject) -> None:
    raw = written(objects)
    length = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(ArchiveError, match="cut short"):
        read(raw[:length])


@given(st.binary(max_size=400))
@settings(max_examples=150, deadline=None)
def test_bytes_of_anybody_are_an_error(raw: bytes) -> None:
    for start in (b"", b"HICACHEX", encode_header(HEADER)):
        with pytest.raises(ArchiveError):
            read(start + raw)


def test_announced_lengths_take_no_memory() -> None:
    header = struct.pack("<8sII", b"HICACHEX", 1, 2**32 - 1)
    head = struct.pack("<4sHQQ", b"OBJ1", 10, 4 << 30, 0)
    import xxhash

    checked = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + b"k" * 10)) + b"k" * 10
    tracemalloc.start()
    try:
        for raw in (header + b"x" * 100, encode_header(HEADER) + checked + b"short"):
            with pytest.raises(ArchiveError):
                read(raw)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_objects_above_the_bound_are_read_over() -> None:
    found, _ = read(written([(b"a", b"x" * 50), (b"b", b"y" * 500), (b"c", b"z" * 50)]), object_bytes_max=100)
    assert found == [(b"a", b"x" * 50), (b"b", None), (b"c", b"z" * 50)]


def test_another_version_is_refused_by_name() -> None:
    raw = bytearray(written([]))
    raw[8] = 2
    with pytest.raises(ArchiveError, match="of version 2: this hicache reads version 1"):
        read(bytes(raw))


def test_counts_that_do_not_fit_are_told() -> None:
    raw = written([(b"a", b"x")])
    end = len(encode_end(ArchiveEnd(0, 0)))
    with pytest.raises(ArchiveError, match="ends after 1 objects of 1 bytes: expected 2 of 5"):
        read(raw[:-end] + encode_end(ArchiveEnd(2, 5)))
