"""A process that writes to a store until it is killed: ``python -m tests.backends.churn_process URL CAPACITY SEED``.

Prints ``stored KEY NUMBER SIZE`` when an object is acknowledged, and ``deleting KEY`` before it asks for one to go.
"""

from __future__ import annotations

import sys
from random import Random

from hicache.backends.open import open_backend
from hicache.outcome import Outcome
from tests.backends.payloads import key, payload, put, scanned

SIZES = (100, 5_000, 70_000, 300_000, 9 << 20)
BATCH = 6
STEPS_MAX = 100_000


def churn(url: str, capacity_bytes: int, seed: int) -> None:
    """Put batches of mixed sizes, deleting the oldest whenever there is no room."""
    backend = open_backend(url, capacity_bytes=capacity_bytes)
    random = Random(seed)
    present = [stored.key for stored in scanned(backend)]
    say(f"opened {len(present)}")
    for step in range(STEPS_MAX):
        numbers = [seed * 1_000_000 + step * BATCH + offset for offset in range(BATCH)]
        sizes = [random.choice(SIZES) for _ in numbers]
        outcomes = put(
            backend, *[(key(number), payload(number, size)) for number, size in zip(numbers, sizes, strict=True)]
        )
        for number, size, outcome in zip(numbers, sizes, outcomes, strict=True):
            if outcome is Outcome.OK:
                present.append(key(number))
                say(f"stored {key(number).hex()} {number} {size}")
        if len(present) > 40 or Outcome.NO_SPACE in outcomes:
            oldest = [present.pop(0) for _ in range(min(8, len(present)))]
            for name in oldest:
                say(f"deleting {name.hex()}")
            backend.delete(oldest)


def say(line: str) -> None:
    """One line for the parent, at once."""
    print(line, flush=True)


if __name__ == "__main__":
    churn(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
