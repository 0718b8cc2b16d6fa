"""What is to be run first on a GPU does its work, as far as that goes without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench import gpu_life, gpu_report
from bench.gpu_life import EXPECTED, Life, live
from bench.transfer import main as transfer
from bench.transfer_cuda import measure
from hicache.errors import HiCacheError
from tests.kernels.test_transfer_cuda import PAGES

OVERLAP = dict.fromkeys(
    ("load_ms", "forward_ms", "both_ms", "hidden", "slowdown_load", "slowdown_backup", "sm_share"), 0.5
)


def test_prompts_come_back_to_the_bit_from_every_tier() -> None:
    assert live("cpu", "reference") == EXPECTED


def test_other_bytes_than_were_stored_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Life(device="cpu", copies="reference", l3=f"file://{tmp_path}/l3")
    try:
        assert engine.serve(0) == "computed"
        monkeypatch.setattr(Life, "_pattern", lambda self, name, like: torch.ones_like(like))
        with pytest.raises(HiCacheError, match="other bytes"):
            engine.serve(0)
    finally:
        engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(gpu_life.main, [])
    assert result.exit_code == 3
    assert "no CUDA device" in result.output
    out = tmp_path / "out.json"
    assert CliRunner().invoke(transfer, ["--device", "cuda", "--json", str(out)]).exit_code == 0
    result = CliRunner().invoke(gpu_report.main, [str(out)])
    assert result.exit_code == 1
    assert "no CUDA device" in result.output


def test_the_figures_become_a_section_of_the_measurements(tmp_path: Path) -> None:
    figures = measure(PAGES, 3, device="cpu", repetitions=1, limit_bytes=1 << 20)
    machine = {"cpus": 2, "kernel": "6", "load_before": 0.1}
    document = {**figures.document(), "gpu": "a GPU", "machine": machine, "overlap": [{"backend": "kernel", **OVERLAP}]}
    (tmp_path / "out.json").write_text(json.dumps(document))
    result = CliRunner().invoke(gpu_report.main, [str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "## On a GPU"
    speeds = [line for line in lines if line.startswith("| pages | 3 | ")]
    assert {line.split(" | ")[2] for line in speeds} == {row.backend for row in figures.rows}
    assert any(line.startswith("| kernel | 0.5 |") for line in lines)
    assert sum(line.startswith("Left out") for line in lines) == len(figures.left_out)
