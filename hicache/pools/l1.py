"""L1: the pages and states that a model computes with, in tensors of ours or adopted from the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hicache.errors import ConfigError, SpecError, UsageError
from hicache.kernels.legs import Joined, Layered, Layers, PagedPool
from hicache.pools.dtypes import torch_dtype
from hicache.slices import Span
from hicache.spec import CacheSpec, PagedGroup, StateField, StateGroup


class L1Pool:
    """Slots for every group of one rank: pages for paged groups, states with all their fields for state groups.

    Shapes are the rank's own (``rank.groups``). A group that the rank lacks has no tensor, and 0 ``slot_counts``.
    ``paged[group_index]``: [layers, n_pages, planes, page_tokens, heads, head_dim]; ``state[group_index][field]``:
    [layers, n_slots, *shape]; both zeroed at first. Both hold what is one tensor; an adopted pool keeps what came layer
    by layer out of them. The tensors are the engine's to compute in; which slot holds what is not decided here.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        rank: int | None = None,
        pages: int | Mapping[int, int],
        state_slots: int | Mapping[int, int] = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        """Allocate zeroed tensors: slots for every group of the kind, or by group index.

        ``rank`` may be left out where there is one. Raises ConfigError or SpecError.
        """
        self.spec = spec
        self.rank = spec.rank(rank)
        self.device = checked_device(device)
        paged: dict[int, torch.Tensor] = {}
        states: dict[int, dict[str, torch.Tensor]] = {}
        with torch.inference_mode(mode=False):  # a pool made inside of it could not be written outside of it
            for index, group in enumerate(self.rank.groups):
                if group is None:
                    continue
                if isinstance(group, PagedGroup):
                    count = _slots(pages, index, setting="l1_pages", group=group.name)
                    shape = (len(group.layers), count, *page_shape(group, spec.page_tokens))
                    paged[index] = self._zeros(shape, group.dtype, setting="l1_pages", count=count)
                else:
                    count = _slots(state_slots, index, setting="l1_state_slots", group=group.name)
                    states[index] = {
                        field.name: self._zeros(
                            (len(group.layers), count, *field.shape), field.dtype, setting="l1_state_slots", count=count
                        )
                        for field in group.fields
                    }
        self._take(dict(paged), {index: dict(fields) for index, fields in states.items()})

    @classmethod
    def adopt(
        cls, spec: CacheSpec, tensors: Mapping[int, PagedPool | Mapping[str, Layered]], *, rank: int | None = None
    ) -> L1Pool:
        """A pool over the engine's own tensors, by group index, which stay the engine's: nothing is copied or changed.
        None for a group that the rank lacks.

        A paged group: one tensor as above, or per layer one [n_pages, planes, page_tokens, heads, head_dim], or per
        layer its planes [n_pages, page_tokens, heads, head_dim]. A state group: by field one tensor as above, or per
        layer one [n_slots, *shape]. Any strides whose slots do not overlap. Raises SpecError for what does not fit.
        """
        described = spec.rank(rank)
        expected = [index for index, group in enumerate(described.groups) if group is not None]
        if sorted(tensors) != expected:
            raise SpecError("adopted groups", sorted(tensors), f"the group indices {expected}")
        paged: dict[int, PagedPool] = {}
        states: dict[int, Mapping[str, Layered]] = {}
        for index in expected:
            group, adopted = described.groups[index], tensors[index]
            assert group is not None
            if isinstance(group, StateGroup):
                states[index] = _checked_fields(group, adopted)
            elif isinstance(adopted, Mapping):
                raise SpecError(f"adopted {group.name}", sorted(adopted), "tensors: it is a paged group")
            else:
                paged[index] = _checked_pages(group, adopted, page_tokens=spec.page_tokens)
        pool = cls.__new__(cls)
        pool.spec = spec
        pool.rank = described
        pool.device = _common_device(paged, states)
        pool._take(paged, states)
        return pool

    def pages(self, group: int) -> PagedPool:
        """The pages of a paged group, as the copies take them. Raises UsageError for another group."""
        if group not in self._paged:
            raise UsageError(f"group {group} is not a paged group of this L1")
        return self._paged[group]

    def fields(self, group: int, *, transient: bool) -> list[Layered]:
        """The fields of a state group that are, or are not, transient, in the order of the spec. Raises UsageError."""
        if group not in self._states:
            raise UsageError(f"group {group} is not a state group of this L1")
        described = self.rank.groups[group]
        assert isinstance(described, StateGroup)
        return [self._states[group][field.name] for field in described.fields if field.transient == transient]

    def page_parts(self, group: int) -> list[PagedPool]:
        """The heads of each of the rank's shards, in all pages of a paged group. Raises UsageError."""
        pool = self.pages(group)
        return [_heads_of(pool, shard.spans[0][0]) for shard in self.rank.shards[group]]

    def state_parts(self, group: int) -> list[list[Layered | Joined]]:
        """What each of the rank's shards has of every persistent field of a state group. Raises UsageError."""
        fields = self.fields(group, transient=False)
        described = self.rank.groups[group]
        assert isinstance(described, StateGroup)
        kept = list(zip(fields, described.persistent_fields, strict=True))
        return [
            [_part_of(field, about, spans) for (field, about), spans in zip(kept, shard.spans, strict=True)]
            for shard in self.rank.shards[group]
        ]

    def _take(self, paged: Mapping[int, PagedPool], states: Mapping[int, Mapping[str, Layered]]) -> None:
        self._paged = paged
        self._states = states
        self.paged = {index: pool for index, pool in paged.items() if isinstance(pool, torch.Tensor)}
        self.state = {
            index: {name: field for name, field in fields.items() if isinstance(field, torch.Tensor)}
            for index, fields in states.items()
        }
        counts = {index: len(_first_layer(pool)) for index, pool in paged.items()}
        counts |= {index: len(_first_layer(next(iter(fields.values())))) for index, fields in states.items()}
        self.slot_counts = tuple(counts.get(index, 0) for index in range(len(self.spec.groups)))

    def _zeros(self, shape: tuple[int, ...], dtype: str, *, setting: str, count: int) -> torch.Tensor:
        try:
            return torch.zeros(shape, dtype=torch_dtype(dtype), device=self.device)
        except (RuntimeError, MemoryError) as error:  # torch tells out of memory by RuntimeError, also on CPU
            raise ConfigError(setting, count, f"as many slots as {self.device} has memory for: {error}") from error


def page_shape(group: PagedGroup, page_tokens: int) -> tuple[int, int, int, int]:
    """The shape of one page in one layer: [planes, page_tokens, heads, head_dim]."""
    return group.planes, page_tokens, group.heads, group.head_dim


def _heads_of(pool: PagedPool, span: Span) -> PagedPool:
    if isinstance(pool, torch.Tensor) or isinstance(pool[0], torch.Tensor):
        return _narrowed(pool, -2, span)  # type: ignore[arg-type]  # a first layer that is a tensor makes it Layered
    first, stop = span
    return [[plane.narrow(-2, first, stop - first) for plane in planes] for planes in pool]


def _part_of(field: Layered, about: StateField, spans: tuple[Span, ...]) -> Layered | Joined:
    if about.split is None:
        return field
    axis = about.split.axis - len(about.shape)
    if spans == ((0, about.shape[axis]),):
        return field
    return Joined([_narrowed(field, axis, span) for span in spans], axis)


def _narrowed(layered: Layered, axis: int, span: Span) -> Layered:
    first, stop = span
    if isinstance(layered, torch.Tensor):
        return layered.narrow(axis, first, stop - first)
    return Layers([tensor.narrow(axis, first, stop - first) for tensor in layered])


def checked_device(device: str | torch.device) -> torch.device:
    try:
        checked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", str(device), "cpu, cuda or cuda:<index>") from error
    if checked.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device", str(device), f"cpu: torch {torch.__version__} finds no CUDA device here")
        return torch.empty(0, device=checked).device  # with its index, as tensors tell it
    if checked.type != "cpu":
        raise ConfigError("device", str(device), "cpu, cuda or cuda:<index>")
    return checked


def _slots(counts: int | Mapping[int, int], index: int, *, setting: str, group: str) -> int:
    count = counts if isinstance(counts, int) else counts.get(index, 0)
    if count < 1:
        raise ConfigError(setting, count, f"at least 1 slot for group {group!r}")
    return count


def _checked_pages(group: PagedGroup, pool: PagedPool, *, page_tokens: int) -> PagedPool:
    shape = page_shape(group, page_tokens)
    layers = list(pool)
    _check_layer_count(group.name, len(layers), len(group.layers))
    if isinstance(layers[0], torch.Tensor):
        _check_tensors(group.name, layers, inner=shape, dtype=group.dtype)
        return pool if isinstance(pool, torch.Tensor) else Layers(layers)
    if any(isinstance(planes, torch.Tensor) or len(planes) != group.planes for planes in layers):
        raise SpecError(f"adopted {group.name}", "layers", f"{group.planes} planes in every layer")
    _check_tensors(group.name, [plane for planes in layers for plane in planes], inner=shape[1:], dtype=group.dtype)
    return pool


def _checked_fields(group: StateGroup, fields: object) -> Mapping[str, Layered]:
    names = [field.name for field in group.fields]
    if not isinstance(fields, Mapping) or set(fields) != set(names):
        raise SpecError(f"adopted {group.name}", fields and type(fields).__name__, f"tensors by field: {names}")
    for field in group.fields:
        name = f"{group.name}.{field.name}"
        _check_layer_count(name, len(fields[field.name]), len(group.layers))
        _check_tensors(name, list(fields[field.name]), inner=field.shape, dtype=field.dtype)
    if len({len(_first_layer(field)) for field in fields.values()}) != 1:
        raise SpecError(f"adopted {group.name}", "fields", "equally many slots in every field")
    return fields


def _check_layer_count(name: str, count: int, expected: int) -> None:
    if count != expected:
        raise SpecError(f"adopted {name}", f"{count} layers", f"{expected} layers")


def _check_tensors(name: str, tensors: Sequence[torch.Tensor], *, inner: tuple[int, ...], dtype: str) -> None:
    """``tensors``: one [n_slots, *inner] per layer (and plane), alike in dtype and device."""
    expected = (len(tensors[0]), *inner)
    for tensor in tensors:
        if tuple(tensor.shape) != expected or expected[0] < 1:
            raise SpecError(f"adopted {name}", tuple(tensor.shape), f"the shape {expected}, with at least one slot")
        if tensor.dtype != torch_dtype(dtype):
            raise SpecError(f"adopted {name}", str(tensor.dtype), dtype)
        if tensor.device != tensors[0].device:
            raise SpecError(f"adopted {name}", str(tensor.device), f"all layers on {tensors[0].device}")
        if _overlaps_itself(tensor):
            raise SpecError(f"adopted {name}", tensor.stride(), "strides under which no two elements share memory")


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: dimensions, by stride, must each step over all the smaller ones."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += stride * (size - 1)
    return False


def _first_layer(pool: PagedPool) -> torch.Tensor:
    """The slots [n_slots, *inner] of the first layer, or of its first plane."""
    layer = pool[0]
    return layer if isinstance(layer, torch.Tensor) else layer[0]


def _common_device(paged: Mapping[int, PagedPool], states: Mapping[int, Mapping[str, Layered]]) -> torch.device:
    pools: list[PagedPool] = [*paged.values(), *(field for fields in states.values() for field in fields.values())]
    devices = {_first_layer(pool).device for pool in pools}
    if len(devices) != 1:
        raise SpecError("adopted devices", sorted(map(str, devices)), "all groups of a rank on one device")
    return devices.pop()
