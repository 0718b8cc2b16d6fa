"""What others met where two engines shared what they should not: names, files and switches that were forgotten."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache.connectors import vllm_identity
from hicache.connectors.sglang_settings import StorageSettings
from hicache.connectors.vllm_pages import Geometry
from hicache.connectors.vllm_scheduler import Identity, SchedulerSide
from hicache.connectors.vllm_spec import BlockGroup
from hicache.errors import ConfigError
from hicache.keys import chained_key
from tests.connectors import test_sglang_identity as sglang
from tests.connectors import test_vllm_identity as vllm
from tests.connectors.test_vllm_scheduler import PAGE, World
from tests.connectors.vllm_fakes import FakeCache, Request

BY_CONTENT = StorageSettings("unix:///s")
DENSE = Geometry((BlockGroup(0, 0, 1, is_state=False),), page_tokens=PAGE, hash_tokens=PAGE)


def of_files(folder: Path, settings: StorageSettings = BY_CONTENT, **arguments: Any) -> bytes:
    return sglang.root(sglang.identity(settings, model_path=str(folder), **arguments))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return sglang.checkpoint(folder)


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", ["", "r1"])
def test_oe_01_random_weights_in_the_shape_of_a_model_never_meet_the_model(checkpoint: Path, revision: str) -> None:
    """A benchmark with ``--load-format dummy`` beside the server, on one hicached."""
    settings = dataclasses.replace(BY_CONTENT, model_revision=revision)
    real = of_files(checkpoint, settings)
    assert of_files(checkpoint, settings, load_format="dummy") != real
    assert of_files(checkpoint, settings, load_format="dummy") == of_files(checkpoint, settings, load_format="dummy")
    assert of_files(checkpoint, settings, load_format="safetensors") == real


@pytest.mark.parametrize("load_format", ["remote", "remote_instance", "ipc_cache", "presharded", "flash_rl"])
def test_oe_01_weights_that_do_not_come_from_the_files_need_a_name(checkpoint: Path, load_format: str) -> None:
    with pytest.raises(ConfigError, match=f"load_format {load_format}"):
        of_files(checkpoint, load_format=load_format)
    named = dataclasses.replace(BY_CONTENT, model_revision="r1")
    assert of_files(checkpoint, named, load_format=load_format) == of_files(checkpoint, named)


def test_oe_01_weights_that_another_process_keeps_need_a_name(checkpoint: Path) -> None:
    """Its files may have changed since it has read them."""
    with pytest.raises(ConfigError, match="model_revision"):
        of_files(checkpoint, weight_cache_mode="client")


def test_oe_01_a_draft_of_random_weights_is_told_from_the_real_one(tmp_path: Path, checkpoint: Path) -> None:
    draft = dataclasses.replace(sglang.LAYOUT, name="draft")

    def root(**arguments: Any) -> bytes:
        identity = sglang.identity(BY_CONTENT, model_path=str(checkpoint), **arguments)
        return sglang.root(identity, draft)

    assert root(speculative_draft_model_path=str(checkpoint)) != root(
        speculative_draft_model_path=str(checkpoint), speculative_draft_load_format="dummy"
    )


# -- files beside the weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["quantization_param_path", "decrypted_config_file", "dllm_algorithm_config"])
def test_oe_02_a_file_beside_the_weights_counts_by_what_is_in_it(
    tmp_path: Path, checkpoint: Path, argument: str
) -> None:
    """Scales of a float8 cache that were calibrated anew, at the path that they had before."""
    scales = tmp_path / "scales.json"
    scales.write_text('{"0": 0.04}')
    before = of_files(checkpoint, **{argument: str(scales)})
    elsewhere = tmp_path / "copy.json"
    elsewhere.write_bytes(scales.read_bytes())
    assert of_files(checkpoint, **{argument: str(elsewhere)}) == before
    scales.write_text('{"0": 0.05}')
    assert of_files(checkpoint, **{argument: str(scales)}) != before
    assert of_files(checkpoint) != before


def test_oe_02_a_file_that_is_not_here_is_refused_unless_the_operator_names_the_weights(
    tmp_path: Path, checkpoint: Path
) -> None:
    away = str(tmp_path / "away.json")
    with pytest.raises(ConfigError, match="quantization_param_path names cannot be read here"):
        of_files(checkpoint, quantization_param_path=away)
    of_files(checkpoint, dataclasses.replace(BY_CONTENT, model_revision="r1"), quantization_param_path=away)


def test_oe_02_a_folder_of_files_that_are_no_known_weights_is_refused_likewise(
    tmp_path: Path, checkpoint: Path
) -> None:
    """As KTransformers keeps its experts when they are not merged: a folder for each layer."""
    folder = tmp_path / "experts"
    (folder / "_layer_0").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"model_revision.*kt_weight_path"):
        of_files(checkpoint, kt_weight_path=str(folder))
    of_files(checkpoint, dataclasses.replace(BY_CONTENT, model_revision="r1"), kt_weight_path=str(folder))


def test_oe_02_scales_of_vllms_encoder_count_by_what_is_in_them(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"

    def digest(path: Path) -> bytes:
        def change(engine: Any, _: Any) -> None:
            engine.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(path)

        return vllm.identity(change).digest

    scales.write_text("1.0")
    before = digest(scales)
    (tmp_path / "copy.json").write_text("1.0")
    assert digest(tmp_path / "copy.json") == before
    scales.write_text("2.0")
    assert digest(scales) != before


# -- how exactly it is computed, and what ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_BATCH_INVARIANT", "1"),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "medium"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"bits": 4}'),
    ],
)
def test_oe_03_a_switch_of_vllm_that_changes_numbers_keeps_engines_apart(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    without = vllm.identity().digest
    monkeypatch.setenv(variable, value)
    assert vllm.identity().digest != without
    monkeypatch.delenv(variable)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert vllm.identity().digest == without


@pytest.mark.parametrize("variable", ["VLLM_HUMMING_INPUT_QUANT_CONFIG", "SGLANG_HUMMING_INPUT_QUANT_CONFIG"])
def test_oe_03_a_switch_that_names_a_file_counts_by_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    """Both engines read these as JSON, or as a file of it."""

    def name(file: str) -> tuple[bytes, bytes]:
        monkeypatch.setenv(variable, str(tmp_path / file))
        return vllm.identity().digest, sglang.root()

    (tmp_path / "config.json").write_text('{"dtype": "int8"}')
    (tmp_path / "copy.json").write_text('{"dtype": "int8"}')
    before = name("config.json")
    assert name("copy.json") == before
    (tmp_path / "config.json").write_text('{"dtype": "int4"}')
    assert name("config.json") != before


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_deterministic_inference": True},
        {"rl_on_policy_target": "fsdp"},
        {"enable_mis": True},
        {"dllm_algorithm": "LowConfidence"},
        {"enable_decoder_swa_bounded_replay": True},
        {"forward_hooks": [{"target_modules": ["model.layers.3"], "hook_factory": "steer"}]},
        {"context_length": 131_072},
    ],
)
def test_oe_03_an_argument_of_sglang_that_changes_numbers_keeps_engines_apart(arguments: dict[str, Any]) -> None:
    assert sglang.root(sglang.identity(**arguments)) != sglang.root()


@pytest.mark.parametrize(
    "variable",
    [
        "SGLANG_DEEPEP_BF16_DISPATCH",  # in place of float8
        "SGLANG_OPT_USE_BF16_ROUTER_GEMM",  # in place of float32
        "SGLANG_OPT_USE_ONLINE_COMPRESS",  # another state of the same size
        "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE",  # another order of the same bytes
        "SGLANG_HIP_DSV41_INDEX_K_PAGE8",  # likewise
    ],
)
def test_oe_03_a_switch_of_sglang_that_changes_numbers_keeps_engines_apart(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    without = sglang.root()
    monkeypatch.setenv(variable, "1")
    assert sglang.root() != without


def test_oe_03_sglang_on_rocm_and_on_cuda_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both call their device ``cuda``; the indexer's keys of a page are the same bytes in another order."""
    on_cuda = sglang.root()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert sglang.root() != on_cuda


@pytest.mark.parametrize(
    ("variable", "value"),
    [("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"), ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "1")],
)
def test_oe_04_a_benchmark_that_routes_to_any_experts_does_not_fill_the_store_of_those_that_serve(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    def names() -> tuple[bytes, bytes]:
        return vllm.identity().digest, sglang.root()

    monkeypatch.delenv(variable, raising=False)
    served = names()
    monkeypatch.setenv(variable, value)
    benchmarked = names()
    assert sum(one != other for one, other in zip(served, benchmarked, strict=True)) == 1


def test_oe_03_arguments_without_an_order_have_one_name_in_every_process() -> None:
    """A set of module names comes in another order in each process: its ranks would never find each other's pages."""
    program = (
        "from hicache.connectors.config_values import bounded, plain\n"
        "modules = {f'{name}_proj' for name in 'qkvogud'}\n"
        "print(bounded('lora_target_modules', plain('lora_target_modules', modules)))\n"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
        for seed in ("1", "2")
    }
    assert len(names) == 1


# -- images ----------------------------------------------------------------------------------------------------------


def media(*hashes: str | None, identifier: str = "client's own") -> SimpleNamespace:
    return SimpleNamespace(mm_features=[SimpleNamespace(mm_hash=each, identifier=identifier) for each in hashes])


def test_oe_05_an_image_that_a_client_has_named_is_told_from_one_by_content() -> None:
    blake3, sha512 = "a1" * 32, "b2" * 64
    assert not vllm_identity.has_media_by_name(SimpleNamespace())
    assert not vllm_identity.has_media_by_name(media())
    assert not vllm_identity.has_media_by_name(media(blake3, sha512))
    for name in ("image-1", "", "A1" * 32, blake3 + "0", "audio-2-1-0", f"adapter:{blake3}"):
        assert vllm_identity.has_media_by_name(media(blake3, name)), name
    assert vllm_identity.has_media_by_name(media(None))
    assert not vllm_identity.has_media_by_name(media(None, identifier=blake3))


@pytest.mark.parametrize(
    ("cache_gb", "has_prefix_caching", "expected"), [(0, False, True), (0, True, False), (4, False, False)]
)
def test_oe_05_an_engine_that_numbers_its_images_from_one_on_is_known(
    cache_gb: float, has_prefix_caching: bool, expected: bool
) -> None:
    """Its numbers go through a hash, too, where a processor has arguments: by the text nobody could tell."""
    multimodal = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=has_prefix_caching),
    )
    assert vllm_identity.numbers_media(config) is expected
    config.model_config.multimodal_config = None
    assert not vllm_identity.numbers_media(config)


def test_oe_05_what_a_client_calls_an_image_in_one_engine_is_nothing_in_another() -> None:
    """The same tokens and the same name, of which each engine has another image."""
    store: dict[tuple[Any, bytes], set[int]] = {}

    def engine(name: str) -> SchedulerSide:
        cache = FakeCache(PAGE, groups=1)
        cache.store = store
        return SchedulerSide(cache, DENSE, identity_of=lambda request: Identity(None, {"names_of": name}))

    first, second = engine("first"), engine("second")
    tokens = list(range(3 * PAGE + 1))
    assert serve(first, Request("a", tokens, PAGE)) == 0
    assert serve(second, Request("b", tokens, PAGE)) == 0
    assert serve(first, Request("c", tokens, PAGE)) == 3 * PAGE


def serve(side: SchedulerSide, request: Request) -> int:
    """What a request finds; afterwards it has been computed."""
    side.opened(request, 0)
    found = side.matched(request, 0)
    assert found is not None
    blocks = (list(range(10, 10 + -(-request.num_tokens // PAGE))),)
    side.plan({request.request_id: request.num_tokens}, lambda name: blocks, {}, ())
    side.finished(request)
    return found


def test_oe_06_every_bit_of_a_hash_of_the_engine_is_in_the_names() -> None:
    """Of an image's hash another cache kept 16 bits."""
    root, page_hash = b"r" * 32, bytes(range(32))
    names = {chained_key(root, page_hash)}
    for bit in range(256):
        changed = bytearray(page_hash)
        changed[bit // 8] ^= 1 << bit % 8
        names.add(chained_key(root, bytes(changed)))
    assert len(names) == 257


# -- adapters --------------------------------------------------------------------------------------------------------


def test_oe_07_an_adapter_that_was_replaced_under_its_name_finds_nothing_of_the_one_before() -> None:
    """Same name, same tokens, other content; and the base model, whose pages are no adapter's."""
    contents = {"a": b"first", "b": b"second", "c": b"first", "d": None, "e": None}

    def identity_of(request: Request) -> Identity:
        content = contents[request.request_id]
        return Identity(None, {"lora": content} if content else None)

    world = World(identity_of=identity_of)
    tokens = list(range(3 * PAGE + 1))
    found = [serve(world.side, Request(name, tokens, PAGE)) // PAGE for name in "abcde"]
    assert found == [0, 0, 3, 0, 3]
