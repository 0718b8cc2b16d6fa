"""Replays: what a trace finds in tiers that production's policies run, and what that costs to read and write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, overload

import numpy as np
from msgspec.structs import replace

from bench.admission.traces import Trace, TraceRequest
from bench.admission.tree import Gone, ResidentTree
from hicache.errors import ConfigError
from hicache.policies.choice import policies_of
from hicache.policies.eviction import EvictionFactory
from hicache.policies.eviction_kinds import dense_8b_flops
from hicache.policies.facts import EvictionFacts, RequestFacts, SuffixFacts
from hicache.policies.write import WritePolicy

KV_BYTES_8B = 131_072  # of one token of Llama-3.1-8B in bf16
_FLOPS_8B_H100 = 593e12  # per second of prefill, fitted to a published curve: docs/policies.md


class Costs(Protocol):
    """What a model costs on a machine."""

    @property
    def token_bytes(self) -> int: ...

    def prefill_s(self, start_tokens: int, end_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Dense8bCosts:
    """Llama-3.1-8B on an H100."""

    token_bytes: int = KV_BYTES_8B

    def prefill_s(self, start_tokens: int, end_tokens: int) -> float:
        """GPU time of computing tokens ``[start, end)`` when those before them are there."""
        return dense_8b_flops(start_tokens, end_tokens) / _FLOPS_8B_H100


class LoadRule(Protocol):
    """Read admission, as a replay asks it of each tier that has more of a prompt than those above it."""

    def __call__(self, tier: str, held_tokens: int, usable_tokens: int, request: TraceRequest, now_s: float) -> int:
        """How many tokens behind the first ``held_tokens`` are loaded; the rest is computed."""
        ...


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier. ``eviction`` and ``write`` are names, or what makes the policies of a replay."""

    name: str
    capacity_pages: int | None  # None: nothing is ever evicted for room
    eviction: str | EvictionFactory = "lru"
    write: str | Callable[[], WritePolicy] = "write_through"  # what comes into the tier

    def policies(self) -> tuple[EvictionFactory, WritePolicy]:
        """For one replay. Raises ConfigError."""
        return policies_of(self.eviction, self.write if isinstance(self.write, str) else self.write())


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request."""

    usable_tokens: int
    taken: tuple[tuple[int, int], ...]  # by tier: pages [start, end) of the prefix that it gave
    written: tuple[int, ...]  # by tier: pages that came in


@dataclass(slots=True)
class TenantResult:
    """What one tenant got."""

    requests: int = 0
    input_tokens: int = 0
    usable_tokens: int = 0


@dataclass(slots=True)
class TierResult:
    """What one tier did. Pages and bytes count from the start of the trace, tokens for the requests that are scored."""

    name: str
    capacity_pages: int | None
    used_tokens: int  # of prompts, that were taken from it
    pages_written: int
    bytes_written: int
    bytes_read: int
    pages_never_read: int  # of those written
    pages_evicted: int
    pages_expired: int  # of those evicted
    resident_tokens_mean: float  # over time
    resident_pages_max: int


@dataclass(slots=True)
class Result:
    """What a replay came to."""

    requests: int = 0
    references: int = 0  # blocks of prompts
    input_tokens: int = 0
    usable_tokens: int = 0  # of the longest prefixes that were found
    hit_blocks: int = 0
    gpu_s_total: float = 0.0  # of prefill, were nothing found
    gpu_s_saved: float = 0.0
    tiers: list[TierResult] = field(default_factory=list)
    by_tenant: dict[str, TenantResult] = field(default_factory=dict)
    span_s: float = 0.0  # of the trace
    wall_s: float = 0.0

    @property
    def token_hit_share(self) -> float:
        """Usable tokens per prompt token."""
        return self.usable_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def references_per_s(self) -> float:
        """How fast the replay went."""
        return self.references / self.wall_s if self.wall_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"token_hit_share": self.token_hit_share, "references_per_s": self.references_per_s}


class PrefixKeys(Sequence[bytes]):
    """Block keys of prefix ids: as good as random, like hashes, and made when somebody looks at them."""

    def __init__(self, blocks: Sequence[int], start: int = 0) -> None:
        self._blocks = blocks
        self._start = start
        self._keys: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self._blocks) - self._start

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        return self._made()[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._made())

    def _made(self) -> list[bytes]:
        if self._keys is None:
            ids = np.asarray(self._blocks[self._start :], np.uint64)
            mixed = np.stack([_mixed(2 * ids), _mixed(2 * ids + np.uint64(1))], axis=1).tobytes()
            self._keys = [mixed[start : start + 16] for start in range(0, len(mixed), 16)]
        return self._keys


def _mixed(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """SplitMix64's finaliser."""
    values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class _Tier:
    """A tier with its policies, and what was measured of it."""

    def __init__(self, spec: TierSpec, *, page_tokens: int, page_bytes: int, run_pages_max: int | None) -> None:
        self.name = spec.name
        eviction, self.write = spec.policies()
        self.tree = ResidentTree(
            spec.capacity_pages,
            page_tokens=page_tokens,
            page_bytes=page_bytes,
            eviction=eviction,
            run_pages_max=run_pages_max,
        )
        self.used_tokens = 0
        self.resident_pages_max = 0
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._resident_page_s = 0.0

    def tick(self, now_s: float, passed_s: float) -> None:
        """Time goes on to ``now_s``."""
        self._resident_page_s += self.tree.resident_pages * passed_s
        self.tree.now_s = now_s
        self.tree.expire()

    def admitted(self, blocks: Sequence[int], here: int, request: RequestFacts) -> int:
        """How many pages of a path shall be here, of which ``here`` are."""
        if here == len(blocks):
            return here
        admitted = self.write.admits(PrefixKeys(blocks, here), self._facts(here, request))
        self.write.wrote(admitted * self._page_bytes)
        return here + admitted

    def touch(self, keys: Sequence[bytes], request: RequestFacts) -> None:
        """A request uses a path."""
        self.write.touch(keys, self._facts(0, request))

    def _facts(self, first_page: int, request: RequestFacts) -> SuffixFacts:
        return SuffixFacts(self.tree.now_s, first_page, self._page_tokens, self._page_bytes, self._victim, request)

    def _victim(self) -> EvictionFacts | None:
        victim = self.tree.victim()
        if victim is None:
            return None
        assert isinstance(victim.key, int), "trees know pages by their ids"
        return replace(victim, key=PrefixKeys((victim.key,))[0])

    def result(self, span_s: float) -> TierResult:
        """After the last request."""
        counts = self.tree.counts
        return TierResult(
            name=self.name,
            capacity_pages=self.tree.capacity_pages,
            used_tokens=self.used_tokens,
            pages_written=counts.written,
            bytes_written=counts.written * self._page_bytes,
            bytes_read=counts.read * self._page_bytes,
            pages_never_read=counts.never_read + self.tree.pages_unread(),
            pages_evicted=counts.evicted,
            pages_expired=counts.expired,
            resident_tokens_mean=self._resident_page_s * self._page_tokens / span_s if span_s else 0.0,
            resident_pages_max=self.resident_pages_max,
        )


class Replayer:
    """Tiers, from the fastest one down. A request finds the longest prefix that any of them holds, or as much of it as
    the load rule takes; all that it used and computed then comes into each tier as far as that one's write policy says.

    A tier of a policy that writes on eviction gets what leaves the tier above it, with the pages before that.
    """

    def __init__(
        self,
        block_tokens: int,
        tiers: Sequence[TierSpec],
        *,
        load: LoadRule | None = None,
        costs: Costs | None = None,
        run_pages_max: int | None = None,
    ) -> None:
        if not tiers:
            raise ConfigError("tiers", list(tiers), "at least one tier")
        self._costs: Costs = costs or Dense8bCosts()
        self._block_tokens = block_tokens
        page_bytes = block_tokens * self._costs.token_bytes
        self.tiers = [
            _Tier(spec, page_tokens=block_tokens, page_bytes=page_bytes, run_pages_max=run_pages_max) for spec in tiers
        ]
        for upper, lower in zip(self.tiers, self.tiers[1:], strict=False):
            upper.tree.gone = [] if lower.write.ahead_share else None
        self._load = load
        self._result = Result()
        self._start_s: float | None = None
        self._now_s = 0.0
        self.is_scored = True  # whether requests count

    def serve(self, request: TraceRequest, now_s: float | None = None) -> Served:
        """The next request, at its own time or, not before the one before it, ``now_s``."""
        self._go_on_to(request.at_s if now_s is None else now_s)
        blocks, block_tokens = request.blocks, self._block_tokens
        here = [tier.tree.match(blocks) for tier in self.tiers]
        taken = self._taken(request, here)
        held = taken[-1][1]
        usable_tokens = min(held * block_tokens, request.tokens)
        new_tokens = max(0, request.tokens - max(here) * block_tokens)
        facts = RequestFacts(self._now_s, request.tokens, new_tokens, request.tenant, request.kind, request.turn)
        written = self._write(_path_of(request), here, taken, facts)
        if self.is_scored:
            self._score(request, taken, usable_tokens)
        return Served(usable_tokens, tuple(taken), tuple(written))

    def _go_on_to(self, now_s: float) -> None:
        if self._start_s is None:
            self._start_s = self._now_s = now_s
        assert now_s >= self._now_s, f"time does not go back from {self._now_s} to {now_s}"
        passed_s, self._now_s = now_s - self._now_s, now_s
        for tier in self.tiers:
            tier.tick(now_s, passed_s)

    def _taken(self, request: TraceRequest, here: Sequence[int]) -> list[tuple[int, int]]:
        """``[start, end)`` of the pages that each tier gives to a request."""
        held, taken = 0, list[tuple[int, int]]()
        for tier, pages in zip(self.tiers, here, strict=True):
            end = max(held, pages)
            if held < pages and self._load is not None:
                size = self._block_tokens
                tokens = self._load(tier.name, held * size, min(pages * size, request.tokens), request, self._now_s)
                end = min(pages, held - (-tokens // size))
            taken.append((held, end))
            held = end
        return taken

    def _write(
        self, path: Sequence[int], here: Sequence[int], taken: Sequence[tuple[int, int]], facts: RequestFacts
    ) -> list[int]:
        """What was used or computed comes into the tiers. Returns how many pages came into each."""
        written: list[int] = []
        left: list[Gone] = []  # the tier above
        keys = PrefixKeys(path)
        for tier in self.tiers:
            tier.touch(keys, facts)
        for tier, pages, (start, end) in zip(self.tiers, here, taken, strict=True):
            tree = tier.tree
            came = tree.use(path, tier.admitted(path, pages, facts), facts, reads_from=start if end > start else pages)
            if tier.write.ahead_share:
                for gone in left:
                    came += tree.use(gone.path, gone.end, None, reads_from=gone.end)
            left, tree.gone = tree.gone or [], None if tree.gone is None else []
            tier.resident_pages_max = max(tier.resident_pages_max, tree.resident_pages)
            written.append(came)
        return written

    def _score(self, request: TraceRequest, taken: Sequence[tuple[int, int]], usable_tokens: int) -> None:
        result, size, tokens = self._result, self._block_tokens, request.tokens
        for tier, (start, end) in zip(self.tiers, taken, strict=True):
            tier.used_tokens += min(end * size, tokens) - min(start * size, tokens)
        result.requests += 1
        result.references += len(request.blocks)
        result.input_tokens += request.tokens
        result.usable_tokens += usable_tokens
        result.hit_blocks += taken[-1][1]
        result.gpu_s_total += self._costs.prefill_s(0, request.tokens)
        if usable_tokens:
            result.gpu_s_saved += self._costs.prefill_s(0, usable_tokens)
        tenant = result.by_tenant.setdefault(request.tenant, TenantResult())
        tenant.requests += 1
        tenant.input_tokens += request.tokens
        tenant.usable_tokens += usable_tokens

    def result(self) -> Result:
        """After the last request."""
        span_s = self._now_s - (self._start_s or 0.0)
        self._result.span_s = span_s
        self._result.tiers = [tier.result(span_s) for tier in self.tiers]
        return self._result


def _path_of(request: TraceRequest) -> Sequence[int]:
    """The blocks of a request after its answer. What decode completes follows whole blocks of the prompt."""
    if not request.output_blocks:
        return request.blocks
    return (*request.blocks, *request.output_blocks)


def replay(
    trace: Trace,
    tiers: Sequence[TierSpec],
    *,
    load: LoadRule | None = None,
    costs: Costs | None = None,
    run_pages_max: int | None = None,
    warm_share: float = 0.0,
    checked: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """All requests at their own times. The first ``warm_share`` of them count for nothing but what they leave.

    ``checked`` asserts after each request what must hold. ``progress`` is told every thousand requests how many more
    there were.
    """
    replayer = Replayer(trace.block_tokens, tiers, load=load, costs=costs, run_pages_max=run_pages_max)
    first_scored = int(len(trace.requests) * warm_share)
    start_s = time.perf_counter()
    for number, request in enumerate(trace.requests):
        replayer.is_scored = number >= first_scored
        served = replayer.serve(request)
        if checked:
            assert 0 <= served.usable_tokens <= request.tokens, served
            for tier in replayer.tiers:
                tier.tree.check()
        if progress is not None and number % 1000 == 999:
            progress(1000)
    result = replayer.result()
    result.wall_s = time.perf_counter() - start_s
    return result
