"""What the command takes, and what it refuses with the value, the limit and what would be right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.admission.__main__ import main
from bench.admission.options import (
    Load,
    PolicyChoice,
    TierChoice,
    pages_of,
    parse_loads,
    parse_policies,
    parse_tiers,
    parse_tokens,
)
from bench.admission.priced import priced
from hicache.costs.rigs import rig
from hicache.errors import ConfigError

COSTS = rig("llama-8b-h100").costs
DOCS = Path(__file__).parents[2] / "docs" / "policies.md"


def test_policies_name_eviction_write_and_read() -> None:
    assert list(parse_policies("lru, s3_fifo+tiny_lfu,lru+depth_cut+latency")) == [
        PolicyChoice("lru"),
        PolicyChoice("s3_fifo", "tiny_lfu"),
        PolicyChoice("lru", "depth_cut", "latency"),
    ]
    below = parse_tiers("L1:200k,L3", COSTS)
    assert list(parse_policies("lru+write_back", below)) == [PolicyChoice("lru", "write_back")]
    for text in ("best", "lru+best", "lru+write_back", "lru+write_through+best", "a+b+c+d", ""):
        with pytest.raises(ConfigError):
            list(parse_policies(text))


def test_capacities_are_tokens() -> None:
    assert [parse_tokens(text) for text in ("512k", " 3M", "inf", "1000")] == [512_000, 3_000_000, None, 1000]
    for text in ("", "-3M", "many", "0", "nan", "1e400", "0.5"):
        with pytest.raises(ConfigError, match="capacities"):
            parse_tokens(text)
    assert pages_of(1100, 512) == 2
    with pytest.raises(ConfigError, match="512"):
        pages_of(511, 512)


def test_tiers_go_down_and_one_of_them_is_studied() -> None:
    assert parse_tiers("L1:200k,L2:2M:arc:write_through_selective,L3", COSTS) == (
        TierChoice("L1", 200_000),
        TierChoice("L2", 2_000_000, "arc", "write_through_selective"),
        TierChoice("L3"),
    )
    wrong = (
        "",
        "L4",
        "L2,L1:5k",
        "L1,L2",
        "L1:5k,L2:5k",
        "L1:inf,L2",
        "L1:0,L2",
        "L1:5k:best,L2",
        "L1:5k:lru:write_back,L2",
    )
    for text in wrong:
        with pytest.raises(ConfigError):
            parse_tiers(text, COSTS)
    with pytest.raises(ConfigError, match="the hardware has"):
        parse_tiers("L3", rig("qwen3-30b-h20").costs)


def test_loads_are_speeds_and_clients() -> None:
    assert parse_loads("1,2.5", "8") == (Load(1.0), Load(2.5), Load(clients=8))
    for speedups, clients in [
        ("0", None),
        ("-1", None),
        ("1e9", None),
        ("nan", None),
        ("fast", None),
        ("1", "0"),
        ("1", "1.5"),
    ]:
        with pytest.raises(ConfigError, match=r"speedup|clients"):
            parse_loads(speedups, clients)


def test_the_planner_and_the_published_rig_price_the_same_model_alike() -> None:
    published, planned = priced().costs, priced("llama-3-8b", "h100").costs
    assert planned.token_bytes == published.token_bytes == 131_072
    for tokens in (1_000, 10_000, 100_000):
        assert planned.prefill_s(0, tokens) == pytest.approx(published.prefill_s(0, tokens), rel=0.01)
    assert planned.tiers == published.tiers


def test_gpus_together_are_faster_and_have_memory_each_but_share_a_drive() -> None:
    one, eight = priced("llama-3-70b", "h100").costs, priced("llama-3-70b", "h100", gpus=8).costs
    assert eight.prefill_s(0, 1000) == pytest.approx(one.prefill_s(0, 1000) / 8)
    assert eight.tiers["L2"].bytes_per_s == 8 * one.tiers["L2"].bytes_per_s
    assert eight.tiers["L3"] == one.tiers["L3"]
    assert eight.token_bytes == one.token_bytes == 320 * 1024
    assert priced("qwen3-next-80b", "h100", l3="nvme_x2").costs.state_bytes > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hardware": "toaster"}, "llama-8b-h100"),
        ({"model": "gpt-9", "hardware": "h100"}, "llama-3-8b"),
        ({"model": "llama-3-8b"}, "one measurement"),
        ({"hardware": "h100", "gpus": 9}, "1 to 8"),
        ({"hardware": "h100", "l3": "tape"}, "nvme"),
        ({"model": "kimi-k3", "hardware": "b300-hgx"}, "active"),
    ],
)
def test_what_cannot_be_priced_is_refused_with_what_can(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        priced(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policies", "best"], "s3_fifo"),
        (["--policies", "lru+write_through+sometimes"], "latency"),
        (["--capacities", "0"], "at least 1"),
        (["--capacities", "100"], "512"),
        (["--speedup", "0"], "speedup"),
        (["--speedup", "1e12"], "at most 1e+06"),
        (["--clients", "0"], "clients"),
        (["--session-gap", "0"], "session_gap_s"),
        (["--drive-tb", "nan"], "drive_tb"),
        (["--decode-ms", "-1"], "decode_token_s"),
        (["--hardware", "toaster"], "toaster"),
        (["--tiers", "L2,L3"], "tiers"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_stops_the_command_with_a_line_that_says_what_is_right(options: list[str], named: str) -> None:
    result = CliRunner().invoke(main, ["--agents", "1", *options])
    assert result.exit_code == 2, result.output
    assert named in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_a_trace_in_which_nothing_comes_back_has_a_report_too(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:17:{second:02}.0,600,10\n" for second in range(20))
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    options = ["--trace", str(tmp_path / "azure.csv"), "--policies", "lru", "--capacities", "5k,inf", "--clients", "2"]
    machine = ["--model", "qwen3-next-80b", "--hardware", "h200", "--gpus", "2", "--overlap", "split"]
    result = CliRunner().invoke(main, [*options, *machine, "--report", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    assert result.output.count("no policy finds anything") == 2
    assert "no figures" in (tmp_path / "report" / "index.html").read_text(), "of regret: nothing is possible"


def test_the_docs_name_every_option() -> None:
    text = DOCS.read_text()
    missing = [
        name for option in main.params for name in option.opts if name.startswith("--") and f"`{name}" not in text
    ]
    assert not missing, json.dumps(missing)
