"""What an operator may set about hicache in SGLang, and what the documents say of it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hicache.connectors.sglang_settings import _OF_HICACHE, StorageSettings
from hicache.errors import ConfigError

DOCS = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
OF_SGLANG = {"backend_name": "hicache", "module_path": "hicache.connectors.sglang", "class_name": "HiCacheStorage"}


def parse(**settings: Any) -> StorageSettings:
    return StorageSettings.parse(OF_SGLANG | settings)


def test_defaults_are_those_of_the_documents() -> None:
    settings = parse(l3="unix:///run/hicached.sock")
    assert settings == StorageSettings("unix:///run/hicached.sock")
    assert f"| `deadline_s` | {settings.deadline_s} |" in DOCS
    assert not settings.moves_without_copy
    assert parse(l3="tcp://host:1", interface_v1=1, allocator="shm", prefetch_threshold=64).moves_without_copy


def test_every_setting_is_in_the_documents() -> None:
    table = DOCS.split("## Settings", 1)[1].split("\n\n", 3)[1]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(_OF_HICACHE)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"l3 = None: expected where hicached listens.*unix://"),
        ({"l3": ""}, "l3 = ''"),
        ({"l3": 5}, "l3 = 5: expected a string"),
        ({"l3": "unix:///s", "dead_line_s": 1}, r"dead_line_s = 1: expected deadline_s \(did you mean that\?\)"),
        ({"l3": "unix:///s", "capacity": 1}, "capacity = 1: expected one of l3, token"),
        ({"l3": "unix:///s", "deadline_s": 0}, "deadline_s = 0: expected seconds above 0 and up to 60"),
        ({"l3": "unix:///s", "deployment": "x" * 129}, "at most 128 printable characters"),
        ({"l3": "unix:///s", "deadline_s": 61}, "deadline_s = 61"),
        ({"l3": "unix:///s", "deadline_s": True}, "deadline_s = True"),
        ({"l3": "unix:///s", "deadline_s": "2"}, "deadline_s = '2'"),
        ({"l3": "unix:///s", "token_file": "/nowhere/token"}, "token_file = '/nowhere/token': expected a file"),
        ({"l3": "unix:///s", "token_file": "/t", "token": "x"}, "either token or token_file"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be_right(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(**settings)


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    assert parse(l3="unix:///s", token_file=str(tmp_path / "token")).token == "secret"


def test_every_name_of_a_setting_has_a_field() -> None:
    names = {field.name for field in fields(StorageSettings)} - {"moves_without_copy"}
    assert names == set(_OF_HICACHE) - {"token_file"}
