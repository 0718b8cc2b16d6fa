"""What the density of state snapshots trades: memory for tokens that need not be computed again."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bench.tiny_engine import Generated, TinyEngine
from bench.tiny_hybrid import TinyConfig, TinyHybrid
from bench.tiny_reference import Reference, reference_generate, restored_differences
from hicache.cache import HiCache
from hicache.node import Tier
from hicache.policies.prefetch import PrefetchPolicy
from hicache.policies.snapshot import SnapshotPolicy
from hicache.sizing import slot_stride
from hicache.spec import CacheSpec, StateGroup

CHUNK_TOKENS = 128
L3_BYTES = 256 << 20

COPIED, DONATED, DOUBLE = "copied", "donated", "double buffering"

_ENDS = SnapshotPolicy(chunk_ends=False, branch_points=False, state_interval_tokens=None, cap_per_path=None)
_BRANCHES = replace(_ENDS, branch_points=True)
POLICIES: tuple[tuple[str, SnapshotPolicy, tuple[str, ...]], ...] = (
    ("ends", _ENDS, (COPIED, DONATED, DOUBLE)),
    ("ends, chunk ends", replace(_ENDS, chunk_ends=True), (DONATED,)),
    ("ends, every 4 pages", replace(_ENDS, prefill_interval_tokens=64, state_interval_tokens=64), (DONATED,)),
    ("ends, every page", replace(_ENDS, prefill_interval_tokens=16, state_interval_tokens=16), (DONATED, DOUBLE)),
    ("ends, branches", _BRANCHES, (COPIED, DONATED, DOUBLE)),
    (
        "ends, branches, every 4 pages, cap 4",
        replace(_BRANCHES, prefill_interval_tokens=64, state_interval_tokens=64, cap_per_path=4),
        (DONATED, DOUBLE),
    ),
    ("default", SnapshotPolicy(), (DONATED,)),
)


@dataclass(frozen=True, slots=True)
class DensityRow:
    """One policy over the whole workload. Bytes are those of states that a tier holds at its end."""

    policy: str
    states: str  # copied; donated: the last slot of a request; double buffering: that, and read in place
    snapshots: int
    copies: int  # of states within L1
    state_bytes_l1: int
    state_bytes_l2: int
    state_bytes_l3: int
    restored_tokens: int
    recomputed_tokens: int
    attention_only_tokens: int
    prefill_ms: float  # of all requests together, from match to the first token
    identical: bool  # every token and every restored byte are those of a run without a cache


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: list[int]
    reference: Reference

    @property
    def answer_tokens(self) -> int:
        return len(self.reference.tokens)


@dataclass(slots=True)
class _Run:
    """One policy under way."""

    policy: str
    states: str
    engine: TinyEngine
    prefill_s: float = 0.0
    differences: list[str] = field(default_factory=list)

    def serve(self, request: _Request) -> None:
        result = self.engine.generate(request.prompt, request.answer_tokens, copy_restored_bytes=True)
        assert isinstance(result, Generated), "L1 has room for all of the workload"
        assert result.restored is not None
        self.prefill_s += result.ttft_s
        self.differences += restored_differences(self.engine.spec, result.restored, request.reference)
        if result.tokens != request.reference.tokens:
            self.differences.append("other tokens were generated")
        if not self.engine.cache.flush(timeout_s=30):
            self.differences.append("not everything was written down")

    def row(self) -> DensityRow:
        stats = self.engine.cache.stats
        objects, sources = stats.objects, stats.tokens_by_source
        held = state_bytes(self.engine.cache)
        return DensityRow(
            self.policy,
            self.states,
            snapshots=sum(objects[f"{way}.ok"] for way in ("snapshot", "donate", "hand_over")),
            copies=objects["snapshot.ok"] + objects["restore.ok"],
            state_bytes_l1=held["l1"],
            state_bytes_l2=held["l2"],
            state_bytes_l3=held["l3"],
            restored_tokens=stats.tokens_requested - sources["computed"],
            recomputed_tokens=sources["computed"],
            attention_only_tokens=stats.tokens_attention_only,
            prefill_ms=round(self.prefill_s * 1e3, 1),
            identical=not self.differences,
        )


def measure(*, quick: bool) -> list[DensityRow]:
    """The rows of all policies."""
    torch.set_num_threads(1)
    return measure_density(sessions=4, shared_tokens=448) if quick else measure_density(sessions=13, shared_tokens=928)


def measure_density(*, sessions: int, shared_tokens: int) -> list[DensityRow]:
    """Every policy over the same requests, in turns: each request is served under all of them before the next one."""
    model = TinyHybrid(TinyConfig(), seed=5)
    requests = list(workload(model, sessions=sessions, shared_tokens=shared_tokens))
    pages = sum(
        -(-len(request.prompt) // model.config.page_tokens) + 2 for request in requests
    )  # all of them, unshared
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-bench-")))
        runs = [
            _Run(name, states, stack.enter_context(_engine(model, policy, states, pages, folder / f"{name} {states}")))
            for name, policy, ways in POLICIES
            for states in ways
        ]
        for request in requests:
            for run in runs:
                run.serve(request)
        return [run.row() for run in runs]


def workload(model: TinyHybrid, *, sessions: int, shared_tokens: int, seed: int = 0) -> Iterator[_Request]:
    """Sessions that share a long beginning, diverge, and come back once with their answer and another question.

    The first is somewhat longer than the rest, as where a session ended is not where the next ones branch off. Every
    second answer ends where a page does.
    """
    rng = random.Random(seed)
    page, vocab = model.config.page_tokens, model.config.vocab

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    def request(prompt: list[int], number: int) -> _Request:
        answer_tokens = 8 + page - (len(prompt) + 7) % page if number % 2 else 8
        return _Request(prompt, reference_generate(model, prompt, answer_tokens))

    shared = tokens(shared_tokens)
    first = [request([*shared, *tokens(130 if number == 0 else 50 + 7 * number)], number) for number in range(sessions)]
    yield from first
    for number, turn in enumerate(first):
        yield request([*turn.prompt, *turn.reference.tokens, *tokens(40)], number + 1)


@contextlib.contextmanager
def _engine(model: TinyHybrid, policy: SnapshotPolicy, states: str, pages: int, folder: Path) -> Iterator[TinyEngine]:
    """With room for ``pages`` pages and as many states in each tier."""
    spec = model.spec()
    strides = [slot_stride(size) for size in spec.object_bytes]
    state_stride = sum(strides[group] for group in state_groups(spec))
    with HiCache.open(
        spec,
        l1_pages=pages,
        l1_state_slots=pages,
        l2_bytes=pages * sum(strides),
        l2_state_share=state_stride / sum(strides),
        l3=f"file://{folder}",
        l3_capacity_bytes=L3_BYTES,
        prefetch=PrefetchPolicy(threshold_tokens=1 << 30),  # L1 has everything
        snapshot_policy=policy,
        double_buffering=states == DOUBLE,
    ) as cache:
        yield TinyEngine(model, cache, chunk_tokens=CHUNK_TOKENS, donate=states != COPIED)


def state_bytes(cache: HiCache) -> dict[str, int]:
    """Payload bytes of the states that each tier holds, as far as the cache knows."""
    held = {"l1": 0, "l2": 0, "l3": 0}
    groups = state_groups(cache.spec)
    for node in cache._directory.index.nodes.values():
        masks = {"l1": node.masks[Tier.L1], "l2": node.masks[Tier.L2], "l3": node.in_l3}
        for tier, mask in masks.items():
            held[tier] += sum(cache.spec.object_bytes[group] for group in groups if mask >> group & 1)
    return held


def state_groups(spec: CacheSpec) -> list[int]:
    """The indices of groups that keep states."""
    return [number for number, group in enumerate(spec.groups) if isinstance(group, StateGroup)]
