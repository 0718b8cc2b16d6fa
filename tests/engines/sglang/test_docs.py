"""The compatibility tables of docs/sglang.md are what is tested here."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__ as sglang_version

from hicache.connectors import sglang_plugin
from hicache.connectors.sglang_identity import VERSION_FLOOR
from hicache.connectors.sglang_settings import StorageSettings
from tests.engines.sglang.test_pools import KINDS
from tests.engines.sglang.test_round_trips import HAVE

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "sglang.md").read_text()
COMPATIBILITY = DOCS.split("\n## Compatibility\n")[1].split("\n## ")[0]


def test_models_and_layouts_are_those_of_the_tests() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \|", COMPATIBILITY, re.MULTILINE)
    said = {model: tuple(re.findall(r"`(\w+)`", layouts)) for model, layouts in rows}
    assert said == HAVE | {kind: layouts for kind, (_, layouts) in KINDS.items()}


def test_releases_are_the_one_that_runs_here_and_the_floor() -> None:
    releases = re.findall(r"^\| (\d\S+) \| (\w+)", COMPATIBILITY, re.MULTILINE)
    assert releases == [(sglang_version, "tested"), (".".join(map(str, VERSION_FLOOR)), "floor")]
    pins = (ROOT / "tests" / "engines" / "requirements-sglang.txt").read_text().splitlines()
    assert f"sglang=={sglang_version}" in pins


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(made)
    return made


def test_the_flags_to_copy_are_taken_and_load_the_store(parser: argparse.ArgumentParser) -> None:
    commands = re.findall(
        r"python -m sglang\.launch_server(.*?)(?: &)?\n(?!      )", DOCS.replace("\\\n", " "), re.DOTALL
    )
    assert len(commands) == 2
    [config] = re.findall(r"CONFIG='(.*?)'", DOCS, re.DOTALL)
    for command in commands:
        words = shlex.split(command.replace('"$CONFIG"', shlex.quote(config)).replace("$replica", "0"))
        arguments = parser.parse_args(words)
        assert arguments.hicache_storage_backend == "dynamic"
        extra = json.loads(arguments.hicache_storage_backend_extra_config)
        assert StorageSettings.parse(extra).moves_without_copy
        assert extra["allocator"] == "shm"
        assert getattr(importlib.import_module(extra["module_path"]), extra["class_name"])


def test_every_flag_that_is_named_is_one_of_this_release(parser: argparse.ArgumentParser) -> None:
    known = {option for action in parser._actions for option in action.option_strings}
    named = set(re.findall(r"--[a-z][a-z-]+[a-z]", DOCS)) - {"--socket", "--path", "--capacity-bytes", "--engine"}
    assert not named - known


def test_what_the_plugin_wraps_is_said() -> None:
    said = DOCS.split("### The plugin")[1]
    for target in sglang_plugin.TARGETS:
        owner, name = target.rsplit(".", 2)[-2:]
        words = [name.removeprefix("update_weights_from")] if name.startswith("update") else [owner, name]
        assert all(word in said for word in words), target
