"""The benchmarks of copies on a GPU do their work, as far as that goes without one, and say when there is none."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from bench import transfer_cuda
from bench.geometries import K3_MLA, K3_STATE
from bench.transfer import main
from bench.transfer_cuda import BACKENDS, MISSING, CudaFigures, cuda_figures, measure
from bench.transfer_overlap import Matmuls, OverlapRow, Transfers, overlap_rows
from hicache.spec import Group, PagedGroup, StateField, StateGroup
from tests.kernels.devices import DEVICE

PAGES = PagedGroup("pages", (0, 1), heads=1, head_dim=8, dtype="bfloat16")
STATES = StateGroup("states", (0,), (StateField("conv", (3, 8), "bfloat16"), StateField("ring", (2,), "int8", True)))


class InOrder:
    """A double of torch.cuda whose streams do everything at once, and so in the order it is asked for."""

    def Stream(self, device: object) -> InOrder:
        return self

    def Event(self, *, blocking: bool = False) -> InOrder:
        return self

    def current_stream(self, device: object) -> InOrder:
        return self

    def stream(self, stream: InOrder) -> nullcontext[None]:
        return nullcontext()

    def wait_event(self, event: InOrder) -> None: ...

    def record(self, stream: InOrder) -> None: ...

    def synchronize(self, device: object = None) -> None: ...

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=132)


CUDA = torch.cuda if DEVICE == "cuda" else InOrder()


@pytest.mark.parametrize("group", [PAGES, STATES], ids=lambda group: group.name)
def test_every_back_end_is_measured_both_ways_beside_one_large_copy(group: Group) -> None:
    figures = measure(group, 3, device=DEVICE, repetitions=1, limit_bytes=1 << 20)
    rows = figures.rows
    assert not figures.left_out
    assert [(row.backend, row.direction) for row in rows] == [
        (backend, direction) for backend in BACKENDS for direction in ("backup", "load")
    ]
    for row in rows:
        assert (row.pages, row.page_bytes) == (3, group.object_bytes(64))
        assert row.gbps >= 0
        assert row.limit_gbps > 0
        assert row.per_call_us > 0


def test_a_back_end_that_fails_is_left_out_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = transfer_cuda.PoolCopies

    def failing(*pools: Any, setting: str) -> object:
        if setting == "direct":
            raise RuntimeError("cudaMemcpyAsync answered 700")
        copies = real(*pools, setting=setting)
        if setting == "kernel":
            monkeypatch.setattr(copies, "load", partial(refused, "no kernel image"))
        return copies

    def refused(why: str, *slots: object) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(transfer_cuda, "PoolCopies", failing)
    figures = measure(PAGES, 3, device=DEVICE, repetitions=1, limit_bytes=1 << 20)
    assert {row.backend for row in figures.rows} == {*BACKENDS} - {"direct", "kernel"}
    assert figures.left_out == ["pages, 3, direct: cudaMemcpyAsync answered 700", "pages, 3, kernel: no kernel image"]


def small_overlap(backends: list[str]) -> list[OverlapRow]:
    return overlap_rows(DEVICE, pages=3, backends=backends, repetitions=1, group=PAGES, matmul_size=16, cuda=CUDA)


def test_loads_by_layer_are_measured_beside_a_forward_and_matmuls_beside_copies() -> None:
    rows = small_overlap([*BACKENDS])
    assert [row.backend for row in rows] == [*BACKENDS]
    assert [row.sm_share > 0 for row in rows] == [backend == "kernel" for backend in BACKENDS]
    for row in rows:
        assert min(row.load_ms, row.forward_ms, row.both_ms) > 0


def test_a_copy_that_goes_wrong_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    with Transfers(PAGES, 3, "reference", device=DEVICE, cuda=CUDA) as transfers:
        compute = Matmuls(DEVICE, 16, CUDA)
        assert compute.count_for(0.0) == 1
        monkeypatch.setattr(transfers.executor._copies, "load", None)
        with pytest.raises(RuntimeError, match=r"reference: .*copy\.load"):
            transfers.settle(transfers.load())


def test_figures_are_taken_as_long_as_the_time_lasts_and_the_rest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the devices of the tests in the place of CUDA's."""
    real = measure

    def small(group: Group, count: int, *, device: str, repetitions: int) -> object:
        if group is STATES:
            raise RuntimeError("cudaHostRegister answered 2")
        return real(group, 2, device=DEVICE, repetitions=1, limit_bytes=1 << 20)

    def some_overlap(device: str, *, pages: int, backends: list[str], repetitions: int) -> list[OverlapRow]:
        if backends == ["kernel"]:
            raise ImportError("no Triton")
        return small_overlap(backends)

    now_s = [0.0]
    monkeypatch.setattr(transfer_cuda, "MODELS", (PAGES, STATES))
    monkeypatch.setattr(transfer_cuda, "measure", small)
    monkeypatch.setattr(transfer_cuda, "overlap_rows", some_overlap)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a double")
    figures = cuda_figures(quick=True)
    assert len(figures.rows) == 3 * 2 * len(BACKENDS)
    assert [row.backend for row in figures.overlap] == [backend for backend in BACKENDS if backend != "kernel"]
    assert figures.left_out == [
        "beside compute, kernel: no Triton",
        *(f"states, {count}: cudaHostRegister answered 2" for count in (1, 4, 16)),
    ]
    console = Console(record=True, width=200)
    figures.show(console)
    told = console.export_text()
    assert "a double" in told
    assert "left out: states, 16" in told
    assert {*figures.document()} == {"rows", "overlap", "left_out"}

    clock = SimpleNamespace(perf_counter=lambda: now_s.append(now_s[-1] + 50) or now_s[-1], time=time.time)
    monkeypatch.setattr(transfer_cuda, "time", clock)
    assert cuda_figures(quick=False).left_out[-1] == "states, 16: the time was over"


def test_kimi_k3_is_as_large_as_it_is_published_to_be() -> None:
    assert (len(K3_MLA.layers), len(K3_STATE.layers)) == (24, 69)
    assert K3_MLA.object_bytes(64) == 64 * 13824
    conv, temporal = (field.bytes_per_layer * 69 for field in K3_STATE.fields)
    assert (conv, temporal) == (1907712, 27131904)
    assert round(K3_STATE.object_bytes(64) / 2**20, 2) == 27.69


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: its figures are not missing")
def test_without_a_gpu_it_says_which_figures_are_missing(tmp_path: Path) -> None:
    ended = CliRunner().invoke(main, ["--device", "cuda", "--json", str(tmp_path / "figures.json")])
    assert ended.exit_code == 0, ended.output
    told = json.loads((tmp_path / "figures.json").read_text())
    assert told["missing"] == MISSING
    assert told["rows"] == told["overlap"] == CudaFigures().rows
    assert " ".join(ended.output.split()).startswith(" ".join(MISSING.split())[:60])
    for name in ("Kimi-K3 state, one of TP8", "staged", "a forward hides"):
        assert name in MISSING
