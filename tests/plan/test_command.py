"""`hicache plan` from the command line: what it prints, writes and returns, and that its documents list all of it."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hicache.cli import cli
from hicache.costs.machine import MACHINES
from hicache.plan import formulas
from hicache.plan.command import plan
from hicache.plan.engine_flags import VERSIONS
from hicache.plan.formula import Formula
from hicache.plan.presets import CONFIGS

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "plan.md").read_text()
K3 = ("kimi-k3", "--tp", "8", "--kv-dtype", "fp8_e4m3", "--state-dtype", "bfloat16")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_a_plan_for_people_names_its_figures_and_traps() -> None:
    done = run(*K3, "--l2-gib", "100")
    assert done.exit_code == 0, done.output
    for text in ("feasible: 140 requests", "27.69 MiB (29,039,616)", "best ratio 1.14", "<- binds", "! MLA's latent"):
        assert text in done.output


def test_an_infeasible_plan_has_an_exit_code_of_its_own() -> None:
    done = run(*K3, "--concurrency", "1000")
    assert done.exit_code == 3
    assert "infeasible: 140 requests" in done.output
    assert "nearest that can be served" in done.output


def test_each_figure_explains_itself() -> None:
    done = run(*K3, "--explain")
    assert "    = (latent_dim + rope_dim) * element_bytes\n    = (512 + 64) * 1\n" in done.output
    assert "SGLang configs/mamba_utils.py" in done.output


def test_json_goes_to_a_file_or_to_stdout(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run(*K3, "--json", str(path)).exit_code == 0
    assert json.loads(path.read_text()) == json.loads(run(*K3, "--json", "-").output)
    assert json.loads(path.read_text())["kv_bytes_per_token_per_rank"] == 13824


def test_lengths_and_reuse_come_from_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    request = {"input_length": 900, "output_length": 100, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps({**request, "timestamp": at}) + "\n" for at in (0, 30_000, 400_000)))
    found = json.loads(run(*K3, "--trace", str(trace), "--l3-tb", "1", "--ttl", "60", "--json", "-").output)
    assert found["kv_bytes_per_request"] == 16 * 64 * 13824
    [point] = found["tiers"]["ttl"]
    assert point["hit_ratio"] == pytest.approx(1 / 3)
    assert found["tiers"]["held"]["l3"]["ttl"]["hit_ratio"] == pytest.approx(2 / 3)
    assert found["drive_writes_per_day"] > 0


def test_memory_lengths_and_rest_can_be_said() -> None:
    found = json.loads(run(*K3, "--gpu-gb", "300", "--lengths", "100:1,1000:3", "--json", "-").output)
    assert found["rest_bytes"] == int(300e9 * 0.85) - 186_250_000_000
    measured = json.loads(run(*K3, "--rest-gib", "27.5", "--json", "-").output)
    assert measured["kv_pool_bytes"] + measured["state_pool_bytes"] == int(27.5 * 2**30)
    solved = json.loads(run(*K3, "--solve-ratio", "--json", "-").output)
    assert solved["concurrent_requests"] == solved["solved_ratio"]["requests"]


@pytest.mark.parametrize("engine", VERSIONS)
def test_flags_are_printed_with_the_version_that_they_are_for(engine: str) -> None:
    done = run(*K3, "--engine-flags", engine, "--skip-decode-lock")
    assert done.output.startswith(f"# {engine} {VERSIONS[engine]}\n")  # type: ignore[index]
    assert ("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=1" in done.output) is (engine == "sglang")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("kimi-k4",), "model = 'kimi-k4'"),
        (("kimi-k3", "--machine", "b400"), "machine = 'b400'"),
        (("kimi-k3", "--tp", "7"), "tp = 7"),
        (("kimi-k3", "--gpu-gb", "0"), "gpu_gb = 0"),
        (("kimi-k3", "--rate", "0"), "rate = 0"),
        (("kimi-k3", "--l2-gib", "-1"), "l2_gib = -1"),
        (("kimi-k3", "--tp", "8", "--l2-gib", "0.001"), "l2_bytes = "),
        (("kimi-k3", "--trace", "/none"), "trace = '/none'"),
        (("kimi-k3", "--ttl", "-1"), "ttl = -1"),
        (("kimi-k3", "--active-parameters", "0"), "active_parameters = 0"),
        (("kimi-k3", "--rest-gib", "-1"), "rest_gib = -1"),
        (("kimi-k3", "--ratio", "inf"), "ratio = inf"),
        (("kimi-k3", "--ratio", "1e308"), "ratio = 1e+308"),
        (("kimi-k3", "--gpu-gb", "nan"), "gpu_gb = nan"),
        (("kimi-k3", "--gpu-gb", "1e300"), "gpu_gb = 1e+300"),
        (("kimi-k3", "--reserved-gib", "nan"), "reserved_gib = nan"),
        (("kimi-k3", "--rest-gib", "inf"), "rest_gib = inf"),
        (("kimi-k3", "--l2-gib", "nan"), "l2_gib = nan"),
        (("kimi-k3", "--l3-tb", "inf"), "l3_tb = inf"),
        (("kimi-k3", "--drive-tb", "inf"), "drive_tb = inf"),
        (("kimi-k3", "--ttl", "inf"), "ttl = inf"),
        (("kimi-k3", "--active-parameters", "1e400"), "active_parameters = inf"),
        (("kimi-k3", "--lengths", "100:1e308,200:1e308"), "lengths = "),
        (("kimi-k3", "--input-tokens", str(10**18)), "lengths = "),
        (("kimi-k3", "--ring-depth", "16"), "ring_depth = 16"),
        (("kimi-k3", "--engine", "vllm", "--state-slots", "5"), "state_slots = 5"),
        (("kimi-k3", "--solve-ratio", "--state-slots", "5"), "state_slots = 5"),
        (("kimi-k3", "--engine-flags", "vllm", "--json", "-"), "json = '-'"),
        (("gpt-oss-20b", "--tp", "2", "--dcp", "2"), "dcp = 2"),
        (("qwen3-235b", "--engine", "vllm", "--tp", "8", "--dcp", "4"), "dcp = 4"),
        (("kimi-k3", "--json", "/none/plan.json"), "json = '/none/plan.json'"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], named: str) -> None:
    assert str(run(*arguments).exception).startswith(named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"gpu_gb": "x"}, "machine = "),
        ({"gpu_gb": math.nan}, "machine.gpu_gb = nan"),
        ({"gpus_per_node": 0}, "machine.gpus_per_node = 0"),
        ({"tiers": {"dram": {"bytes_per_s": -1}}}, "machine.tiers.dram.bytes_per_s = -1"),
        ({"tiers": {"dram": {"bytes_per_s": 1, "latency_s": -1}}}, "machine.tiers.dram.latency_s = -1"),
    ],
)
def test_a_machine_that_cannot_be_is_named(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"name": "m", "gpu_gb": 80, **fields}))
    assert str(run("llama-3-8b", "--machine", str(path)).exception).startswith(named)


def test_flags_can_be_pasted_into_a_shell() -> None:
    done = run(*K3, "--engine", "vllm", "--draft-tokens", "4", "--max-running-requests", "8", "--engine-flags", "vllm")
    version, missing, *flags = done.output.splitlines()
    assert version.startswith("# vllm")
    assert missing.startswith("# add to --speculative-config")
    words = shlex.split(" ".join(flag.removesuffix("\\") for flag in flags))
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"num_speculative_tokens": 3}
    measured = run(*K3, "--engine", "vllm", "--rest-gib", "30", "--engine-flags", "vllm").output
    assert f"--kv-cache-memory-bytes {30 * 2**30}" in measured
    assert "--gpu-memory-utilization" not in measured


def test_it_runs_without_torch_and_grpc_and_a_home() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'grpc', 'triton', 'aiohttp', 'lmdb'): sys.modules[name] = None\n"
        "sys.argv = ['hicache', 'plan', 'kimi-k3', '--tp', '8', '--l2-gib', '100', '--json', '-']\n"
        "from hicache.cli import main\n"
        "main()\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["model"] == "kimi-k3"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "hicache.cli", "plan", "kimi-k4"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert finished.returncode == 2
    assert "model = 'kimi-k4'" in finished.stderr


def test_the_plan_in_the_document_is_what_is_printed() -> None:
    shown = DOCUMENT.split("\n```\n")[1]
    printed = run("kimi-k3", "--machine", "b300-hgx", *K3[1:]).output
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def section(title: str) -> str:
    return DOCUMENT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_option_is_documented() -> None:
    options = {option for parameter in plan.params for option in parameter.opts if option.startswith("--")}
    assert set(re.findall(r"^\| `(--[\w-]+)", section("Options"), re.MULTILINE)) == options


def test_every_model_and_machine_is_documented() -> None:
    assert set(re.findall(r"^\| `([\w.-]+)`", section("Models"), re.MULTILINE)) == set(CONFIGS)
    assert set(re.findall(r"^\| `([\w.-]+)`", section("Machines"), re.MULTILINE)) == set(MACHINES)


def test_every_figure_is_documented() -> None:
    figures = {value.figure for value in vars(formulas).values() if isinstance(value, Formula)}
    shown_under_other_names = {"prefill_s", "load_s", "tier_tokens", "pool_bytes_per_token"}
    documented = set(re.findall(r"^\| `([\w]+)`", section("JSON"), re.MULTILINE))
    assert figures - shown_under_other_names <= documented
