"""Block keys: golden vectors, every form of input, and that two identities never share a key."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError, UsageError
from hicache.keys import KEY_HASHES, BlockKeys, FieldValue, KeyHash, digest_fields, encode_fields, object_key

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text())
NAMESPACE = bytes(range(32))

values = st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=4) | st.binary(max_size=4)
names = st.text(max_size=3)
field_lists = st.lists(st.tuples(names, values), max_size=4)
hashes = st.sampled_from(KEY_HASHES)


def block_keys(*, page_tokens: int = 4, key_hash: KeyHash = "blake2b", namespace: bytes = NAMESPACE) -> BlockKeys:
    return BlockKeys(namespace, page_tokens=page_tokens, key_hash=key_hash)


# -- golden vectors --------------------------------------------------------------------------------------------------


def decoded(value: object) -> object:
    """Bytes are written as {"hex": ...} in the file."""
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


@pytest.mark.parametrize("vector", GOLDEN["chains"], ids=lambda vector: vector["name"])
def test_roots_and_chains_are_what_they_have_always_been(vector: dict[str, object]) -> None:
    made = BlockKeys(bytes.fromhex(vector["namespace"]), page_tokens=vector["page_tokens"], key_hash=vector["key_hash"])
    extras = {name: decoded(value) for name, value in vector["extras"].items()}
    root = made.root(salt=decoded(vector["salt"]), extras=extras)
    assert root.hex() == vector["root"]
    assert [key.hex() for key in made.chain(vector["tokens"], parent=root)] == vector["keys"]


@pytest.mark.parametrize("vector", GOLDEN["object_keys"], ids=lambda vector: f"{vector['group']}-{vector['shard']}")
def test_object_keys_are_what_they_have_always_been(vector: dict[str, object]) -> None:
    made = object_key(bytes.fromhex(vector["block_key"]), group=vector["group"], shard=vector["shard"])
    assert made.hex() == vector["object_key"]


@pytest.mark.parametrize("vector", GOLDEN["digests"], ids=lambda vector: vector["name"])
def test_field_digests_are_what_they_have_always_been(vector: dict[str, object]) -> None:
    fields = [(name, decoded(value)) for name, value in vector["fields"]]
    assert encode_fields(fields).hex() == vector["encoded"]
    assert digest_fields(fields).hex() == vector["digest"]


# -- tokens ----------------------------------------------------------------------------------------------------------


@given(tokens=st.lists(st.integers(0, 2**15 - 1), max_size=20), key_hash=hashes)
def test_equal_token_ids_give_equal_keys_from_whatever_holds_them(tokens: list[int], key_hash: KeyHash) -> None:
    made = block_keys(key_hash=key_hash)
    root = made.root()
    expected = made.chain(tokens, parent=root)
    assert made.chain(tuple(tokens), parent=root) == expected
    for dtype in ("int16", "int32", "int64", "uint16", "uint32", "uint64", ">i4", ">i8"):
        assert made.chain(np.array(tokens, dtype=dtype), parent=root) == expected
    strided = np.zeros(2 * len(tokens), dtype=np.int32)
    strided[::2] = tokens
    assert made.chain(strided[::2], parent=root) == expected


@given(tokens=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), cut=st.integers(0, 5), key_hash=hashes)
def test_keys_made_page_by_page_are_those_made_at_once(tokens: list[int], cut: int, key_hash: KeyHash) -> None:
    made = block_keys(key_hash=key_hash)
    root = made.root()
    whole = made.chain(tokens, parent=root)
    first = made.chain(tokens[: cut * 4], parent=root)
    assert first == whole[:cut]
    assert first + made.chain(tokens[cut * 4 :], parent=first[-1] if first else root) == whole


@given(tokens=st.lists(st.integers(0, 9), max_size=20), key_hash=hashes)
def test_a_partial_page_has_no_key(tokens: list[int], key_hash: KeyHash) -> None:
    made = block_keys(key_hash=key_hash)
    keys = made.chain(tokens, parent=made.root())
    assert len(keys) == len(tokens) // 4
    assert keys == made.chain(tokens[: len(keys) * 4], parent=made.root())
    assert all(len(key) == made.key_bytes for key in keys)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0, 2.0],
        [1, None],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        [True, False],
        np.array([True, False]),
        np.array([[1, 2]]),
        np.array([1.5]),
        np.array([2**63], dtype=np.uint64),
        [2**63],
        [-1, 2**63],
        [2**70],
        ["1"],
        "1234",
        b"1234",
        5,
        None,
        {1, 2},
    ],
    ids=repr,
)
def test_what_is_no_sequence_of_token_ids_is_refused(tokens: object) -> None:
    made = block_keys()
    with pytest.raises(UsageError, match="token id"):
        made.chain(tokens, parent=made.root())  # type: ignore[arg-type]


# -- identity --------------------------------------------------------------------------------------------------------


@given(left=field_lists, right=field_lists)
@settings(max_examples=200)
def test_different_fields_never_encode_alike(
    left: list[tuple[str, FieldValue]], right: list[tuple[str, FieldValue]]
) -> None:
    def typed(fields: list[tuple[str, FieldValue]]) -> list[tuple[str, type, FieldValue]]:
        return [(name, type(value), value) for name, value in fields]

    assert (encode_fields(left) == encode_fields(right)) == (typed(left) == typed(right))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([("a", None)], []),
        ([("a", None)], [("a", "")]),
        ([("a", "")], [("a", b"")]),
        ([("a", "")], [("a", 0)]),
        ([("a", 0)], [("a", False)]),
        ([("a", 1)], [("a", True)]),
        ([("a", 1)], [("a", "1")]),
        ([("a", "1")], [("a", b"1")]),
        ([("a", "b"), ("c", "d")], [("a", "bc"), ("", "d")]),
        ([("ab", "c")], [("a", "bc")]),
        ([("a", "x"), ("b", "y")], [("b", "y"), ("a", "x")]),
    ],
    ids=repr,
)
def test_absent_empty_zero_and_moved_fields_differ(left: list[tuple[str, FieldValue]], right: object) -> None:
    assert encode_fields(left) != encode_fields(right)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1.0, [1], np.int64(1), object], ids=str)
def test_a_field_of_another_type_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(UsageError, match="lora"):
        block_keys().root(extras={"lora": value})  # type: ignore[dict-item]


Identity = tuple[bytes, bytes | None, tuple[tuple[str, FieldValue], ...], tuple[int, ...]]
identities = st.tuples(
    st.binary(min_size=1, max_size=2),
    st.none() | st.binary(max_size=2),
    st.dictionaries(st.sampled_from(["", "a", "lora", "salt", "extra.a", "namespace"]), values, max_size=2).map(
        lambda extras: tuple(sorted(extras.items()))
    ),
    st.lists(st.integers(0, 2), min_size=4, max_size=9).map(tuple),
)


def last_key(identity: Identity, key_hash: KeyHash) -> bytes:
    namespace, salt, extras, tokens = identity
    made = block_keys(key_hash=key_hash, namespace=namespace)
    return made.chain(tokens, parent=made.root(salt=salt, extras=dict(extras)))[-1]


@given(left=identities, right=identities, key_hash=hashes)
@settings(max_examples=200)
def test_two_identities_never_share_a_key(left: Identity, right: Identity, key_hash: KeyHash) -> None:
    def meaning(identity: Identity) -> object:
        namespace, salt, extras, tokens = identity
        return namespace, salt, [(n, type(v), v) for n, v in extras], tokens[: len(tokens) // 4 * 4]

    same = meaning(left) == meaning(right)
    assert (last_key(left, key_hash) == last_key(right, key_hash)) == same


@given(
    identity=identities,
    field=st.sampled_from(["namespace", "salt", "extras", "first", "last"]),
    key_hash=hashes,
)
def test_changing_any_one_part_of_an_identity_changes_the_key(
    identity: Identity, field: str, key_hash: KeyHash
) -> None:
    namespace, salt, extras, tokens = identity
    full = len(tokens) // 4 * 4
    changed: dict[str, Identity] = {
        "namespace": (namespace + b"\x00", salt, extras, tokens),
        "salt": (namespace, b"" if salt is None else salt + b"\x00", extras, tokens),
        "extras": (namespace, salt, (*extras, ("zz", None)), tokens),
        "first": (namespace, salt, extras, (tokens[0] + 1, *tokens[1:])),
        "last": (namespace, salt, extras, (*tokens[: full - 1], tokens[full - 1] + 1)),
    }
    assert last_key(changed[field], key_hash) != last_key(identity, key_hash)


def test_extras_may_come_in_any_order() -> None:
    made = block_keys()
    assert made.root(extras={"a": 1, "b": 2}) == made.root(extras={"b": 2, "a": 1})


@pytest.mark.parametrize("key_hash", KEY_HASHES)
def test_a_page_never_has_the_key_of_a_root_or_of_the_same_tokens_elsewhere(key_hash: KeyHash) -> None:
    made = block_keys(key_hash=key_hash)
    root = made.root()
    keys = made.chain([7] * 40, parent=root)
    assert len({root, *keys}) == 11


def test_the_two_hashes_share_no_key() -> None:
    slow, fast = block_keys(), block_keys(key_hash="xxh3_128")
    assert slow.key_bytes == 32
    assert fast.key_bytes == 16
    assert slow.root()[:16] != fast.root()


@given(
    group=st.integers(0, 2**16 - 1),
    shard=st.integers(0, 2**16 - 1),
    other_group=st.integers(0, 2**16 - 1),
    other_shard=st.integers(0, 2**16 - 1),
)
def test_br_027_every_group_and_shard_has_object_keys_of_its_own(
    group: int, shard: int, other_group: int, other_shard: int
) -> None:
    same = (group, shard) == (other_group, other_shard)
    key = bytes(32)
    assert (object_key(key, group=group, shard=shard) == object_key(key, group=other_group, shard=other_shard)) == same


@pytest.mark.parametrize(
    ("settings", "named"), [({"key_hash": "md5"}, "key_hash = 'md5'"), ({"page_tokens": 0}, "page_tokens = 0")]
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        block_keys(**settings)  # type: ignore[arg-type]
