"""Harness 3: any two things that differ have two names, and what cannot be told apart is refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache import keys as keys_module
from hicache.connectors import config_values
from hicache.errors import SpecError, UsageError
from hicache.keys import BlockKeys, FieldValue, chained_key, object_key
from hicache.spec import CacheSpec
from hicache.tenancy import physical_key, tenant_digest
from tests.connectors import test_sglang_identity as sglang
from tests.core.test_spec import spec_of

NAMESPACE = bytes(range(32))


# -- any two of them -------------------------------------------------------------------------------------------------

TRICKS = [
    "",
    "a",
    "b",
    "ab",
    "é",
    "e\u0301",
    "A",
    "\uff21",
    "a\0",
    "\0",
    "1",
    "True",
    "None",
    "extra.a",
    "namespace",
    " a",
]
texts = st.sampled_from(TRICKS) | st.text(max_size=3)
values = st.none() | st.booleans() | st.integers(-2, 2) | st.just(2**64) | texts | st.sampled_from([b"", b"a", b"1"])
tokens = st.lists(st.sampled_from([0, 1, 2, -1, 2**31, 2**32, 2**63 - 1, -(2**63)]), min_size=2, max_size=4)


@dataclasses.dataclass(frozen=True)
class Object:
    """All that an object in L3 is named by."""

    tenant: str
    model: str
    revision: str
    identity: tuple[tuple[str, FieldValue], ...]
    salt: bytes | None
    extras: tuple[tuple[str, FieldValue], ...]
    tokens: tuple[int, ...]
    group: int
    shard: int

    @property
    def name(self) -> bytes:
        spec = CacheSpec(self.model, self.revision, spec_of().groups, page_tokens=2, identity=self.identity)
        keys = BlockKeys(spec.namespace, page_tokens=2)
        block_key = keys.chain(list(self.tokens), parent=keys.root(salt=self.salt, extras=dict(self.extras)))[-1]
        return physical_key(tenant_digest(self.tenant), object_key(block_key, group=self.group, shard=self.shard))

    @property
    def meaning(self) -> str:
        """Tells types apart, as ``==`` does not; tokens up to the last full page."""
        whole = self.tokens[: len(self.tokens) // 2 * 2]
        return repr(dataclasses.replace(self, tokens=whole))


pairs = st.dictionaries(texts, values.filter(lambda value: value != 2**64), max_size=2).map(
    lambda made: tuple(sorted(made.items()))
)
objects = st.builds(
    Object,
    tenant=texts,
    model=texts,
    revision=texts,
    identity=pairs,
    salt=st.none() | st.sampled_from([b"", b"a", b"ab"]),
    extras=st.dictionaries(texts, values, max_size=2).map(lambda made: tuple(sorted(made.items()))),
    tokens=tokens.map(tuple),
    group=st.sampled_from([0, 1, 256, 65535]),
    shard=st.sampled_from([0, 1, 256, 65535]),
)


@given(one=objects, other=objects)
@settings(max_examples=300)
def test_any_two_objects_that_differ_have_two_names(one: Object, other: Object) -> None:
    assert (one.name == other.name) == (one.meaning == other.meaning)


@given(one=objects, field=st.sampled_from([field.name for field in dataclasses.fields(Object)]), donor=objects)
@settings(max_examples=300)
def test_a_field_of_another_object_makes_another_name(one: Object, field: str, donor: Object) -> None:
    changed = dataclasses.replace(one, **{field: getattr(donor, field)})
    assert (one.name == changed.name) == (one.meaning == changed.meaning)


def test_strings_may_be_moved_between_fields_and_never_meet() -> None:
    """Every assignment of these strings to these fields has a name of its own."""
    names = set()
    for tenant, model, revision, salt, lora in itertools.product(
        ["a", "ab", "b"], ["a", "ab"], ["", "b"], ["", "a", None], ["", "b"]
    ):
        encoded = None if salt is None else salt.encode()
        names.add(Object(tenant, model, revision, (), encoded, (("lora", lora),), (1, 2), 0, 0).name)
    assert len(names) == 3 * 2 * 2 * 3 * 2


@given(
    one=st.tuples(st.binary(max_size=3), st.integers(0, 3), st.integers(0, 3)),
    other=st.tuples(st.binary(max_size=3), st.integers(0, 3), st.integers(0, 3)),
)
def test_block_group_and_shard_are_three_places_of_a_name(
    one: tuple[bytes, int, int], other: tuple[bytes, int, int]
) -> None:
    def name(of: tuple[bytes, int, int]) -> bytes:
        key, group, shard = of
        return object_key(key.ljust(32, b"\0"), group=group, shard=shard)

    def meaning(of: tuple[bytes, int, int]) -> tuple[bytes, int, int]:
        return (of[0].ljust(32, b"\0"), *of[1:])

    assert (name(one) == name(other)) == (meaning(one) == meaning(other))


def test_a_page_of_an_engine_has_the_name_of_no_other_root_or_hash() -> None:
    roots, hashes = (b"r" * 32, b"s" * 32), (b"a", b"ab", b"a\0", b"b" * 32)
    made = [chained_key(root, page) for root in roots for page in hashes]
    assert len(set(made)) == len(made)


class Mode(Enum):
    A = 1


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([0.0, -0.0, 1.0, 1e16, 0.1, float("inf")])
    | st.sampled_from([*TRICKS, "1.0", "Mode.A", "61", "/a", '["a"]', '["list","a"]', '["float","1.0"]', "x" * 600])
    | st.sampled_from([b"", b"a", Mode.A, Path("/a"), int])
    | st.sampled_from([frozenset({"a"}), frozenset({1, "1"})]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "1", 1, "list"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def _meaning(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{sorted((repr(key), _meaning(item)) for key, item in value.items())}}}"
    if isinstance(value, frozenset):
        return f"set{sorted(map(_meaning, value))}"
    return f"[{', '.join(map(_meaning, value))}]" if isinstance(value, list) else repr(value)


@given(one=plain, other=plain)
@example(one=1.0, other="1.0")
@example(one=["a"], other='["a"]')
@example(one=Mode.A, other="Mode.A")
@example(one={1: "a"}, other={"1": "a"})
@example(one={1: "a", "1": "b"}, other={"1": "b"})
@example(one=b"a", other="61")
@example(one=frozenset({1, "1"}), other=frozenset({1}))
@settings(max_examples=300)
def test_any_two_values_of_a_config_of_vllm_that_differ_make_two_namespaces(one: object, other: object) -> None:
    names = [config_values.bounded("x", config_values.plain("x", value)) for value in (one, other)]
    assert (keys_module.digest_fields([("x", names[0])]) == keys_module.digest_fields([("x", names[1])])) == (
        _meaning(one) == _meaning(other)
    )


def test_the_text_of_a_digest_is_not_taken_for_what_it_stands_for() -> None:
    long = config_values.bounded("x", "x" * 600)
    assert config_values.bounded("x", long) != long


def test_arguments_of_sglang_are_told_apart_by_kind() -> None:
    given_ones = [None, "None", True, "True", 1, "1", 1.0, "1.0", "float 1.0"]
    made = [sglang.root(sglang.identity(quantization=value)) for value in given_ones]
    assert len(set(made)) == len(made)


# -- what cannot be told apart is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.5, [1], {"a": 1}, object(), np.float32(1)], ids=lambda value: type(value).__name__)
def test_a_value_without_one_text_is_no_part_of_a_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"identity field 'extra\.x'"):
        BlockKeys(NAMESPACE, page_tokens=2).root(extras={"x": value})


@pytest.mark.parametrize("make", [lambda text: CacheSpec(text, "1", spec_of().groups).namespace, tenant_digest])
def test_half_a_surrogate_pair_is_refused_or_at_least_no_other_text(make: Callable[[str], bytes]) -> None:
    with pytest.raises((UsageError, UnicodeEncodeError)):
        make("model \udc80")


def test_a_number_of_the_identity_that_hicached_cannot_be_told_is_refused_at_once() -> None:
    for value in (2**64, -(2**63) - 1):
        with pytest.raises(SpecError, match=r"identity\.image"):
            spec_of(identity=(("image", value),))
    assert (
        spec_of(identity=(("image", 2**64 - 1),)).namespace != spec_of(identity=(("image", str(2**64 - 1)),)).namespace
    )


def test_a_number_may_have_as_many_digits_as_it_likes() -> None:
    roots = {BlockKeys(NAMESPACE, page_tokens=2).root(extras={"image": 16**power}) for power in (0, 3999, 4000, 4001)}
    assert len(roots) == 4
