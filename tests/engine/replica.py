"""A replica in one process: the ranks of a spec, each with pools and an executor of its own, over one L3.

What each rank must hold is cut out of whole-model tensors by ``shard_of``, which knows nothing of slices and spans: it
repeats heads for the ranks that share them, and chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch

from hicache.executor import Executor, ExecutorLimits
from hicache.jobs import CopyItem, CopyJob, CopyKind, FetchJob, Job, LookupItem, LookupJob, StoreJob, TransferItem
from hicache.kernels.reference import Layered, PagedPool
from hicache.keys import BlockKeys
from hicache.l3 import L3
from hicache.outcome import Outcome
from hicache.pools import L1Pool, L2Pool
from hicache.pools.dtypes import torch_dtype
from hicache.spec import CacheSpec, HeadSplit, PagedGroup, StateField, StateGroup
from tests.engine.fakes import Completions
from tests.engine.specs import POISON, fill_with_noise, poison

Whole = dict[tuple[int, str], torch.Tensor]  # (group, field): [layers, n_pages, *shape of the whole model]
OpenL3 = Callable[[L2Pool], L3]

L1_SLOTS = 9
L2_SLOTS = 7


def paged_shape(group: PagedGroup, page_tokens: int) -> tuple[int, ...]:
    return (group.planes, page_tokens, group.heads, group.head_dim)


def whole_model(spec: CacheSpec, *, pages: int, seed: int = 0) -> Whole:
    """Random pages, and a random state at the end of each, of all layers and heads."""
    whole: Whole = {}
    for index, group in enumerate(spec.groups):
        if isinstance(group, PagedGroup):
            shapes = {"": (paged_shape(group, spec.page_tokens), group.dtype)}
        else:
            shapes = {field.name: (field.shape, field.dtype) for field in group.fields}
        for name, (shape, dtype) in shapes.items():
            whole[index, name] = torch.empty((len(group.layers), pages, *shape), dtype=torch_dtype(dtype))
            fill_with_noise(whole[index, name], seed + 100 * index + len(whole))
    return whole


def heads_of_rank(tensor: torch.Tensor, axis: int, heads: int, *, tp_size: int, tp_rank: int) -> torch.Tensor:
    """What an engine's weights give a rank of a tensor whose ``axis`` is ``heads`` heads of equal length."""
    length = tensor.shape[axis] // heads
    by_head = tensor.unflatten(axis, (heads, length))
    if heads < tp_size:
        by_head = by_head.repeat_interleave(tp_size // heads, dim=axis)
    return by_head.chunk(tp_size, dim=axis)[tp_rank].flatten(axis, axis + 1)


def shard_of(spec: CacheSpec, whole: Whole, rank: int) -> Whole:
    """The same as ``whole``, of the layers and heads of one rank; nothing of a group that its stage lacks."""
    stage, tp_rank = divmod(rank, spec.tp_size)
    bounds = [0, *torch.tensor(spec.pp_layers).cumsum(0).tolist()] if spec.pp_layers else [0, 10**9]
    shards: Whole = {}
    for (index, name), tensor in whole.items():
        group = spec.groups[index]
        rows = [row for row, layer in enumerate(group.layers) if bounds[stage] <= layer < bounds[stage + 1]]
        if not rows:
            continue
        local = tensor[rows]
        parallel = {"tp_size": spec.tp_size, "tp_rank": tp_rank}
        if isinstance(group, PagedGroup):
            local = heads_of_rank(local, 4, group.heads, **parallel)
        else:
            (about,) = [field for field in group.fields if field.name == name]
            if about.split is not None:
                axis = 2 + about.split.axis
                sections = about.split.sections or ((about.shape[about.split.axis], 1),)
                pieces = local.split([heads * length for heads, length in sections], dim=axis)
                local = torch.cat(
                    [
                        heads_of_rank(piece, axis, heads, **parallel)
                        for piece, (heads, _) in zip(pieces, sections, strict=True)
                    ],
                    dim=axis,
                )
        shards[index, name] = local.contiguous()
    return shards


def poisoned_like(tensor: torch.Tensor, slots: int) -> torch.Tensor:
    made = torch.empty((tensor.shape[0], slots, *tensor.shape[2:]), dtype=tensor.dtype)
    poison(made)
    return made


def adopted(tensors: Whole, spec: CacheSpec, form: str) -> dict[int, PagedPool | dict[str, Layered]]:
    """The tensors as an engine may have them: ``one`` for all layers, one a ``layer``, or one a ``plane`` of each."""
    pools: dict[int, PagedPool | dict[str, Layered]] = {}
    for (index, name), tensor in tensors.items():
        layers: Layered = tensor if form == "one" else list(tensor)
        if name:
            states = pools.setdefault(index, {})
            assert isinstance(states, dict)
            states[name] = layers
        elif form == "plane":
            pools[index] = [[layer[:, plane] for plane in range(layer.shape[1])] for layer in tensor]
        else:
            pools[index] = layers
    return pools


@dataclass
class RankRig:
    """One rank: its tensors (poisoned at first), its pools and its executor."""

    spec: CacheSpec
    number: int
    held: Whole
    l1: L1Pool
    l2: L2Pool
    executor: Executor
    completions: Completions
    job_count: int = 0

    def run(self, make: Callable[[int], Job]) -> tuple[Outcome, ...]:
        self.job_count += 1
        self.executor.submit(make(self.job_count))
        return self.completions.outcomes(self.job_count)


@dataclass
class Replica:
    """All ranks of ``spec``. ``open_l3`` gives each rank its way to what they share."""

    spec: CacheSpec
    open_l3: OpenL3
    form: str = "one"
    limits: ExecutorLimits | None = None
    ranks: list[RankRig] = field(default_factory=list)

    def __enter__(self) -> Self:
        like = whole_model(self.spec, pages=1)
        for number in range(self.spec.rank_count):
            held = {place: poisoned_like(part, L1_SLOTS) for place, part in shard_of(self.spec, like, number).items()}
            l1 = L1Pool.adopt(self.spec, adopted(held, self.spec, self.form), rank=number)
            l2 = L2Pool(self.spec, [L2_SLOTS] * len(self.spec.groups), rank=number)
            poison(torch.frombuffer(l2.buffer, dtype=torch.uint8))
            completions = Completions()
            executor = Executor(self.spec, l1, l2, self.open_l3(l2), on_complete=completions, limits=self.limits)
            self.ranks.append(RankRig(self.spec, number, held, l1, l2, executor, completions))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self.ranks:
            assert rank.executor.close()
            rank.l2.close()

    def keys(self, count: int) -> list[bytes]:
        """The block keys of a prompt, which have the namespace in them."""
        keys = BlockKeys(self.spec.namespace, page_tokens=self.spec.page_tokens)
        return keys.chain(list(range(count * self.spec.page_tokens)), parent=keys.root(salt=None, extras=None))

    def write(self, whole: Whole, *, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> list[Outcome]:
        """Every rank computes its part of the pages, and they are written down. Outcomes of items over all ranks."""
        for rank in self.ranks:
            for place, part in shard_of(self.spec, whole, rank.number).items():
                rank.held[place][:, list(l1_slots)] = part
        self._all_ok(lambda job: CopyJob(job, CopyKind.BACKUP, self._copies(l1_slots, l2_slots)))
        return self.over_ranks(lambda job: StoreJob(job, self._transfers(l2_slots)))

    def lookup(self, *, count: int) -> list[Outcome]:
        """Outcomes of all groups of ``count`` pages: every rank asks for what it would read."""
        keys = self.keys(count)
        items = tuple(LookupItem(group, key) for group in range(len(self.spec.groups)) for key in keys)
        return self.over_ranks(lambda job: LookupJob(job, items))

    def fetch(self, *, l2_slots: Sequence[int]) -> list[Outcome]:
        return self.over_ranks(lambda job: FetchJob(job, self._transfers(l2_slots)))

    def load(self, *, l2_slots: Sequence[int], l1_slots: Sequence[int]) -> None:
        self._all_ok(lambda job: CopyJob(job, CopyKind.LOAD, self._copies(l2_slots, l1_slots)))

    def over_ranks(self, make: Callable[[int], Job]) -> list[Outcome]:
        """The worst outcome of each item, as the directory joins them."""
        outcomes = [rank.run(make) for rank in self.ranks]
        return [max(of_item) for of_item in zip(*outcomes, strict=True)]

    def check_loaded(self, whole: Whole, *, l1_slots: Sequence[int]) -> None:
        """Every rank holds its part of the pages, nothing transient, and poison everywhere else."""
        for rank in self.ranks:
            for place, part in shard_of(self.spec, whole, rank.number).items():
                expected = poisoned_like(part, L1_SLOTS)
                expected[:, list(l1_slots)] = torch.zeros_like(part) if self._is_transient(place) else part
                held = rank.held[place]
                assert torch.equal(held.view(torch.uint8), expected.view(torch.uint8)), (rank.number, place)

    def check_padding(self, *, l2_slots: Sequence[int]) -> None:
        """In the L2 of every rank, all that is no shard in a used slot is poison."""
        for rank in self.ranks:
            held = torch.frombuffer(rank.l2.buffer, dtype=torch.uint8)
            untouched = torch.ones(rank.l2.size_bytes, dtype=torch.bool)
            for group, shards in enumerate(rank.l1.rank.shards):
                for part, shard in enumerate(shards):
                    for slot in l2_slots:
                        start = rank.l2.view(group, part)[slot].data_ptr() - held.data_ptr()
                        assert start % 4096 == 0
                        assert untouched[start : start + shard.size_bytes].all(), "extents of shards do not overlap"
                        untouched[start : start + shard.size_bytes] = False
            assert (held[untouched] == POISON).all()

    def _all_ok(self, make: Callable[[int], Job]) -> None:
        assert set(self.over_ranks(make)) == {Outcome.OK}

    def _copies(self, sources: Sequence[int], targets: Sequence[int]) -> tuple[CopyItem, ...]:
        pairs = list(zip(sources, targets, strict=True))
        return tuple(CopyItem(group, *pair) for group in range(len(self.spec.groups)) for pair in pairs)

    def _transfers(self, slots: Sequence[int]) -> tuple[TransferItem, ...]:
        named = list(zip(self.keys(len(slots)), slots, strict=True))
        return tuple(TransferItem(group, key, slot) for group in range(len(self.spec.groups)) for key, slot in named)

    def _is_transient(self, place: tuple[int, str]) -> bool:
        group = self.spec.groups[place[0]]
        if not isinstance(group, StateGroup):
            return False
        return any(about.name == place[1] and about.transient for about in group.fields)


def with_tp(spec: CacheSpec, tp_size: int) -> CacheSpec:
    """The replica of another size that stores the same objects."""
    return dataclasses.replace(spec, tp_size=tp_size)


def gdn(name: str, layers: tuple[int, ...], *, key_heads: int, value_heads: int, dtype: str = "bfloat16") -> StateGroup:
    """A gated delta rule as vLLM keeps it: [q | k | v] convolution, a state for each value head, rings of ReplaySSM."""
    sections = ((key_heads, 3), (key_heads, 3), (value_heads, 5))
    channels = sum(heads * elements for heads, elements in sections)
    return StateGroup(
        name,
        layers,
        (
            StateField("conv", (3, channels), dtype, split=HeadSplit(1, sections)),
            StateField("ring", (2, value_heads, 5), "float32", transient=True, split=HeadSplit(1)),
            StateField("temporal", (value_heads, 5, 3), "float32", split=HeadSplit(0)),
            StateField("ring_count", (1,), "int32", transient=True),
        ),
    )


def mamba2(name: str, layers: tuple[int, ...], *, heads: int, groups: int) -> StateGroup:
    """Mamba2 as vLLM keeps it, channels first: [x | B | C] convolution with B and C by group, a state for each head."""
    sections = ((heads, 4), (groups, 3), (groups, 3))
    channels = sum(count * elements for count, elements in sections)
    return StateGroup(
        name,
        layers,
        (
            StateField("conv", (channels, 3), "int8", split=HeadSplit(0, sections)),
            StateField("temporal", (heads, 4, 3), "float32", split=HeadSplit(0)),
            StateField("step", (3,), "int8"),
        ),
    )
