"""Hashing of a long prompt, beside one hash of the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import xxhash

from hicache.keys import KEY_HASHES, BlockKeys

PROMPT_TOKENS = 128 * 1024
PAGE_TOKENS = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HashRow:
    """Milliseconds for the whole prompt; the limit hashes the same 8-byte tokens in one call without keys between."""

    key_hash: str
    source: str  # what the tokens come in
    tokens: int
    ms: float
    us_per_page: float
    limit_ms: float


def median_s(work: Callable[[], T], *, repetitions: int) -> tuple[float, T]:
    """Median time of a call, and what the last one returned."""
    times: list[float] = []
    while True:
        start_s = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start_s)
        if len(times) == repetitions:
            return statistics.median(times), result


def measure_hashing(*, tokens: int = PROMPT_TOKENS, repetitions: int = 9) -> list[HashRow]:
    """Every key hash, from a numpy vector and from a list."""
    array = np.random.default_rng(7).integers(0, 150_000, size=tokens, dtype=np.int64)
    limits: dict[str, Callable[[], object]] = {
        "blake2b": lambda: blake2b(array.data).digest(),
        "xxh3_128": lambda: xxhash.xxh3_128_digest(array.data),
    }
    rows: list[HashRow] = []
    for key_hash in KEY_HASHES:
        keys = BlockKeys(b"n" * 32, page_tokens=PAGE_TOKENS, key_hash=key_hash)
        root = keys.root()
        for source, given in (("int64", array), ("list", array.tolist())):
            limit_s, _ = median_s(limits[key_hash], repetitions=repetitions)
            spent_s, chain = median_s(lambda: keys.chain(given, parent=root), repetitions=repetitions)  # noqa: B023 (called at once)
            row = HashRow(
                key_hash,
                source,
                tokens,
                ms=round(spent_s * 1e3, 3),
                us_per_page=round(spent_s / max(1, len(chain)) * 1e6, 3),
                limit_ms=round(limit_s * 1e3, 3),
            )
            rows.append(row)
    return rows
