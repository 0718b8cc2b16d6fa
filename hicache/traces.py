"""Request traces: the lengths, times and prefix blocks of requests that were served somewhere."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import zstandard

from hicache.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
_WINDOW_BYTES_MAX = 2**27  # the public traces are packed with long-distance matching


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a Mooncake trace: ``hash_ids`` name 512-token prefix blocks, the last one usually partial."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_mooncake_trace(path: str | Path, *, limit: int | None = None) -> Iterator[TraceRequest]:
    """The first ``limit`` requests of a ``.jsonl`` or ``.jsonl.zst`` file.

    Raises ConfigError for a file that is not there or cannot be read as text, and for a line that is not a request,
    with its number.
    """
    if not Path(path).is_file():
        raise ConfigError("trace", str(path), "a file: a Mooncake trace, .jsonl or .jsonl.zst")
    try:
        yield from _read(path, limit)
    except (OSError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise ConfigError("trace", str(path), f"a readable .jsonl or .jsonl.zst file in UTF-8 ({error})") from error


def _read(path: str | Path, limit: int | None) -> Iterator[TraceRequest]:
    for number, line in enumerate(itertools.islice(text_lines(path), limit), start=1):
        yield _parse(line, f"{path}:{number}")


def text_lines(path: str | Path) -> Generator[str, None, None]:
    """The lines of a file, plain or packed: .zst or .gz. Raises what opening and unpacking do."""
    with open(path, "rb") as file:
        raw: io.IOBase | IO[bytes] = file
        if str(path).endswith(".zst"):
            raw = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).stream_reader(file)
        elif str(path).endswith(".gz"):
            raw = gzip.GzipFile(fileobj=file)
        with io.TextIOWrapper(raw, encoding="utf-8") as lines:  # type: ignore[type-var]  # all three read bytes
            yield from lines


def _parse(line: str, place: str) -> TraceRequest:
    try:
        fields = json.loads(line)
        request = TraceRequest(
            int(fields["timestamp"]),
            int(fields["input_length"]),
            int(fields["output_length"]),
            tuple(map(int, fields["hash_ids"])),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            place, line.strip()[:80], "a JSON object with timestamp, input_length, output_length and hash_ids"
        ) from error
    if not request.hash_ids or min(request.hash_ids) < 0 or request.input_length < 1 or request.output_length < 0:
        raise ConfigError(place, line.strip()[:80], "at least one input token and one block id, none of them negative")
    return request
