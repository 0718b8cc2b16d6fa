"""Who finds whose pages: tenants, weights, arguments of the server, ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.connectors import sglang as connector
from hicache.connectors import sglang_identity
from hicache.connectors.sglang_arguments import Arguments
from hicache.errors import ConfigError
from tests.client.hicached import HicachedProcess, token_of
from tests.engines.sglang.conftest import Start
from tests.engines.sglang.devices import PAGE_TOKENS, Device, gdn, mha, mla
from tests.engines.sglang.rig import Engine, assert_equal, extra_config, server, tokens

ALL = 8 * PAGE_TOKENS
HEADS = 8

revisions = itertools.count()


@pytest.fixture
def config(hicached: HicachedProcess) -> dict[str, Any]:
    """Of weights that no other test has."""
    return extra_config(hicached.address, token=token_of(0), model_revision=f"sharing {next(revisions)}")


def run(start: Start, device: Device, config: dict[str, Any], **arguments: Any) -> Engine:
    engine = start(device, config, **arguments)
    engine.connect()
    return engine


def write(engine: Engine, *, salt: str | None = None) -> dict[str, torch.Tensor]:
    computed = engine.compute(tokens(8), salt=salt)
    engine.settle()
    return computed


# Tenants


def check_tenants(start: Start, config: dict[str, Any]) -> None:
    """Four ways to be another tenant, with a control beside each."""
    computed = write(run(start, gdn(), config, core="python"), salt="a")
    engine = run(start, gdn(), config)
    assert engine.prefetch(tokens(8), salt="b") == 0
    assert engine.prefetch(tokens(8)) == 0
    for other in ({"token": token_of(1)}, {"salt": "another"}):
        assert run(start, gdn(), config | other).prefetch(tokens(8), salt="a") == 0
    engine = run(start, gdn(), config)
    assert engine.prefetch(tokens(8), salt="a") == ALL
    assert_equal(engine.load(tokens(8), salt="a"), computed)


def test_br_017_a_tenant_finds_its_own_pages_and_nobody_elses(start: Start, config: dict[str, Any]) -> None:
    check_tenants(start, config)


# Weights and arguments


def check_weights(start: Start, config: dict[str, Any]) -> None:
    write(run(start, mha(), config))
    different: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"model_revision": "other weights"}, {}),
        ({"engine_version": "0.5.99"}, {}),
        ({}, {"served_model_name": "org/other"}),
        ({}, {"json_model_override_args": '{"rope_theta": 5000}'}),
        ({}, {"quantization": "fp8"}),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}),
    ]
    for settings, arguments in different:
        assert run(start, mha(), config | settings, **arguments).prefetch(tokens(8)) == 0, (settings, arguments)
    assert run(start, mha(), config).prefetch(tokens(8)) == ALL


def test_other_weights_or_arguments_find_nothing(start: Start, config: dict[str, Any]) -> None:
    check_weights(start, config)


def test_every_argument_that_names_pages_is_one_of_this_release() -> None:
    arguments = Arguments()
    for name in (
        *sglang_identity._ARGUMENTS,
        *sglang_identity._DRAFT_ARGUMENTS,
        *sglang_identity._FILES,
        *sglang_identity._DRAFT_FILES,
        "load_format",
        "weight_cache_mode",
        "speculative_draft_load_format",
        "model_path",
        "revision",
        "download_dir",
    ):
        with server(extra_config("unix:///nowhere.sock")):
            getattr(arguments, name)


def test_two_checkpoints_at_one_path_do_not_share(start: Start, config: dict[str, Any], tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    config = config | {"model_revision": ""}
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 10_000.0}))
    save(weights, seed=1)
    computed = write(run(start, mha(), config, model_path=str(tmp_path)))
    save(weights, seed=2)
    assert run(start, mha(), config, model_path=str(tmp_path)).prefetch(tokens(8)) == 0
    save(weights, seed=1)
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 20_000.0}))
    assert run(start, mha(), config, model_path=str(tmp_path)).prefetch(tokens(8)) == 0
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 10_000.0, "_name_or_path": "elsewhere"}))
    engine = run(start, mha(), config, model_path=str(tmp_path))
    assert engine.prefetch(tokens(8)) == ALL
    assert_equal(engine.load(tokens(8)), computed)


def save(path: Path, *, seed: int) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.full((64, 64), float(seed))}, str(path))


def test_weights_that_nothing_tells_apart_are_refused(start: Start, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="model_revision"):
        start(mha(), config | {"model_revision": ""})


# Ranks


def check_rank(start: Start, config: dict[str, Any], model: Callable[[], Device]) -> None:
    """Each rank of two finds what itself has stored."""
    computed = [write(run(start, model(), config, tp_rank=rank, tp_size=2)) for rank in (0, 1)]
    for rank in (0, 1):
        engine = run(start, model(), config, tp_rank=rank, tp_size=2)
        assert engine.prefetch(tokens(8)) == ALL
        assert_equal(engine.load(tokens(8)), computed[rank])


@pytest.mark.parametrize("model", [mha, gdn])
def test_each_rank_finds_its_own_heads_and_states(
    start: Start, config: dict[str, Any], model: Callable[[], Device]
) -> None:
    check_rank(start, config, model)


def test_br_027_a_rank_alone_finds_nothing_of_another_or_of_another_tp_size(
    start: Start, config: dict[str, Any]
) -> None:
    write(run(start, mha(), config, tp_rank=0, tp_size=2))
    assert run(start, mha(), config, tp_rank=1, tp_size=2).prefetch(tokens(8)) == 0
    assert run(start, mha(), config, tp_rank=0, tp_size=1).prefetch(tokens(8)) == 0
    assert run(start, mha(), config, tp_rank=0, tp_size=4).prefetch(tokens(8)) == 0
    assert run(start, mha(), config, tp_rank=0, tp_size=2).prefetch(tokens(8)) == ALL


def test_latents_are_written_by_one_rank_and_read_by_all_of_any_tp_size(start: Start, config: dict[str, Any]) -> None:
    second = run(start, mla(), config, tp_rank=1, tp_size=2)
    write(second)
    assert second.stored(tokens(8)) == 0
    computed = write(run(start, mla(), config, tp_rank=0, tp_size=2))
    for rank, size in ((0, 2), (1, 2), (3, 4)):
        engine = run(start, mla(), config, tp_rank=rank, tp_size=size)
        assert engine.prefetch(tokens(8)) == ALL
        assert_equal(engine.load(tokens(8)), computed)


def check_split_heads(start: Start, config: dict[str, Any], writers: int, readers: int) -> None:
    """Engines of two TP sizes with one ``tp_lcm_size`` have each other's pages, head for head."""
    config = config | {"tp_lcm_size": 4}
    heads: list[dict[str, torch.Tensor]] = []
    for rank in range(writers):
        engine = run(start, mha(heads=HEADS // writers), config, layout="page_head", tp_rank=rank, tp_size=writers)
        heads.append(write(engine))
    whole = {name: torch.cat([each[name] for each in heads], dim=1) for name in heads[0]}
    for rank in range(readers):
        engine = run(start, mha(heads=HEADS // readers), config, layout="page_head", tp_rank=rank, tp_size=readers)
        assert engine.prefetch(tokens(8)) == ALL
        own = slice(rank * HEADS // readers, (rank + 1) * HEADS // readers)
        assert_equal(engine.load(tokens(8)), {name: tensor[:, own].contiguous() for name, tensor in whole.items()})


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2), (1, 4), (2, 1)])
def test_engines_of_different_tp_sizes_share_split_heads(
    start: Start, config: dict[str, Any], writers: int, readers: int
) -> None:
    check_split_heads(start, config, writers, readers)


def test_split_heads_go_through_tensors_of_their_own_too(start: Start, config: dict[str, Any]) -> None:
    check_split_heads(start, config | {"interface_v1": 0}, 2, 4)


def test_heads_that_cannot_be_split_are_refused_with_what_would_be_right(start: Start, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="page_head"):
        start(mha(heads=4), config | {"tp_lcm_size": 4}, layout="page_first_direct", tp_size=2)
    with pytest.raises(ConfigError, match="at most 4"):
        start(mha(heads=2), config | {"tp_lcm_size": 8}, layout="page_head", tp_size=2)


def test_an_engine_that_could_not_share_with_its_deployment_is_refused(start: Start, config: dict[str, Any]) -> None:
    config = config | {"deployment": f"deployment {next(revisions)}"}
    engine = run(start, mha(), config)
    assert engine.storage._pages is not None
    with server(config | {"model_revision": "other"}) as server_args, pytest.raises(ConfigError, match="revision"):
        Engine(server_args, mha())
    with server(config, layout="page_first") as server_args, pytest.raises(ConfigError, match="byte_order"):
        Engine(server_args, mha())
    with server(config) as server_args:
        other = Engine(server_args, mha())
        other.connect()
        other.close()


# Clearing


def test_clear_removes_what_this_namespace_and_tenant_stored_and_nothing_else(
    start: Start, config: dict[str, Any]
) -> None:
    others = ({"token": token_of(1)}, {"model_revision": config["model_revision"] + " other"})
    for other in ({}, *others):
        write(run(start, mha(), config | other))
    engine = run(start, mha(), config)
    assert engine.cache.clear_storage_backend()
    assert engine.prefetch(tokens(8)) == 0
    for other in others:
        assert run(start, mha(), config | other).prefetch(tokens(8)) == ALL
    engine = run(start, mha(), config)
    write(engine)
    assert engine.stored(tokens(8)) == 8


# The checks above find these mistakes


def without(*names: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Leave fields out of what names pages."""
    digest = sglang_identity.digest_fields

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            sglang_identity, "digest_fields", lambda fields: digest([each for each in fields if each[0] not in names])
        )

    return mutate


def without_namespace(patch: pytest.MonkeyPatch) -> None:
    spec = connector.PagesSpec
    patch.setattr(connector, "PagesSpec", lambda fields, size: spec((), size))
    without("model", "revision", "engine_version", "kv_cache_dtype", "quantization", "json_model_override_args")(patch)


def without_state(patch: pytest.MonkeyPatch) -> None:
    """Say that states are there, and leave the slot as it is."""
    move = connector.HiCacheStorage._move_pool

    def skip(self: Any, name: str, keys: Any, host_indices: Any, move_pages: Any) -> list[bool]:
        return [True] * len(keys) if name == "mamba" else move(self, name, keys, host_indices, move_pages)

    patch.setattr(connector.HiCacheStorage, "_move_pool", skip)


def without_last_plane(patch: pytest.MonkeyPatch) -> None:
    """Leave V, or a conv state, out of each page."""
    items = connector._StoredPool.items
    patch.setattr(connector._StoredPool, "items", lambda self, keys, extents: items(self, keys, extents)[:-1])


def wrong_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sglang_identity, "_heads", lambda layout, rank, part: f"slice {part.head_slice}")


def wrong_slice(patch: pytest.MonkeyPatch) -> None:
    heads = sglang_identity._heads
    patch.setattr(
        sglang_identity,
        "_heads",
        lambda layout, rank, part: heads(layout, rank, type(part)(part.plane, 0, part.runs)),
    )


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Start, dict[str, Any]], None]]] = {
    "drop the salt": (without("salt"), check_tenants),
    "drop the namespace": (without_namespace, check_weights),
    "drop the pool's name and plane": (
        without("pool", "plane", "object_bytes", "class", "byte_order", "tensors"),
        lambda start, config: check_rank(start, config, mha),
    ),
    "skip the state": (without_state, lambda start, config: check_rank(start, config, gdn)),
    "skip a plane": (without_last_plane, lambda start, config: check_rank(start, config, mha)),
    "load the wrong rank, attention": (wrong_rank, lambda start, config: check_rank(start, config, mha)),
    "load the wrong rank, states": (wrong_rank, lambda start, config: check_rank(start, config, gdn)),
    "load the wrong slice": (wrong_slice, lambda start, config: check_split_heads(start, config, 2, 4)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_its_check(
    start: Start, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(start, config)
