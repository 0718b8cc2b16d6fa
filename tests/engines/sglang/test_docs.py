"""The compatibility tables of docs/sglang.md are what is tested here."""

from __future__ import annotations

import re
from pathlib import Path

from sglang.version import __version__ as sglang_version

from hicache.connectors.sglang_identity import VERSION_FLOOR
from tests.engines.sglang.test_pools import KINDS
from tests.engines.sglang.test_round_trips import HAVE

ROOT = Path(__file__).parents[3]
COMPATIBILITY = (ROOT / "docs" / "sglang.md").read_text().split("\n## Compatibility\n")[1].split("\n## ")[0]


def test_models_and_layouts_are_those_of_the_tests() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \|", COMPATIBILITY, re.MULTILINE)
    said = {model: tuple(re.findall(r"`(\w+)`", layouts)) for model, layouts in rows}
    assert said == HAVE | {kind: layouts for kind, (_, layouts) in KINDS.items()}


def test_releases_are_the_one_that_runs_here_and_the_floor() -> None:
    releases = re.findall(r"^\| (\d\S+) \| (\w+)", COMPATIBILITY, re.MULTILINE)
    assert releases == [(sglang_version, "tested"), (".".join(map(str, VERSION_FLOOR)), "floor")]
    pins = (ROOT / "tests" / "engines" / "requirements-sglang.txt").read_text().splitlines()
    assert f"sglang=={sglang_version}" in pins
