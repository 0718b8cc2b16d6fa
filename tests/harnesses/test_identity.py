"""Harness 3: whatever makes two things different makes their names different, field by field and in any combination."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from hicache import keys as keys_module
from hicache import spec as spec_module
from hicache.connectors import config_values, sglang_identity, vllm_identity
from hicache.connectors.sglang_pools import Part, Run
from hicache.keys import BlockKeys, FieldValue, chained_key
from hicache.spec import StateGroup
from hicache.tenancy import tenant_digest
from tests.connectors import test_sglang_identity as sglang
from tests.connectors import test_vllm_identity as vllm
from tests.core.test_spec import ALL_FIELDS, ONE_VALUE, OTHERS, PARTS, spec_of, with_part
from tests.harnesses.test_identity_pairs import NAMESPACE, Object

GOLDEN = Path(__file__).parent / "golden_identity.json"
Names = dict[str, bytes]  # by what was changed


# -- each field alone ------------------------------------------------------------------------------------------------


def spec_names() -> Names:
    """Namespaces: one field of one part of a spec changed at a time."""
    names = {"": dataclasses.replace(spec_of()).namespace}
    for kind, field in ALL_FIELDS:
        if (kind, field) not in ONE_VALUE:
            changed = dataclasses.replace(PARTS[kind], **{field: OTHERS[kind][field]})  # type: ignore[type-var]
            names[f"{kind.__name__}.{field}"] = with_part(changed).namespace
    for field, value in (("layout", "other"), ("FORMAT_VERSION", 99)):
        with pytest.MonkeyPatch.context() as patch:
            spec = dataclasses.replace(spec_of())
            if field == "layout":
                object.__setattr__(spec, field, value)
            else:
                patch.setattr(spec_module, field, value)
            names[field] = spec.namespace
    state = PARTS[StateGroup]
    assert isinstance(state, StateGroup)
    other = (state.fields[0], dataclasses.replace(state.fields[1], dtype="float16"))
    names["second state field"] = with_part(dataclasses.replace(state, fields=other)).namespace
    swapped = spec_of(*spec_of().groups[::-1])
    return names | {"order of groups": swapped.namespace}


def root_names() -> Names:
    """Roots of sequences: namespace, salt, and extras such as LoRA and images."""

    def root(namespace: bytes = NAMESPACE, salt: bytes | None = b"s", **extras: FieldValue) -> bytes:
        return BlockKeys(namespace, page_tokens=4).root(
            salt=salt, extras={"lora": "a", "image": b"b", "rank": 1} | extras
        )

    names = {"": root(), "namespace": root(namespace=b"n"), "no salt": root(salt=None), "empty salt": root(salt=b"")}
    return names | {f"extra {name}": root(**{name: "other"}) for name in ("lora", "image", "rank", "adapter")}


def sglang_names() -> Names:
    """Roots of SGLang's pools."""
    names = {
        "": sglang.root(),
        "model": sglang.root(sglang.identity(model_name="org/other")),
        "revision": sglang.root(sglang.identity(dataclasses.replace(sglang.SETTINGS, model_revision="r2"))),
        "salt": sglang.root(sglang.identity(dataclasses.replace(sglang.SETTINGS, salt="s"))),
        "version": sglang.root(sglang.identity(version="0.5.24")),
        "pool": sglang.root(layout=dataclasses.replace(sglang.LAYOUT, name="swa")),
        "replicated": sglang.root(layout=dataclasses.replace(sglang.LAYOUT, is_replicated=True)),
        "plane": sglang.root(part=Part(1, 0, sglang.PART.runs)),
        "object bytes": sglang.root(part=Part(0, 0, (Run(0, 64, 32),))),
    }
    for name in (*sglang_identity._ARGUMENTS, *sglang_identity._FILES):
        names[name] = sglang.root(sglang.identity(**{name: "other"}))
    for name in sglang.LAYOUT.identity:
        names[f"layout {name}"] = sglang.root(layout=sglang.changed(**{name: 77}))
    for name in ("tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size"):
        names[f"rank {name}"] = sglang.root(rank=dataclasses.replace(sglang.RANK, **{name: 8}))
    base = sglang.identity()
    for field, _ in base.fields:
        fields = tuple((name, "other" if name == field else value) for name, value in base.fields)
        names[f"field {field}"] = sglang.root(dataclasses.replace(base, fields=fields))
    return names


def sglang_draft_names() -> Names:
    """Roots of pools that hold a draft model's cache."""
    draft = dataclasses.replace(sglang.LAYOUT, name="draft")

    def root(**arguments: str) -> bytes:
        return sglang.root(sglang.identity(**({"speculative_draft_model_path": "draft"} | arguments)), draft)

    names = {"": root(), "random weights": root(speculative_draft_load_format="dummy")}
    arguments = (*sglang_identity._DRAFT_ARGUMENTS, *sglang_identity._DRAFT_FILES)
    return names | {name: root(**{name: "other"}) for name in arguments}


def vllm_names() -> Names:
    """Digests of vLLM engines: every field of every config, of the KV cache, of the running engine."""
    names = {"": vllm.identity().digest, "revision": vllm.identity(revision="r2").digest}
    for part, field in vllm.CONFIG_FIELDS:
        names[f"{part}.{field}"] = vllm.identity(_setting(part, field)).digest
    for part in {part for part, _ in vllm.CONFIG_FIELDS}:
        names[f"no {part}"] = vllm.identity(lambda engine, _, part=part: _remove(engine, part)).digest
    for part in vllm_identity._CONFIGS_WHOLE:
        names[part] = vllm.identity(lambda engine, _, part=part: setattr(engine, part, {"a": 1})).digest
    for field in vllm_identity._KV_CACHE_FIELDS:
        names[f"kv_cache.{field}"] = vllm.identity(lambda _, cache, field=field: setattr(cache, field, "other")).digest
    for index, spec in enumerate((vllm.Spec(), vllm.StateSpec())):
        for each in dataclasses.fields(spec):
            if each.name not in vllm_identity._SPEC_ALLOCATION:
                names[f"group.{index}.{each.name}"] = vllm.identity(_of_group(index, spec, each.name)).digest
        for field in vllm_identity._GROUP_FIELDS:
            names[f"group.{index}.{field}"] = vllm.identity(
                lambda _, cache, index=index, field=field: setattr(cache.kv_cache_groups[index], field, "other")
            ).digest
    for each in dataclasses.fields(vllm.FACTS):
        value = ("other",) if each.name == "attention_choice" else "0.33.0" if each.name == "vllm_version" else "other"
        names[each.name] = vllm.identity(facts=dataclasses.replace(vllm.FACTS, **{each.name: value})).digest  # type: ignore[arg-type]
    for field in vllm.hf_config().values:
        if field not in config_values.HF_PROVENANCE:
            names[f"hf.{field}"] = vllm.identity(_hf(field)).digest
            names[f"hf_draft.{field}"] = vllm.identity(_hf_draft(field)).digest
    names["hf_draft.layers"] = vllm.identity(_hf_draft("layers")).digest
    names["architecture"] = vllm.identity(_architecture).digest
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "77")
        names["hash_seed"] = vllm.identity().digest
    return names


def _setting(part: str, field: str) -> Callable[[Any, Any], None]:
    return lambda engine, _: setattr(vllm.part_of(engine, part), field, "other")


def _remove(engine: Any, part: str) -> None:
    owner, _, name = part.rpartition(".")
    if part != "model_config":  # there is no engine without one
        setattr(vllm.part_of(engine, owner) if owner else engine, name, None)
    else:
        engine.model_config.hf_config = vllm.hf_config(other=1)


def _of_group(index: int, spec: Any, field: str) -> Callable[[Any, Any], None]:
    changed = dataclasses.replace(spec, **{field: "other"})
    return lambda _, cache: setattr(cache.kv_cache_groups[index], "kv_cache_spec", changed)


def _hf(field: str) -> Callable[[Any, Any], None]:
    def change(engine: Any, _: Any) -> None:
        engine.model_config.hf_config = engine.model_config.hf_text_config = vllm.hf_config(**{field: "other"})

    return change


def _hf_draft(field: str) -> Callable[[Any, Any], None]:
    def change(engine: Any, _: Any) -> None:
        engine.speculative_config.draft_model_config.hf_config = vllm.hf_config(**{"layers": 1, field: "other"})

    return change


def _architecture(engine: Any, _: Any) -> None:
    class Other(vllm.HfConfig):
        architectures = property(lambda self: ["OtherForCausalLM"])  # type: ignore[assignment]  # as it is there

    engine.model_config.hf_config = engine.model_config.hf_text_config = Other(**vllm.hf_config().values)


KINDS: dict[str, Callable[[], Names]] = {
    "spec": spec_names,
    "root": root_names,
    "sglang": sglang_names,
    "sglang draft": sglang_draft_names,
    "vllm": vllm_names,
}


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's identity has the seed of its process in it."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_changed_alone_makes_another_name(kind: str) -> None:
    names = KINDS[kind]()
    assert [name for name in names if name and names[name] == names[""]] == []


class Dropping:
    """``encode_fields`` without one field: the mutant that forgets it."""

    def __init__(self, dropped: str = "") -> None:
        self._dropped = dropped
        self.seen: dict[str, None] = {}
        self._real = keys_module.encode_fields

    def __call__(self, fields: Iterable[tuple[str, FieldValue]]) -> bytes:
        given = list(fields)
        self.seen |= dict.fromkeys(name for name, _ in given)
        return self._real((name, value) for name, value in given if name != self._dropped)


# Said twice: by other fields, too, so that no two things differ in these alone.
REDUNDANT = {
    "spec": {"groups", "group.0.kind", "group.1.kind", "group.1.fields", "group.1.slices"},
    "vllm": {"kv_cache.groups", "group.0.kind", "group.1.kind", *vllm_identity._CONFIG_FIELDS},
}
BASES: dict[str, Callable[[], object]] = {
    "spec": lambda: dataclasses.replace(spec_of()).namespace,
    "root": lambda: BlockKeys(NAMESPACE, page_tokens=4).root(extras={"lora": "a", "image": b"b", "rank": 1}),
    "sglang": sglang.root,
    "sglang draft": lambda: sglang.root(layout=dataclasses.replace(sglang.LAYOUT, name="draft")),
    "vllm": lambda: vllm.identity().digest,
}


def fields_of(kind: str) -> set[str]:
    """The names of all fields that are encoded for the base, without those that are said twice."""
    with pytest.MonkeyPatch.context() as patch:
        recording = Dropping()
        patch.setattr(keys_module, "encode_fields", recording)
        BASES[kind]()
    known = fields_of("sglang") if kind == "sglang draft" else REDUNDANT.get(kind, set())
    return set(recording.seen) - known


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_forgotten_would_be_found(kind: str) -> None:
    """Without it, two things that differ have one name: each field that is encoded has such a pair above."""
    survivors = []
    for field in sorted(fields_of(kind)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keys_module, "encode_fields", Dropping(field))
            names = KINDS[kind]()
        if all(digest != names[""] for name, digest in names.items() if name):
            survivors.append(field)
    assert survivors == []


# -- what names have always been -------------------------------------------------------------------------------------


def golden() -> dict[str, str]:
    """One name of each kind."""
    hybrid = spec_of(
        identity=(("none", None), ("yes", True), ("one", 1), ("text", "é"), ("raw", b"\0")), page_tokens=16
    )
    made = {kind: names()[""] for kind, names in KINDS.items()}
    made |= {"hybrid": hybrid.namespace, "tenant": tenant_digest("alice"), "chained": chained_key(b"r" * 32, b"page")}
    made["object"] = Object("alice", "m", "1", (), b"salt", (("lora", "x"),), (1, 2, -3, 2**40), 1, 2).name
    return {name: digest.hex() for name, digest in made.items()}


def test_names_are_what_they_have_always_been() -> None:
    """Where they must change, everything that is stored is stored anew: say so in the CHANGELOG."""
    assert golden() == json.loads(GOLDEN.read_text())
