"""docs/vllm.md says what the connector has: its settings with their defaults, and metrics that exist."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

from hicache.connectors.vllm_identity import VERSION_FLOOR
from hicache.connectors.vllm_settings import VllmSettings
from hicache.samples import METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """The first two columns of the table under a heading, of rows that begin with a name."""
    table = PAGE.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    cells = [re.split(r"(?<!\\)\|", line) for line in table.splitlines() if line.startswith("| `")]
    return {cell[1].strip().strip("`").split("{")[0]: cell[2].strip() for cell in cells}


def test_every_setting_is_documented_with_its_default() -> None:
    table = rows("### Settings of `kv_connector_extra_config`")
    assert list(table) == [field.name for field in fields(VllmSettings)]
    for field in fields(VllmSettings):
        if field.name == "ranks" or field.default is MISSING:
            continue
        expected = f"`{json.dumps(field.default)}`" if field.default not in (None, "") else "none"
        assert table[field.name] == expected, field.name


def test_metrics_to_watch_exist() -> None:
    assert rows("## What to watch").keys() <= {metric.name for metric in METRICS}


def test_the_floor_is_the_one_that_is_checked() -> None:
    assert f"vLLM, {'.'.join(map(str, VERSION_FLOOR))} and later" in PAGE
    assert f"| vLLM | {'.'.join(map(str, VERSION_FLOOR))} and later;" in PAGE


def test_the_flags_to_copy_are_accepted() -> None:
    flags = re.search(r"--kv-transfer-config '(\{.*?\})'", PAGE, re.DOTALL)
    assert flags is not None
    transfer = json.loads(flags[1])
    VllmSettings.of(transfer["kv_connector_extra_config"])
    assert transfer["kv_load_failure_policy"] == "recompute"
