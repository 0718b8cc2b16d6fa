"""What the directory's match of a long prompt costs, beside plain dict look-ups of the same keys."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

from hicache.directory import Directory, DirectoryConfig
from hicache.spec import CacheSpec, Group, PagedGroup

PROMPT_PAGES = 2000
LOOKUPS_PER_PAGE = 5
_FULL = PagedGroup("full", (0,), heads=1, head_dim=8, dtype="float32")
_WINDOW = PagedGroup("window", (1,), heads=1, head_dim=8, dtype="float32", window_tokens=512)
SPECS: dict[str, tuple[Group, ...]] = {"attention": (_FULL,), "attention and window": (_FULL, _WINDOW)}


@dataclass(frozen=True, slots=True)
class MatchRow:
    """Microseconds a prompt. ``of_limit`` above 1 means slower than five look-ups a page."""

    groups: str
    resident_pages: int
    prompt_pages: int
    open_us: float
    release_us: float
    five_lookups_us: float
    of_limit: float


def measure_match(resident_pages: int, *, prompt_pages: int = PROMPT_PAGES, repetitions: int = 15) -> list[MatchRow]:
    """For each kind of model, with so many pages resident in L1 that the prompt's are a part of."""
    return [
        _measure(name, groups, resident_pages, prompt_pages=prompt_pages, repetitions=repetitions)
        for name, groups in SPECS.items()
    ]


def _measure(
    name: str, groups: tuple[Group, ...], resident_pages: int, *, prompt_pages: int, repetitions: int
) -> MatchRow:
    prompts = [_random_keys(prompt_pages) for _ in range(-(-resident_pages // prompt_pages))]
    directory = filled_directory(groups, prompts)
    opened: list[float] = []
    released: list[float] = []
    looked_up: list[float] = []
    for repetition in range(repetitions):
        looked_up.append(_lookups_s(directory, prompts[repetition * 2 % len(prompts)]))
        keys = prompts[(repetition * 2 + 1) % len(prompts)]  # another one, so that neither warms the other's caches
        start_s = time.perf_counter()
        record = directory.open(keys, token_count=prompt_pages * directory.spec.page_tokens + 1)
        middle_s = time.perf_counter()
        directory.release(record)
        released.append(time.perf_counter() - middle_s)
        opened.append(middle_s - start_s)
        assert sum(record.local_tokens.values()) == prompt_pages * directory.spec.page_tokens
    return MatchRow(
        name,
        resident_pages=len(directory.index.nodes),
        prompt_pages=prompt_pages,
        open_us=round(statistics.median(opened) * 1e6, 1),
        release_us=round(statistics.median(released) * 1e6, 1),
        five_lookups_us=round(statistics.median(looked_up) * 1e6, 1),
        of_limit=round(statistics.median(spent / most for spent, most in zip(opened, looked_up, strict=True)), 2),
    )


def _lookups_s(directory: Directory, keys: list[bytes]) -> float:
    """Five rounds over the very dict that the directory looks in."""
    get = directory.index.nodes.get
    start_s = time.perf_counter()
    for _ in range(LOOKUPS_PER_PAGE):
        for key in keys:
            get(key)
    return time.perf_counter() - start_s


def filled_directory(groups: tuple[Group, ...], prompts: list[list[bytes]]) -> Directory:
    """A directory in whose L1 every page of the prompts is published and nothing is in use."""
    spec = CacheSpec("bench", "1", groups)
    pages = sum(map(len, prompts))
    slots = pages + len(prompts[0]) + 1
    directory = Directory(spec, DirectoryConfig(l1_slots=(slots,) * len(groups), l2_slots=(0,) * len(groups)))
    for keys in prompts:
        tokens = len(keys) * spec.page_tokens
        record = directory.open(list(keys), token_count=tokens + 1)
        directory.load(record)
        assert directory.extend(record, tokens=tokens)
        directory.store(record, computed=tokens, state_at=None, state_pending=0)
        directory.release(record)
    return directory


def _random_keys(count: int) -> list[bytes]:
    raw = os.urandom(count * 32)
    return [raw[start : start + 32] for start in range(0, len(raw), 32)]
