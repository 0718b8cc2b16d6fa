"""A small vLLM around the real connector: a block pool that gives freed blocks away at once, preemption, made-up KV.

It computes what blocks must hold from the tokens up to their end, and checks every block of a request when its load is
reported and when it ends: so a copy that comes late, early or from the wrong block is found.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from hicache.connectors.vllm_pages import Geometry
from hicache.connectors.vllm_scheduler import Identity, SchedulerSide
from hicache.connectors.vllm_settings import VllmSettings
from hicache.connectors.vllm_spec import described
from hicache.connectors.vllm_worker import Introduction, Place, WorkerSide
from hicache.ranks.settings import Ranks
from hicache.slot_cache import SlotCache
from tests.connectors.vllm_fakes import (
    FullAttentionSpec,
    GroupSpec,
    KvCacheConfig,
    MambaSpec,
    Request,
    SlidingWindowSpec,
)

PAGE = 8
ROW_BYTES = 96  # of a block: [1 head, PAGE rows, ROW_BYTES]
STATE_BYTES = 300
WINDOW = 17
MODELS = {
    "dense": [GroupSpec(["a0", "a1"], FullAttentionSpec(PAGE))],
    "hybrid": [GroupSpec(["s0", "s1"], MambaSpec(PAGE)), GroupSpec(["a0", "a1"], FullAttentionSpec(PAGE))],
    "window": [
        GroupSpec(["a0"], FullAttentionSpec(PAGE)),
        GroupSpec(["w0"], SlidingWindowSpec(PAGE, sliding_window=WINDOW)),
    ],
}


@dataclass(eq=False)
class Running:
    """One request in the engine."""

    request: Request
    tables: list[list[int]]  # by vLLM group; 0: no block
    total: int
    is_loading: bool = False
    is_running: bool = False
    loaded: int = 0
    states: list[tuple[int, int, int]] = field(default_factory=list)  # offered in this step

    @property
    def name(self) -> str:
        return self.request.request_id


class VllmEngine:
    """One engine of ``tp_size`` ranks, all in this process and thread."""

    def __init__(
        self,
        model: str,
        folder: Path,
        *,
        seed: int,
        tp_size: int = 1,
        blocks: int = 40,
        l3: str | None = None,
        l2_bytes: int = 1 << 20,
        **options: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.groups = MODELS[model]
        self.config = KvCacheConfig(blocks, self.groups)
        defaults = {"prefetch_threshold_tokens": 0, "read_policy": "always"}  # it computes faster than any store loads
        settings = VllmSettings.of({"l2_bytes": l2_bytes, "l3": l3, **defaults, **options})
        leader = Ranks(f"unix://{folder}/{model}-{seed}.sock")
        block_bytes = PAGE * ROW_BYTES
        self.memory: list[dict[str, torch.Tensor]] = []  # by rank, by layer: [blocks, block_bytes]; groups overlay it
        for _ in range(tp_size):
            layers = max(len(group.layer_names) for group in self.groups)
            raw = [torch.zeros((blocks, block_bytes), dtype=torch.uint8) for _ in range(layers)]
            self.memory.append({name: raw[i] for group in self.groups for i, name in enumerate(group.layer_names)})
        tensors = [{name: self._view(name, raw) for name, raw in memory.items()} for memory in self.memory]
        said = [
            Introduction(described(self.config, each, tp_size=tp_size), ("m", "r", ()) if rank == 0 else None)
            for rank, each in enumerate(tensors)
        ]
        self.workers = [
            WorkerSide(
                settings,
                self.config,
                each,
                Place(rank, tp_size, PAGE),
                leader=leader,
                identity=lambda: ("m", "r", ()),
                gather=lambda own: said,
            )
            for rank, each in enumerate(tensors)
        ]
        engine = self.workers[0].engine
        self.cache = SlotCache.lead(
            engine.spec,
            ranks=leader,
            prefetch=settings.prefetch,
            write_policy=settings.write_policy,
            eviction=settings.eviction,
            read_policy=settings.read_policy,
            one_numbering=True,
        )
        geometry = Geometry(engine.groups, page_tokens=PAGE, hash_tokens=PAGE)
        self.side = SchedulerSide(self.cache, geometry, identity_of=lambda request: Identity())
        self.free = list(range(1, blocks))
        self.new_blocks: list[int] = []
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.tokens_loaded = 0
        self.loads_failed = 0
        self.finished = 0
        self.weights = 0  # what it computes with
        self.token_s: float | None = None  # that a token takes, in place of what the workers' clocks say

    def _view(self, name: str, raw: torch.Tensor) -> torch.Tensor:
        if name.startswith("s"):
            return raw.view(torch.int8)[:, :STATE_BYTES].unflatten(1, (1, 1, STATE_BYTES))
        return raw.unflatten(1, (1, PAGE, ROW_BYTES))

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, name: str, tokens: Sequence[int], *, generated: int = 0) -> Running:
        request = Request(name, list(tokens), PAGE)
        entry = Running(request, [[] for _ in self.groups], len(tokens) + generated)
        self.side.opened(request, 0)
        self.waiting.append(entry)
        return entry

    def abort(self, entry: Running) -> None:
        """Whatever it is at. Blocks that are loaded into go when vLLM is told that the load has ended."""
        self.side.finished(entry.request)
        self.waiting = [each for each in self.waiting if each is not entry or each.is_loading]
        self.running = [each for each in self.running if each is not entry]
        entry.total = -1
        if not entry.is_loading:
            self._free(entry)

    def preempt(self, entry: Running) -> None:
        self.running.remove(entry)
        self._free(entry)
        entry.request.num_computed_tokens = 0
        self.waiting.insert(0, entry)

    def update_weights(self) -> None:
        """As vLLM does it: nobody computes on, everybody begins anew, and the connector is reset."""
        for entry in list(self.running):
            self.preempt(entry)
        for entry in self.waiting:
            if not entry.is_loading:  # what has been loaded goes, too
                self._free(entry)
                entry.request.num_computed_tokens = 0
        self.side.reset()
        assert not self.cache.busy_slots()  # now the memory of blocks may go, as it does for a sleep
        self.weights += 1

    def _free(self, entry: Running) -> None:
        for table in entry.tables:
            self.free += [block for block in table if block]  # the last in, the first out: reuse at once
            table.clear()

    def _allocate(self, entry: Running, computed: int, tokens: int, *, states_at: int | None = None) -> bool:
        """Blocks up to ``tokens``, as each kind of group has them."""
        stop = -(-tokens // PAGE)
        wanted: list[tuple[list[int], int]] = []
        for group, table in zip(self.groups, entry.tables, strict=True):
            kept = self._first_kept(group, computed)
            for page in range(len(table), stop):
                is_state = isinstance(group.kv_cache_spec, MambaSpec)
                wanted.append((table, page if page >= kept and (not is_state or page == stop - 1) else -1))
        if sum(page >= 0 for _, page in wanted) > len(self.free):
            return False
        for table, page in wanted:
            table.append(self.free.pop() if page >= 0 else 0)
            if page >= 0:
                self.new_blocks.append(table[-1])
        for group, table in zip(self.groups, entry.tables, strict=True):  # out of the window, and earlier states
            for page in range(min(self._first_kept(group, computed), len(table))):
                if table[page]:
                    self.free.append(table[page])
                    table[page] = 0
        return True

    def _first_kept(self, group: GroupSpec, computed: int) -> int:
        spec = group.kv_cache_spec
        if isinstance(spec, SlidingWindowSpec):
            return max(0, computed - spec.sliding_window + 1) // PAGE
        if isinstance(spec, MambaSpec):
            return max(0, computed - 1) // PAGE
        return 0

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, *, budget: int = 40) -> None:
        scheduled: dict[str, int] = {}
        for entry in list(self.running):
            if entry in self.running:
                self._schedule(entry, scheduled, budget)
        for entry in list(self.waiting):
            if not entry.is_loading:  # one that finds no blocks does not hold up others, which may have theirs
                self._admit(entry, scheduled, budget)
        by_name = {entry.name: entry for entry in [*self.running, *self.waiting]}
        states = {name: by_name[name].states for name in scheduled if by_name[name].states}
        new_blocks, self.new_blocks = self.new_blocks, []
        plan = self.side.plan(scheduled, lambda name: by_name[name].tables, states, new_blocks)
        for rank, worker in enumerate(self.workers):
            worker.begin(plan)
            for block in new_blocks:
                for raw in self.memory[rank].values():
                    raw[block].fill_(0xEE)
            for name, tokens in scheduled.items():
                self._compute(rank, by_name[name], tokens)
            worker.end(plan)
            times = worker.step_times()
            if self.token_s is not None:
                times = {key: self.token_s * sum(scheduled.values()) for key in times}
            self.side.prefill_times.computed(times)
        for name, tokens in scheduled.items():
            by_name[name].request.num_computed_tokens += tokens
        for name in plan.received:
            self._received(by_name[name], failed=name in plan.failed)
        self._generate(scheduled, by_name)
        if not scheduled:
            self.cache.flush(timeout_s=20)

    def _admit(self, entry: Running, scheduled: dict[str, int], budget: int) -> None:
        if entry.request.num_computed_tokens == 0:
            matched = self.side.matched(entry.request, 0)
            if matched is None:
                return
            if matched:
                if self._allocate(entry, matched, matched):
                    self.side.allocated(entry.request, entry.tables, matched)
                    entry.is_loading, entry.loaded = True, matched
                return
        self.waiting.remove(entry)
        self.running.append(entry)
        self._schedule(entry, scheduled, budget)

    def _schedule(self, entry: Running, scheduled: dict[str, int], budget: int) -> None:
        request = entry.request
        left = request.num_tokens - request.num_computed_tokens
        tokens = min(left, budget - sum(scheduled.values()))
        if tokens > PAGE and tokens < left:
            tokens -= (request.num_computed_tokens + tokens) % PAGE
        if tokens <= 0:
            return
        entry.states = []
        while not self._allocate(entry, request.num_computed_tokens, request.num_computed_tokens + tokens):
            victims = [each for each in self.running if each.name not in scheduled and each is not entry]
            self.preempt(victims[-1] if victims else entry)
            if not victims:
                return
        end = request.num_computed_tokens + tokens
        for number, group in enumerate(self.groups):
            if isinstance(group.kv_cache_spec, MambaSpec) and end % PAGE == 0:
                entry.states.append((number, entry.tables[number][end // PAGE - 1], end))
        scheduled[entry.name] = tokens

    def _received(self, entry: Running, *, failed: bool) -> None:
        entry.is_loading = False
        if entry.total < 0:  # aborted meanwhile
            self.waiting.remove(entry)
            self._free(entry)
            return
        if failed:
            self.loads_failed += 1
            self._free(entry)
            return
        self.tokens_loaded += entry.loaded
        entry.request.num_computed_tokens = entry.loaded
        self.check(entry)

    def _generate(self, scheduled: dict[str, int], by_name: dict[str, Running]) -> None:
        for name in scheduled:
            entry = by_name[name]
            if entry not in self.running or entry.request.num_computed_tokens < entry.request.num_tokens:
                continue
            if entry.request.num_tokens < entry.total:
                entry.request.tokens.append(len(entry.request.tokens) * 7 % 50)
                continue
            self.check(entry)
            self.running.remove(entry)
            self.side.finished(entry.request)
            self._free(entry)
            self.finished += 1

    # -- bytes -------------------------------------------------------------------------------------------------------

    def _expected(self, tokens: Sequence[int], layer: str, rank: int, size_bytes: int) -> torch.Tensor:
        seed = blake2b(f"{self.weights} {layer} {rank} {list(tokens)}".encode(), digest_size=8).digest()
        return torch.frombuffer(bytearray(random.Random(seed).randbytes(size_bytes)), dtype=torch.uint8)

    def _compute(self, rank: int, entry: Running, tokens: int) -> None:
        start, end = entry.request.num_computed_tokens, entry.request.num_computed_tokens + tokens
        for group, table in zip(self.groups, entry.tables, strict=True):
            for layer in group.layer_names:
                raw = self.memory[rank][layer]
                if isinstance(group.kv_cache_spec, MambaSpec):
                    block = table[-(-end // PAGE) - 1]
                    raw[block, :STATE_BYTES] = self._expected(entry.request.tokens[:end], layer, rank, STATE_BYTES)
                    continue
                for page in range(start // PAGE, -(-end // PAGE)):
                    if table[page]:
                        prefix = entry.request.tokens[: min(end, (page + 1) * PAGE)]
                        raw[table[page]] = self._expected(prefix, layer, rank, PAGE * ROW_BYTES)

    def check(self, entry: Running) -> None:
        """Every block that its next token would read holds what its tokens make of it, on every rank."""
        computed = entry.request.num_computed_tokens
        for rank, memory in enumerate(self.memory):
            for group, table in zip(self.groups, entry.tables, strict=True):
                is_state = isinstance(group.kv_cache_spec, MambaSpec)
                pages = range(self._first_kept(group, computed), -(-computed // PAGE))
                for page in pages:
                    assert table[page], (entry.name, page)
                    prefix = entry.request.tokens[: min(computed, (page + 1) * PAGE)]
                    size = STATE_BYTES if is_state else PAGE * ROW_BYTES
                    for layer in group.layer_names:
                        held = memory[layer][table[page], :size]
                        assert torch.equal(held, self._expected(prefix, layer, rank, size)), (entry.name, layer, page)

    # -- the end -----------------------------------------------------------------------------------------------------

    def run_to_end(self) -> None:
        """Until no request is left."""
        for _ in range(2000):
            if not (self.running or self.waiting):
                self.step()  # reports what ended last
                return
            self.step()
        raise AssertionError(f"{len(self.running)} running and {len(self.waiting)} waiting requests do not end")

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.side.close()
