"""Who moves the bytes of pages and states between L1 and L2: the back ends, and which is best for what."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hicache.errors import ConfigError
from hicache.kernels import direct, reference

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Moves:
    """One back end: four functions, with the rules of those in ``hicache.kernels.reference``.

    On an accelerator they may return when the copies are enqueued on its current stream.
    """

    name: str
    gather_pages: Callable[..., None]
    scatter_pages: Callable[..., None]
    gather_states: Callable[..., None]
    scatter_states: Callable[..., None]


REFERENCE = Moves(
    "reference",
    reference.gather_pages,
    reference.scatter_pages,
    reference.gather_states,
    reference.scatter_states,
)
DIRECT = Moves("direct", direct.gather_pages, direct.scatter_pages, direct.gather_states, direct.scatter_states)
BACKENDS = (REFERENCE, DIRECT)  # the first one can do anything
KERNEL = "kernel"  # Triton, see hicache.kernel_copies: only when it is asked for
COPIES_SETTINGS = ("auto", *(moves.name for moves in BACKENDS), KERNEL)

_RUN_BYTES_MIN, _RUN_BYTES_MAX = 256, 1 << 20  # beyond, a run costs no less, or nothing beside its bytes
_SAMPLE_BYTES = 4 << 20  # of one measured copy
_SAMPLE_RUNS_MAX = 2048
_SAMPLE_LAYERS = 8
_LAYER_BYTES_MIN = 32 << 10  # of one page: shorter runs are several to a layer there, as slices of heads are
_ROUNDS = 3


def checked_copies(setting: str) -> str:
    """Raises ConfigError unless it is one of COPIES_SETTINGS."""
    if setting not in COPIES_SETTINGS:
        raise ConfigError("copies", setting, f"one of {', '.join(COPIES_SETTINGS)}")
    return setting


def choose_moves(setting: str, *, run_bytes: int, by_layer: bool, device: torch.device) -> Moves:
    """The back end for copies whose runs have ``run_bytes`` on average.

    ``auto`` takes the one that is fastest on ``device`` with runs of that size, measured once in each process.
    ``by_layer``: L1 is not one tensor. Raises ConfigError for an unknown setting.
    """
    if checked_copies(setting) != "auto":
        return next(moves for moves in BACKENDS if moves.name == setting)
    size_class = 1 << max(_RUN_BYTES_MIN, min(run_bytes, _RUN_BYTES_MAX)).bit_length() - 1
    return fastest(BACKENDS, run_bytes=size_class, by_layer=by_layer, device=device)


@functools.cache
def fastest(backends: Sequence[Moves], *, run_bytes: int, by_layer: bool, device: torch.device) -> Moves:
    """Whoever loads and backs up a sample in the least time. One that fails at it, or moves wrong bytes, is left out;
    the first one is trusted.
    """
    if len(backends) == 1:
        return backends[0]
    sample = _Sample(run_bytes, by_layer=by_layer, device=device)
    able = [moves for moves in backends if moves is backends[0] or sample.is_moved_by(moves)]
    best_s = {moves: min(times) for moves, times in zip(able, _in_turns(sample, able), strict=True)}
    chosen = min(able, key=best_s.__getitem__)
    figures = ", ".join(f"{moves.name} {best_s[moves] * 1e3:.2f} ms" for moves in able)
    _LOG.debug("%d bytes up and down in runs of %d on %s: %s", sample.size_bytes, run_bytes, device, figures)
    return chosen


def _in_turns(sample: _Sample, backends: Sequence[Moves]) -> list[list[float]]:
    rounds = [[sample.time_s(moves) for moves in backends] for _ in range(_ROUNDS)]
    return [list(times) for times in zip(*rounds, strict=True)]


class _Sample:
    """A few pages, in memory of its own, of an L1 and an L2 whose copies go in runs of one size."""

    def __init__(self, run_bytes: int, *, by_layer: bool, device: torch.device) -> None:
        runs = max(1, _LAYER_BYTES_MIN // run_bytes)
        bytes_max, runs_max = _SAMPLE_BYTES // run_bytes, _SAMPLE_RUNS_MAX
        page_count = max(1, min(bytes_max, runs_max) // (runs * _SAMPLE_LAYERS))
        wide = torch.empty((_SAMPLE_LAYERS, page_count, runs, 2 * run_bytes), dtype=torch.uint8, device=device)
        memory = wide[..., :run_bytes]
        self._pool = list(memory) if by_layer else memory
        shape = (page_count, _SAMPLE_LAYERS, runs, run_bytes)
        self._pages = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._slots = list(range(page_count))
        self._device = device
        self.size_bytes = self._pages.numel()

    def is_moved_by(self, moves: Moves) -> bool:
        """Whether what goes up and down again is what it was."""
        expected = torch.arange(self.size_bytes, dtype=torch.int32).to(torch.uint8).view(self._pages.shape)
        try:
            self._pages.copy_(expected)
            moves.scatter_pages(self._pages, self._pool, sources=self._slots, targets=self._slots[::-1])
            self._settle()
            self._pages.zero_()
            moves.gather_pages(self._pool, self._pages, sources=self._slots[::-1], targets=self._slots)
            self._settle()
        except Exception as error:
            _LOG.warning("no copies through %r on %s: %r", moves.name, self._device, error)
            return False
        if torch.equal(self._pages, expected):
            return True
        _LOG.warning("no copies through %r on %s: it moved wrong bytes", moves.name, self._device)
        return False

    def time_s(self, moves: Moves) -> float:
        """Of one load and one backup."""
        start_s = time.perf_counter()
        moves.scatter_pages(self._pages, self._pool, sources=self._slots, targets=self._slots[::-1])
        moves.gather_pages(self._pool, self._pages, sources=self._slots, targets=self._slots[::-1])
        self._settle()
        return time.perf_counter() - start_s

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
