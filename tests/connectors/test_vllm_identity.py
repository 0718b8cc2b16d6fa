"""Every field that changes the bytes of a vLLM engine's KV cache changes its namespace; no other does."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.connectors import config_values, vllm_identity
from hicache.connectors.vllm_identity import (
    EngineFacts,
    EngineIdentity,
    check_hash_algorithm,
    check_version,
    engine_identity,
    weights_revision,
)
from hicache.errors import ConfigError
from hicache.keys import digest_fields
from tests.connectors.test_checkpoint import write_safetensors

FACTS = EngineFacts(
    vllm_version="0.32.0",
    device_type="cuda",
    runner="v2",
    conv_state_layout="SD",
    attention_choice=("torch 2.13.0", "9.0", "flashinfer-python 1.0"),
)


class Mode(Enum):
    NONE = 0
    FP8 = 1


@dataclass(frozen=True)
class Spec:
    block_size: int = 16
    num_kv_heads: int = 8
    head_size: int = 128
    dtype: str = "torch.bfloat16"
    kv_quant_mode: Mode = Mode.NONE
    page_size_padded: int | None = None
    tokens_per_state: int | Fraction = 1
    sliding_window: int | None = None


@dataclass(frozen=True)
class StateSpec:
    block_size: int = 16
    shapes: tuple[tuple[int, ...], ...] = ((4, 64), (8, 32))
    dtypes: tuple[str, ...] = ("torch.bfloat16", "torch.float32")
    num_prefill_checkpoint_blocks: int = 0


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = values

    @property
    def architectures(self) -> list[str]:
        return ["LlamaForCausalLM"]

    def to_dict(self) -> dict[str, Any]:
        return self.values


def hf_config(**changes: Any) -> HfConfig:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    return HfConfig(
        **{"hidden_size": 4096, "rope_parameters": rope, "layer_types": ["full"] * 80, "_name_or_path": "/a", **changes}
    )


def vllm_config() -> Any:
    text = hf_config()
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=text, hf_text_config=text, model="/models/llama", seed=0),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config(layers=1))),
    )
    for part, names in vllm_identity._CONFIG_FIELDS.items():
        for name in names:
            target = part_of(config, part)
            setattr(target, name, "a")
    return config


def part_of(config: Any, part: str) -> Any:
    for step in part.split("."):
        if getattr(config, step, None) is None:
            setattr(config, step, SimpleNamespace())
        config = getattr(config, step)
    return config


def kv_cache_config(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, is_eagle_group=False, layer_names=["l0"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBHNC", hash_block_size=16, num_blocks=1000)


def identity(
    change: Callable[[Any, Any], None] | None = None, *, facts: EngineFacts = FACTS, revision: str = "r"
) -> EngineIdentity:
    engine, cache = vllm_config(), kv_cache_config(Spec(), StateSpec())
    if change is not None:
        change(engine, cache)
    return engine_identity(engine, cache, facts, revision=revision)


CONFIG_FIELDS = [(part, name) for part, names in vllm_identity._CONFIG_FIELDS.items() for name in names]


@pytest.mark.parametrize(("part", "name"), CONFIG_FIELDS)
def test_each_config_field_changes_the_namespace(part: str, name: str) -> None:
    seen = {identity().digest}
    for value in ("b", None, 0, False, {"a": 1.5}, ["b"]):
        seen.add(identity(lambda engine, _, value=value: setattr(part_of(engine, part), name, value)).digest)
    assert len(seen) == 7


def test_configs_that_count_whole_change_the_namespace() -> None:
    seen = {identity().digest}
    for part in vllm_identity._CONFIGS_WHOLE:
        for value in ({"a": 1}, Spec(), Spec(block_size=1)):
            seen.add(identity(lambda engine, _, part=part, value=value: setattr(engine, part, value)).digest)
    assert len(seen) == 1 + 3 * len(vllm_identity._CONFIGS_WHOLE)


SPEC_CHANGES: list[Any] = [
    Spec(block_size=32),
    Spec(num_kv_heads=4),
    Spec(head_size=64),
    Spec(dtype="torch.float16"),
    Spec(kv_quant_mode=Mode.FP8),
    Spec(page_size_padded=1 << 20),
    Spec(tokens_per_state=Fraction(1, 4)),
    Spec(sliding_window=128),
    StateSpec(),
]
STATE_CHANGES = [
    StateSpec(shapes=((64, 4), (8, 32))),
    StateSpec(shapes=((4, 64), (8,), (32,))),
    StateSpec(dtypes=("torch.bfloat16", "torch.bfloat16")),
]


def test_each_field_of_each_group_changes_the_namespace() -> None:
    def with_specs(*specs: Any) -> bytes:
        return engine_identity(vllm_config(), kv_cache_config(*specs), FACTS, revision="r").digest

    seen = {with_specs(Spec(), StateSpec()), with_specs(StateSpec(), Spec()), with_specs(Spec())}
    seen |= {with_specs(spec, StateSpec()) for spec in SPEC_CHANGES}
    seen |= {with_specs(Spec(), spec) for spec in STATE_CHANGES}
    seen.add(identity(lambda _, cache: setattr(cache.kv_cache_groups[0], "is_eagle_group", True)).digest)
    seen.add(identity(lambda _, cache: setattr(cache, "kv_cache_layout", "LBNHC")).digest)
    seen.add(identity(lambda _, cache: setattr(cache, "hash_block_size", 32)).digest)
    assert len(seen) == 3 + len(SPEC_CHANGES) + len(STATE_CHANGES) + 3


HF_CHANGES: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e6}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e7}},
    {"rope_parameters": None},
    {"layer_types": ["full"] * 79 + ["linear"]},
    {"quantization_config": {"bits": 4}},
    {"head_dim": 128},
    {"a field of tomorrow": 1},
]


def test_everything_in_the_hugging_face_config_changes_the_namespace_but_where_it_came_from() -> None:
    def with_hf(names: tuple[str, ...], **changes: Any) -> bytes:
        def change(engine: Any, _: Any) -> None:
            for name in names:
                setattr(engine.model_config, name, hf_config(**changes))

        return identity(change).digest

    text = ("hf_config", "hf_text_config")
    seen = {with_hf(text)} | {with_hf(text, **changes) for changes in HF_CHANGES}
    seen |= {with_hf(("hf_text_config",), **changes) for changes in HF_CHANGES}  # a text part of a multimodal model
    assert len(seen) == 1 + 2 * len(HF_CHANGES)
    where = {"_name_or_path": "/b", "transformers_version": "6", "_commit_hash": "c"}
    assert with_hf(text, **where) == with_hf(text)


@pytest.mark.parametrize(
    "changed",
    [
        {"vllm_version": "0.33.0"},
        {"vllm_version": "0.32.0+cu130"},
        {"device_type": "rocm"},
        {"runner": "v1"},
        {"conv_state_layout": "DS"},
        {"attention_choice": ("torch 2.13.0", "10.0", "flashinfer-python 1.0")},
    ],
)
def test_what_the_running_vllm_says_changes_the_namespace(changed: dict[str, Any]) -> None:
    assert identity(facts=replace(FACTS, **changed)).digest != identity().digest


def test_the_draft_model_changes_the_namespace_and_so_does_having_none() -> None:
    def other(engine: Any, _: Any) -> None:
        engine.speculative_config.draft_model_config.hf_config = hf_config(layers=2)

    def none(engine: Any, _: Any) -> None:
        engine.speculative_config = None

    assert len({identity().digest, identity(other).digest, identity(none).digest}) == 3


def test_the_environment_that_changes_bytes_changes_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity().digest
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert identity().digest == before
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    assert identity().digest != before


def test_what_changes_no_byte_does_not_change_the_namespace() -> None:
    def change(engine: Any, cache: Any) -> None:
        engine.model_config.model = "/mnt/elsewhere"
        engine.model_config.served_model_name = "other"
        engine.cache_config.gpu_memory_utilization = 0.5
        engine.scheduler_config = SimpleNamespace(max_num_seqs=7)
        cache.num_blocks = 7
        cache.kv_cache_groups[0].layer_names = ["of", "another", "stage"]
        cache.kv_cache_groups[1].kv_cache_spec = StateSpec(num_prefill_checkpoint_blocks=3)

    assert identity(change) == identity()
    assert identity(lambda engine, _: setattr(engine, "cache_config", copy.copy(engine.cache_config))) == identity()


def test_the_same_in_another_process(tmp_path: Path) -> None:
    """Sets and dicts are walked in an order of their own, whatever PYTHONHASHSEED is."""
    code = (
        "from tests.connectors.test_vllm_identity import identity\n"
        "values = {'a', 'b', 'c', 'd', 'e'}\n"
        "print(identity(lambda e, _: setattr(e.model_config, 'quantization_config', values)).digest.hex())"
    )
    root = Path(__file__).parents[2]
    seen = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import os; os.environ.pop('PYTHONHASHSEED')\n{code}"],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 64


def test_a_descriptor_stays_small_and_names_what_differs() -> None:
    described = dict(identity(lambda engine, _: setattr(engine.cache_config, "cache_dtype", "fp8_e4m3")).fields)
    assert described["cache_config.cache_dtype"] == "fp8_e4m3"
    assert all(len(str(value)) <= config_values.VALUE_CHARS_MAX for value in described.values())
    assert identity().digest == digest_fields([("model", "LlamaForCausalLM"), ("revision", "r"), *identity().fields])


def test_a_value_without_a_stable_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_config\.quantization_config"):
        identity(lambda engine, _: setattr(engine.model_config, "quantization_config", object()))


@pytest.mark.parametrize("version", ["0.30.2", "0.9", "0.0.0.dev", "dev", ""])
def test_a_vllm_below_the_floor_or_without_a_version_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match="vllm"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1rc2+cpu", "1.0"])
def test_the_floor_and_later_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash", "xxhash_cbor", "builtin"])
def test_a_hash_that_is_not_deterministic_is_refused_with_the_flag_to_set(algorithm: str) -> None:
    check_hash_algorithm("sha256_cbor")
    with pytest.raises(ConfigError, match="--prefix-caching-hash-algo sha256_cbor"):
        check_hash_algorithm(algorithm)


def test_weights_are_called_by_content_whatever_their_path(tmp_path: Path) -> None:
    def revision(folder: Path | None, **changes: Any) -> str:
        engine = vllm_config()
        engine.speculative_config = None
        engine.load_config = SimpleNamespace(load_format=changes.pop("load_format", "auto"))
        engine.model_config.seed = changes.pop("seed", 0)
        return weights_revision(engine, FACTS, find_folder=lambda model: folder, **changes)

    for name, payload in (("a", b"1" * 100), ("b", b"1" * 100), ("c", b"2" * 100)):
        (tmp_path / name).mkdir()
        write_safetensors(tmp_path / name / "model.safetensors", {"w": payload})
    a, b, c = (revision(tmp_path / name) for name in "abc")
    assert a == b != c
    assert revision(tmp_path / "a", depth="full") != a
    assert revision(None, given="v1") == revision(tmp_path / "a", given="v1") != revision(None, given="v2")
    dummies = {revision(tmp_path / "a", load_format="dummy"), revision(tmp_path / "a", load_format="dummy", seed=1)}
    assert len(dummies | {a, c}) == 4
    with pytest.raises(ConfigError, match="weights_revision"):
        revision(None)
    with pytest.raises(ConfigError, match="weights_revision"):
        revision(tmp_path / "a", load_format="tensorizer")
    with pytest.raises(ConfigError, match="weights_revision"):
        revision(None, given="")


def test_the_weights_of_the_draft_model_count(tmp_path: Path) -> None:
    for name, payload in (("main", b"1" * 100), ("draft", b"1" * 100), ("other", b"2" * 100)):
        (tmp_path / name).mkdir()
        write_safetensors(tmp_path / name / "model.safetensors", {"w": payload})
    engine = vllm_config()
    engine.speculative_config.draft_load_config = None

    def revision(draft: str) -> str:
        folders = {id(engine.model_config): tmp_path / "main"}
        return weights_revision(
            engine, FACTS, find_folder=lambda model: folders.get(id(model), tmp_path / draft), depth="sampled"
        )

    engine.speculative_config.draft_model_config.model_weights = ""
    with_draft, with_other = revision("draft"), revision("other")
    engine.speculative_config = None
    assert len({with_draft, with_other, revision("draft")}) == 3


def test_weights_that_were_changed_in_memory_are_nobody_elses() -> None:
    mine = identity()
    assert len({mine.digest, mine.after_weight_update().digest, mine.after_weight_update().digest}) == 3
