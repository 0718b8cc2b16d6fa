"""Inputs that are nearly right: seeds with a few things changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

INPUT_BYTES_MAX = 1 << 16
_NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
)


def mutated(random: Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds after one to eight changes, or something that has nothing to do with them."""
    if not seeds or random.random() < 0.05:
        return random.randbytes(random.randrange(300))
    made = bytearray(random.choice(seeds))
    for _ in range(random.randint(1, 8)):
        random.choice(_CHANGES)(random, made, seeds)
    return bytes(made[:INPUT_BYTES_MAX])


def _flip(random: Random, made: bytearray, _: Sequence[bytes]) -> None:
    if made:
        made[random.randrange(len(made))] ^= 1 << random.randrange(8)


def _set(random: Random, made: bytearray, _: Sequence[bytes]) -> None:
    if made:
        made[random.randrange(len(made))] = random.randrange(256)


def _number(random: Random, made: bytearray, _: Sequence[bytes]) -> None:
    width = random.choice((1, 2, 4, 8))
    number = random.choice(_NUMBERS) % (1 << 8 * width)
    at = random.randrange(len(made) + 1)
    made[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))


def _cut(random: Random, made: bytearray, _: Sequence[bytes]) -> None:
    start = random.randrange(len(made) + 1)
    del made[start : start + random.choice((1, 2, 8, 64, 1 << 20))]


def _double(random: Random, made: bytearray, _: Sequence[bytes]) -> None:
    start = random.randrange(len(made) + 1)
    made[start:start] = made[start : start + random.choice((1, 4, 32, 512))]


def _insert(random: Random, made: bytearray, _: Sequence[bytes]) -> None:
    start = random.randrange(len(made) + 1)
    made[start:start] = random.randbytes(random.choice((1, 2, 4, 16, 200)))


def _splice(random: Random, made: bytearray, seeds: Sequence[bytes]) -> None:
    other = random.choice(seeds)
    start = random.randrange(len(other) + 1)
    made[random.randrange(len(made) + 1) :] = other[start:]


_CHANGES: tuple[Callable[[Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip,
    _set,
    _number,
    _cut,
    _double,
    _insert,
    _splice,
)
