"""Request traces in Mooncake's format, and the tokens that their block ids stand for."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np
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
    for number, line in enumerate(itertools.islice(trace_lines(path), limit), start=1):
        yield _parse(line, f"{path}:{number}")


def trace_lines(path: str | Path) -> Generator[str, None, None]:
    """The lines of a text file, plain or packed (``.zst``, ``.gz``), which is closed with the generator.

    Raises ConfigError for a file that is not there or cannot be read as text.
    """
    if not Path(path).is_file():
        raise ConfigError("trace", str(path), "a file: a request trace, plain, .zst or .gz")
    try:
        with open(path, "rb") as file, io.TextIOWrapper(_unpacked(file, str(path)), encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise ConfigError("trace", str(path), f"a readable file in UTF-8, plain, .zst or .gz ({error})") from error


def _unpacked(file: BinaryIO, name: str) -> IO[bytes]:
    if name.endswith(".zst"):
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).stream_reader(file)
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if name.endswith(".gz") else file


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


def prompt_of(request: TraceRequest, *, scale: int, vocab: int, tokens_max: int, seed: int = 0) -> list[int]:
    """Token ids for a request at 1/``scale`` of its length, at most ``tokens_max``.

    A block id always gives the same ``512 / scale`` tokens, so that equal prefixes of the trace are equal prefixes
    here, and unequal ones differ.
    """
    block_tokens = MOONCAKE_BLOCK_TOKENS // scale
    length = min(max(1, round(request.input_length / scale)), block_tokens * len(request.hash_ids), tokens_max)
    blocks = request.hash_ids[: -(-length // block_tokens)]
    return [token for block in blocks for token in _block_tokens(block, block_tokens, vocab, seed)][:length]


def _block_tokens(block: int, count: int, vocab: int, seed: int) -> Sequence[int]:
    tokens: list[int] = np.random.default_rng([seed, block]).integers(0, vocab, count).tolist()
    return tokens
