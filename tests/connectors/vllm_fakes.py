"""What the vLLM connector meets in vLLM, small: specs, registered tensors, requests; and a store that remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch

from hicache.connectors.vllm_pages import Slots
from hicache.stats import DirectoryStats


@dataclass
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = torch.float32
    max_tp_shards: int | None = None


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 64


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    cache_dtype_str: str | None = None


@dataclass
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class MambaSpec:
    block_size: int
    shapes: tuple[tuple[int, ...], ...] = ((3, 8), (2, 4, 4))
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    mamba_cache_mode: str = "align"
    tp_replicated: bool = False


@dataclass
class GroupSpec:
    layer_names: list[str]
    kv_cache_spec: Any
    host_resident: bool = False


@dataclass
class UniformSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any]


@dataclass
class KvCacheConfig:
    num_blocks: int
    kv_cache_groups: list[GroupSpec]

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        return tuple(range(len(self.kv_cache_groups)))


LAYOUTS = {  # physical order of [layers, blocks, heads, rows, row], as vLLM names it
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def attention_tensors(
    names: Sequence[str], shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str = "LBHNC"
) -> dict[str, torch.Tensor]:
    """[blocks, heads, rows, row] by layer, in one memory of that layout; every element has another value."""
    order = LAYOUTS[layout]
    logical = (len(names), *shape)
    memory = torch.arange(torch.Size(logical).numel(), dtype=torch.int32).to(dtype)
    memory = memory.view([logical[axis] for axis in order])
    views = memory.permute([order.index(axis) for axis in range(5)])
    return dict(zip(names, views.unbind(0), strict=True))


def state_tensors(names: Sequence[str], blocks: int, size_bytes: int, padded_bytes: int) -> dict[str, torch.Tensor]:
    """int8 [blocks, 1, 1, bytes] by layer, each block padded to the page of another group."""
    found = {}
    for name in names:
        memory = torch.randint(-128, 128, (blocks * padded_bytes,), dtype=torch.int8)
        found[name] = memory.as_strided((blocks, 1, 1, size_bytes), (padded_bytes, size_bytes, size_bytes, 1))
    return found


def block_hashes(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Chained, one for each full block."""
    found: list[bytes] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = found[-1] if found else b""
        found.append(blake2b(parent + repr(tokens[start : start + block_tokens]).encode(), digest_size=32).digest())
    return found


@dataclass(eq=False)
class Request:
    """vLLM's, as far as the connector reads it."""

    request_id: str
    tokens: list[int]
    hash_tokens: int
    num_computed_tokens: int = 0
    shared_prefix_boundary: int = 0
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return block_hashes(self.tokens, self.hash_tokens)


class Step(NamedTuple):
    number: int
    after: tuple[int, ...]


@dataclass
class Load:
    done: bool = False
    failed: bool = False
    by_source: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Record:
    root: tuple[Any, ...]
    keys: list[tuple[Any, bytes]]
    token_count: int
    load: Load | None = None
    released: bool = False
    lost: set[tuple[Any, bytes]] = field(default_factory=set)


class FakeCache:
    """SlotCache in its contract, over a dict: what was saved can be loaded, by groups; a test ends the loads."""

    def __init__(self, page_tokens: int, *, groups: int, states: Sequence[int] = ()) -> None:
        self.page_tokens = page_tokens
        self.attention_groups = set(range(groups)) - set(states)
        self.states = set(states)
        self.store: dict[tuple[Any, bytes], set[int]] = {}
        self.records: list[Record] = []
        self.log: list[tuple[Any, ...]] = []
        self.ready = True
        self.steps = 0
        self.closed = False
        self.settles = True
        self.stats = DirectoryStats((1,) * groups)

    def open(
        self, page_hashes: Sequence[bytes], *, token_count: int, salt: bytes | None, extras: Mapping[str, Any] | None
    ) -> Record:
        root = (salt, tuple(sorted((extras or {}).items())))
        record = Record(root, [(root, each) for each in page_hashes], token_count)
        self.records.append(record)
        return record

    def append(self, request: Record, page_hashes: Sequence[bytes], *, token_count: int) -> None:
        assert not request.released
        request.keys += [(request.root, each) for each in page_hashes]
        request.token_count = token_count
        assert len(request.keys) == token_count // self.page_tokens

    def prefetch(self, request: Record, *, beyond: int) -> None:
        self.log.append(("prefetch", beyond))

    def is_ready(self, request: Record) -> bool:
        return self.ready

    def attention(self, request: Record) -> int:
        return self._attention(request, 0) * self.page_tokens

    def _attention(self, request: Record, own: int) -> int:
        pages = own
        while pages < len(request.keys) and self.attention_groups <= self.store.get(request.keys[pages], set()):
            pages += 1
        return pages

    def usable(self, request: Record, *, beyond: int) -> int:
        own = beyond // self.page_tokens
        for pages in range(self._attention(request, own), own, -1):
            key = request.keys[pages - 1]
            fits = pages * self.page_tokens < request.token_count and not request.lost & set(request.keys[:pages])
            if fits and self.states <= self.store.get(key, set()):
                return pages * self.page_tokens
        return beyond

    def load(self, request: Record, *, beyond: int, tokens: int, slots: Slots) -> Load:
        assert not request.released
        self.log.append(("load", self.steps, beyond, tokens, slots))
        request.load = Load()
        return request.load

    def save(self, request: Record, slots: Slots) -> None:
        assert not request.released
        self.log.append(("save", self.steps, slots))
        for group, pages in slots.items():
            for page in pages:
                self.store.setdefault(request.keys[page], set()).add(group)

    def step(self, *, reuses: Mapping[int, Sequence[int]] | None) -> Step:
        self.steps += 1
        self.log.append(("step", self.steps, None if reuses is None else sorted(reuses[0])))
        return Step(self.steps, ())

    def tell_step(self, parts: Sequence[tuple[int, int]], *, seconds: float) -> None:
        self.log.append(("tell_step", list(parts), seconds))

    def release(self, request: Record) -> None:
        assert not request.released
        request.released = True

    def settle(self, *, timeout_s: float) -> bool:
        self.log.append(("settle", timeout_s))
        return self.settles

    def close(self) -> None:
        self.closed = True

    def fail(self, record: Record) -> None:
        """The load of a request ends without its bytes, which is remembered."""
        assert record.load is not None
        record.load.done = record.load.failed = True
        record.lost.add(record.keys[0])
