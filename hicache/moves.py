"""Who moves the bytes of pages and states between L1 and L2: the back ends, and which is best for what."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from hicache.errors import ConfigError
from hicache.kernels import direct, reference
from hicache.kernels.legs import Joined, Layered, PagedPool, Slots
from hicache.staging import Staging

_LOG = logging.getLogger(__name__)

Fields: TypeAlias = Sequence[Layered | Joined]  # of one object of a state group, in its order
Extent: TypeAlias = tuple[int, int]  # of bytes in an object: [first, stop)


class Mover(Protocol):
    """Moves the pages, or states, of one pool to objects in L2 and back, by the rules of ``kernels/reference.py``.

    On an accelerator a call may return when its copies are enqueued on the current stream of the device.
    """

    def gather(self, objects: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
        """``objects[targets[i]] = slot sources[i]``."""
        ...

    def scatter(self, objects: torch.Tensor, *, sources: Slots, targets: Slots, layers: slice | None = None) -> None:
        """``slot targets[i] = objects[sources[i]]``; of ``layers``, by their place in the pool, or of all of them."""
        ...


@dataclass(frozen=True, slots=True)
class Moves:
    """One back end. Its movers are made once for a pool, and serve all objects that lie as those they were made with:
    pages [n_slots, layers, planes, ...], or states as bytes [n_slots, object_bytes].
    """

    name: str
    of_pages: Callable[[PagedPool, torch.Tensor, Staging], Mover]
    of_states: Callable[[Fields, torch.Tensor, Staging], Mover]


@dataclass(frozen=True, slots=True)
class _Pages:
    """By functions that need no preparation."""

    functions: Functions
    pool: PagedPool

    def gather(self, objects: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
        self.functions.gather_pages(self.pool, objects, sources=sources, targets=targets)

    def scatter(self, objects: torch.Tensor, *, sources: Slots, targets: Slots, layers: slice | None = None) -> None:
        pool = self.pool
        if layers is not None:
            pool, objects = pool[layers], objects[:, layers]
        self.functions.scatter_pages(objects, pool, sources=sources, targets=targets)


@dataclass(frozen=True, slots=True)
class _States:
    functions: Functions
    fields: Fields

    def gather(self, objects: torch.Tensor, *, sources: Slots, targets: Slots) -> None:
        self.functions.gather_states(self.fields, objects, sources=sources, targets=targets)

    def scatter(self, objects: torch.Tensor, *, sources: Slots, targets: Slots, layers: slice | None = None) -> None:
        if layers is None:
            self.functions.scatter_states(objects, self.fields, sources=sources, targets=targets)
            return
        for field, (first, stop) in zip(self.fields, field_extents(self.fields, layers), strict=True):
            part = objects[:, first:stop]
            self.functions.scatter_states(part, [_of_layers(field, layers)], sources=sources, targets=targets)


class Functions(Protocol):
    """A module such as ``hicache.kernels.reference``."""

    gather_pages: Callable[..., None]
    scatter_pages: Callable[..., None]
    gather_states: Callable[..., None]
    scatter_states: Callable[..., None]


def plain_moves(name: str, functions: Functions) -> Moves:
    """The back end of four functions."""
    return Moves(
        name,
        lambda pool, pages, staging: _Pages(functions, pool),
        lambda fields, objects, staging: _States(functions, fields),
    )


def field_extents(fields: Fields, layers: slice) -> Iterator[Extent]:
    """Where in an object the bytes of ``layers`` lie: an extent for each field."""
    begin = 0
    for field in fields:
        pieces = field.pieces if isinstance(field, Joined) else [field]
        layer_bytes = sum(piece[0][0].numel() * piece[0].element_size() for piece in pieces)
        yield begin + layers.start * layer_bytes, begin + layers.stop * layer_bytes
        begin += len(pieces[0]) * layer_bytes


def _of_layers(field: Layered | Joined, layers: slice) -> Layered | Joined:
    if isinstance(field, Joined):
        return Joined([piece[layers] for piece in field.pieces], field.axis)
    return field[layers]


REFERENCE = plain_moves("reference", reference)
DIRECT = plain_moves("direct", direct)
BACKENDS = (REFERENCE, DIRECT)  # the first one can do anything
KERNEL, STAGED = "kernel", "staged"  # by Triton, which is loaded only where its kernels run
COPIES_SETTINGS = ("auto", *(moves.name for moves in BACKENDS), KERNEL, STAGED)

_RUN_BYTES_MIN, _RUN_BYTES_MAX = 256, 1 << 20  # beyond, a run costs no less, or nothing beside its bytes
_SAMPLE_BYTES = 4 << 20  # of one measured copy; on an accelerator more, for the latency of the bus not to hide the rest
_SAMPLE_BYTES_CUDA = 32 << 20
_SAMPLE_RUNS_MAX = 2048
_SAMPLE_LAYERS = 8
_LAYER_BYTES_MIN = 32 << 10  # of one page: shorter runs are several to a layer there, as slices of heads are
_ROUNDS = 3


def checked_copies(setting: str) -> str:
    """Raises ConfigError unless it is one of COPIES_SETTINGS."""
    if setting not in COPIES_SETTINGS:
        raise ConfigError("copies", setting, f"one of {', '.join(COPIES_SETTINGS)}")
    return setting


def choose_moves(setting: str, *, run_bytes: int, by_layer: bool, device: torch.device) -> Sequence[Moves]:
    """The back ends for copies whose runs have ``run_bytes`` on average, the best one first.

    ``auto`` has those that work on ``device``, the fastest with runs of that size first, measured once in each process.
    ``by_layer``: L1 is not one tensor. Raises ConfigError for an unknown setting.
    """
    if checked_copies(setting) in (KERNEL, STAGED):
        return [moves for moves in kernel_backends() if moves.name == setting]
    if setting != "auto":
        return [moves for moves in BACKENDS if moves.name == setting]
    size_class = 1 << max(_RUN_BYTES_MIN, min(run_bytes, _RUN_BYTES_MAX)).bit_length() - 1
    return by_speed(backends_on(device), run_bytes=size_class, by_layer=by_layer, device=device)


def backends_on(device: torch.device) -> Sequence[Moves]:
    """What ``auto`` chooses from: kernels only where they are compiled, and with Triton there."""
    if device.type != "cuda":
        return BACKENDS
    try:
        return (*BACKENDS, *kernel_backends())
    except ImportError as error:
        _LOG.warning("no copies through kernels on %s: %r", device, error)
        return BACKENDS


def quantises_by_kernels(device: torch.device) -> bool:
    """Whether ``auto`` has float8 pages converted by kernels: where they are compiled, and have been found right."""
    if device.type != "cuda" or len(backends_on(device)) == len(BACKENDS):
        return False
    from hicache import kernel_moves

    return kernel_moves.quantises_right(device)


def kernel_backends() -> tuple[Moves, Moves]:
    """Triton straight over the bus, and through staging. Raises ImportError."""
    from hicache import kernel_moves

    return kernel_moves.KERNEL, kernel_moves.STAGED


@functools.cache
def by_speed(backends: Sequence[Moves], *, run_bytes: int, by_layer: bool, device: torch.device) -> Sequence[Moves]:
    """Whoever loads and backs up a sample in the least time first. One that fails at it, or moves wrong bytes, is left
    out; the first one is trusted, and alone when there is no memory for a sample.
    """
    if len(backends) == 1:
        return backends
    try:
        sample = _Sample(run_bytes, by_layer=by_layer, device=device)
    except RuntimeError as error:
        _LOG.warning("copies on %s through %r, for lack of a measurement: %r", device, backends[0].name, error)
        return backends[:1]
    able = [moves for moves in backends if moves is backends[0] or sample.is_moved_by(moves)]
    best_s = {moves: min(times) for moves, times in zip(able, _in_turns(sample, able), strict=True)}
    figures = ", ".join(f"{moves.name} {best_s[moves] * 1e3:.2f} ms" for moves in able)
    _LOG.debug("%d bytes up and down in runs of %d on %s: %s", sample.size_bytes, run_bytes, device, figures)
    return sorted(able, key=best_s.__getitem__)


def _in_turns(sample: _Sample, backends: Sequence[Moves]) -> list[list[float]]:
    movers = [sample.mover(moves) for moves in backends]
    rounds = [[sample.time_s(mover) for mover in movers] for _ in range(_ROUNDS)]
    return [list(times) for times in zip(*rounds, strict=True)]


def _scrambled(size_bytes: int) -> torch.Tensor:
    """Words that are all different, so that a run in the wrong place is a wrong byte."""
    return torch.arange(size_bytes // 8).mul_(0x1E3779B97F4A7C15).view(torch.uint8)


class _Sample:
    """A few pages, in memory of its own, of an L1 and an L2 whose copies go in runs of one size."""

    def __init__(self, run_bytes: int, *, by_layer: bool, device: torch.device) -> None:
        runs = max(1, _LAYER_BYTES_MIN // run_bytes)
        size_max = _SAMPLE_BYTES_CUDA if device.type == "cuda" else _SAMPLE_BYTES
        bytes_max, runs_max = size_max // run_bytes, _SAMPLE_RUNS_MAX
        page_count = max(1, min(bytes_max, runs_max) // (runs * _SAMPLE_LAYERS))
        wide = torch.empty((_SAMPLE_LAYERS, page_count, runs, 2 * run_bytes), dtype=torch.uint8, device=device)
        memory = wide[..., :run_bytes]
        self._pool = list(memory) if by_layer else memory
        shape = (page_count, _SAMPLE_LAYERS, runs, run_bytes)
        self._pages = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._slots = list(range(page_count))
        self._device = device
        self._staging = Staging(device, size_bytes=max(1, self._pages.numel() // 2))  # so that it is used twice
        self.size_bytes = self._pages.numel()

    def mover(self, moves: Moves) -> Mover:
        """Made for this sample."""
        return moves.of_pages(self._pool, self._pages, self._staging)

    def is_moved_by(self, moves: Moves) -> bool:
        """Whether what goes up and down again is what it was."""
        expected = _scrambled(self.size_bytes).view(self._pages.shape)
        try:
            mover = self.mover(moves)
            self._pages.copy_(expected)
            mover.scatter(self._pages, sources=self._slots, targets=self._slots[::-1])
            self._settle()
            self._pages.zero_()
            mover.gather(self._pages, sources=self._slots[::-1], targets=self._slots)
            self._settle()
        except Exception as error:
            _LOG.warning("no copies through %r on %s: %r", moves.name, self._device, error)
            return False
        if torch.equal(self._pages, expected):
            return True
        _LOG.warning("no copies through %r on %s: it moved wrong bytes", moves.name, self._device)
        return False

    def time_s(self, mover: Mover) -> float:
        """Of one load and one backup."""
        start_s = time.perf_counter()
        mover.scatter(self._pages, sources=self._slots, targets=self._slots[::-1])
        mover.gather(self._pages, sources=self._slots, targets=self._slots[::-1])
        self._settle()
        return time.perf_counter() - start_s

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
