"""What is in the names of SGLang's pages: each thing that bytes depend on, and no other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.connectors.sglang_identity import EngineIdentity, Rank, check_version
from hicache.connectors.sglang_pools import Part, PoolLayout, Run
from hicache.connectors.sglang_settings import StorageSettings
from hicache.errors import ConfigError

SETTINGS = StorageSettings("unix:///s", model_revision="r1")
RANK = Rank(tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, cp_rank=0, cp_size=1, heads_lcm=None)
PART = Part(0, 0, (Run(0, 64, 64),))
LAYOUT = PoolLayout("kv", 8, 4, (PART,), False, {"dtype": "bfloat16", "byte_order": "layers", "layer_num": 2})
ARGUMENTS = {"model_path": "nowhere/model", "dtype": "auto", "kv_cache_dtype": "auto", "quantization": None}


def identity(settings: StorageSettings = SETTINGS, version: str = "0.5.23", **changed: Any) -> EngineIdentity:
    config = SimpleNamespace(model_name=changed.pop("model_name", "org/model"), pp_size=1, attn_cp_size=1)
    return EngineIdentity.of(SimpleNamespace(**(ARGUMENTS | changed)), config, settings, version=version)


def root(of: EngineIdentity | None = None, layout: PoolLayout = LAYOUT, rank: Rank = RANK, part: Part = PART) -> bytes:
    return (of or identity()).root(layout, rank, part)


def changed(layout: PoolLayout = LAYOUT, **fields: Any) -> PoolLayout:
    return dataclasses.replace(layout, identity=layout.identity | fields)


@pytest.mark.parametrize(
    "other",
    [
        root(identity(model_name="org/other")),
        root(identity(dataclasses.replace(SETTINGS, model_revision="r2"))),
        root(identity(dataclasses.replace(SETTINGS, salt="s"))),
        root(identity(version="0.5.24")),
        root(identity(dtype="half")),
        root(identity(kv_cache_dtype="fp8_e4m3")),
        root(identity(quantization="fp8")),
        root(layout=dataclasses.replace(LAYOUT, name="swa")),
        root(layout=changed(dtype="float16")),
        root(layout=changed(byte_order="tokens")),
        root(layout=changed(layer_num=3)),
        root(rank=dataclasses.replace(RANK, tp_rank=0)),
        root(rank=dataclasses.replace(RANK, tp_size=4)),
        root(rank=dataclasses.replace(RANK, pp_rank=1)),
        root(rank=dataclasses.replace(RANK, cp_rank=1)),
        root(part=Part(1, 0, PART.runs)),
        root(part=Part(0, 0, (Run(0, 64, 32),))),
    ],
)
def test_whatever_bytes_depend_on_makes_another_name(other: bytes) -> None:
    assert root() == root()
    assert other != root()


def test_where_bytes_lie_is_no_part_of_the_name() -> None:
    assert root(part=Part(0, 0, (Run(4096, 128, 64),))) == root()
    assert root(layout=dataclasses.replace(LAYOUT, page_count=400)) == root()
    assert root(identity(dataclasses.replace(SETTINGS, deadline_s=9.0, token="t"))) == root()


def test_what_all_ranks_have_equal_has_one_name() -> None:
    whole = dataclasses.replace(LAYOUT, is_replicated=True)
    assert root(layout=whole) == root(layout=whole, rank=dataclasses.replace(RANK, tp_rank=3, tp_size=8))


def test_slices_of_heads_have_one_name_whatever_the_tp_size() -> None:
    def slices(tp_size: int, tp_rank: int) -> list[bytes]:
        parts = tuple(Part(0, number, PART.runs) for number in range(4 // tp_size))
        layout = dataclasses.replace(changed(byte_order="heads"), parts=parts)
        rank = dataclasses.replace(RANK, tp_rank=tp_rank, tp_size=tp_size, heads_lcm=4)
        return [root(layout=layout, rank=rank, part=part) for part in parts]

    names = slices(1, 0)
    assert len(set(names)) == 4
    for tp_size in (2, 4):
        assert [name for rank in range(tp_size) for name in slices(tp_size, rank)] == names


def test_a_draft_model_is_part_of_the_name_of_what_it_is_in_alone() -> None:
    drafting = identity(speculative_algorithm="EAGLE", speculative_draft_model_path="org/draft")
    assert root(drafting) == root()
    for layout in (dataclasses.replace(LAYOUT, name="draft"), changed(target_layer_num=1)):
        assert root(drafting, layout) != root(layout=layout)


def test_one_version_for_two_releases_lets_them_share() -> None:
    shared = dataclasses.replace(SETTINGS, engine_version="0.5")
    assert root(identity(shared, version="0.5.23")) == root(identity(shared, version="0.5.24"))


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23", "0.6.0", "0.5.23.post1", "0.5.30+cpu", "unknown"])
def test_releases_from_the_floor_on_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.21", "0.4.9"])
def test_releases_before_the_floor_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.5\.22 or later"):
        check_version(version)


def test_weights_that_nothing_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="model_revision = '': expected a name of the weights of nowhere/model"):
        identity(StorageSettings("unix:///s"))


def test_an_adapter_of_the_command_line_is_known_by_its_content(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    adapter = SimpleNamespace(lora_name="french", lora_path=str(tmp_path))
    names = {root()}
    for content in (b"first", b"second", b"first"):
        weights.write_bytes(content)
        names.add(root(identity(lora_paths=[adapter])))
    assert len(names) == 3
    away = SimpleNamespace(lora_name="french", lora_path=str(tmp_path / "away"))
    with pytest.raises(ConfigError, match="no files of the adapter"):
        identity(StorageSettings("unix:///s"), model_path=str(checkpoint(tmp_path)), lora_paths=[away])


def checkpoint(folder: Path) -> Path:
    (folder / "model.bin").write_bytes(b"weights")
    return folder
