"""What the directory's match of a long prompt costs, beside plain dict look-ups of the same keys."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hicache.directory import Directory
from hicache.directory_config import DirectoryConfig
from hicache.jobs import Completion
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.spec import CacheSpec, Group, PagedGroup, StateField, StateGroup

PROMPT_PAGES = 2000
LOOKUPS_PER_PAGE = 5
_FULL = PagedGroup("full", (0,), heads=1, head_dim=8, dtype="float32")
_WINDOW = PagedGroup("window", (1,), heads=1, head_dim=8, dtype="float32", window_tokens=512)
_STATE = StateGroup("state", (2,), (StateField("s", (8,), "float32"),))
SPECS: dict[str, tuple[Group, ...]] = {
    "attention": (_FULL,),
    "attention and window": (_FULL, _WINDOW),
    "attention and state": (_FULL, _STATE),  # with a snapshot after three quarters of each prompt
}


@dataclass(frozen=True, slots=True)
class MatchRow:
    """Microseconds a prompt. ``of_limit`` above 1 means slower than five look-ups a page."""

    groups: str
    resident_in: str
    resident_pages: int
    prompt_pages: int
    open_us: float
    release_us: float
    five_lookups_us: float
    of_limit: float


def measure_match(resident_pages: int, *, prompt_pages: int = PROMPT_PAGES, repetitions: int = 15) -> list[MatchRow]:
    """For each kind of model, with so many pages resident that the prompt's are a part of: in L1 (and L2), in L2 alone,
    and with the first half of each prompt in L1."""
    prompts = [_random_keys(prompt_pages) for _ in range(-(-resident_pages // prompt_pages))]
    return [
        _measure(name, place, directory, prompts, repetitions=repetitions)
        for name, groups in SPECS.items()
        for place, directory in _places(groups, prompts)
    ]


def _places(groups: tuple[Group, ...], prompts: list[list[bytes]]) -> Iterator[tuple[str, Directory]]:
    directory = filled_directory(groups, prompts)
    yield "L1", directory
    for group, pool in enumerate(directory.index.pools[Tier.L1]):
        directory.index.release(Tier.L1, group, directory.index.acquire(Tier.L1, group, pool.capacity) or [])
    yield "L2", directory
    for keys in prompts:
        _serve(directory, keys[: len(keys) // 2])
    yield "half L1, half L2", directory


def _measure(name: str, place: str, directory: Directory, prompts: list[list[bytes]], *, repetitions: int) -> MatchRow:
    prompt_pages = len(prompts[0])
    expected = prompt_pages * 3 // 4 if directory.spec.has_state else prompt_pages
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
        assert sum(record.local_tokens.values()) == expected * directory.spec.page_tokens
    return MatchRow(
        name,
        place,
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
    """A directory in whose L1 and L2 every page of the prompts is published and nothing is in use."""
    spec = CacheSpec("bench", "1", groups)
    slots = sum(map(len, prompts)) + len(prompts[0]) + 1
    directory = Directory(spec, DirectoryConfig(l1_slots=(slots,) * len(groups), l2_slots=(slots,) * len(groups)))
    for keys in prompts:
        _serve(directory, keys)
    return directory


def _serve(directory: Directory, keys: list[bytes]) -> None:
    """Compute what is not there of a prompt, with a snapshot after three quarters of it, and back it up."""
    page_tokens, pages = directory.spec.page_tokens, len(keys)
    record = directory.open(list(keys), token_count=pages * page_tokens + 1)
    directory.load(record)
    _finish_jobs(directory)
    for end in (pages * 3 // 4, pages):
        assert directory.extend(record, tokens=end * page_tokens)
        state_at = end * page_tokens if directory.spec.has_state and end < pages else None
        directory.store(record, computed=end * page_tokens, state_at=state_at, state_pending=0)
        _finish_jobs(directory)
    directory.release(record)


def _finish_jobs(directory: Directory) -> None:
    while jobs := directory.take_jobs():
        for job in jobs:
            directory.complete(Completion(job.job_id, (Outcome.OK,) * len(job.items)))


def _random_keys(count: int) -> list[bytes]:
    raw = os.urandom(count * 32)
    return [raw[start : start + 32] for start in range(0, len(raw), 32)]
