"""Cache specs: what an object weighs, how far a group reaches, and what tells two namespaces apart."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import SpecError
from hicache.spec import (
    DTYPE_BYTES,
    CacheSpec,
    Group,
    HeadSplit,
    PagedGroup,
    StateField,
    StateGroup,
    differing_fields,
    dtype_bytes,
    namespace_digest,
)

GQA = PagedGroup("attn", (0, 1, 2), heads=8, head_dim=128, dtype="bfloat16")
FIELD = StateField("ssm", (4, 8), "float32")
STATE = StateGroup("gdn", (3, 4), (FIELD, StateField("conv", (6, 3), "bfloat16")))


def spec_of(*groups: Group, **settings: object) -> CacheSpec:
    return CacheSpec("model", "revision", groups or (GQA, STATE), **settings)  # type: ignore[arg-type]


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (GQA, 3 * 2 * 64 * 8 * 128 * 2),
        (PagedGroup("fp8", (0,), heads=4, head_dim=64, dtype="float8_e4m3fn"), 2 * 64 * 4 * 64),
        (PagedGroup("odd", (5,), heads=1, head_dim=3, dtype="int8", planes=1), 64 * 3),
        (PagedGroup.mla("mla", layers=(0, 1), latent_dim=512, rope_dim=64, dtype="bfloat16"), 2 * 64 * 576 * 2),
        (PagedGroup.mla("mla", layers=(0,), latent_dim=512, rope_dim=64, dtype="float8_e4m3fn"), 64 * 576),
        (PagedGroup("swa", (0,), heads=1, head_dim=1, dtype="float32", window_tokens=128), 2 * 64 * 4),
        (STATE, 2 * (4 * 8 * 4 + 6 * 3 * 2)),
    ],
    ids=lambda value: value.name if isinstance(value, (PagedGroup, StateGroup)) else str(value),
)
def test_an_object_weighs_what_its_layers_planes_tokens_and_elements_make(group: Group, expected: int) -> None:
    assert group.object_bytes(64) == expected
    assert spec_of(group).object_bytes == (expected,)


def test_an_mla_row_has_576_elements_in_one_plane() -> None:
    group = PagedGroup.mla("mla", layers=(0,), latent_dim=512, rope_dim=64, dtype="bfloat16")
    assert group.planes == 1
    assert group.row_bytes == 576 * 2


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.sampled_from(sorted(DTYPE_BYTES)), st.booleans()), max_size=5),
    layers=st.integers(1, 3),
    page_tokens=st.sampled_from([1, 64]),
)
def test_transient_fields_weigh_in_l1_only(sizes: list[tuple[int, str, bool]], layers: int, page_tokens: int) -> None:
    fields = [StateField(f"f{i}", (size, 2), dtype, transient) for i, (size, dtype, transient) in enumerate(sizes)]
    fields.append(StateField("kept", (1,), "float32"))
    group = StateGroup("g", tuple(range(layers)), tuple(fields))
    weights = [layers * 2 * size * DTYPE_BYTES[dtype] for size, dtype, _ in sizes]
    kept = [weight for weight, (_, _, transient) in zip(weights, sizes, strict=True) if not transient]
    assert group.slot_bytes == sum(weights) + layers * 4
    assert group.object_bytes(page_tokens) == sum(kept) + layers * 4
    assert not any(field.transient for field in group.persistent_fields)


@given(window=st.integers(1, 300), page_tokens=st.integers(1, 70), pages=st.integers(1, 40))
def test_a_window_reaches_back_to_the_page_of_the_first_token_that_is_attended_to(
    window: int, page_tokens: int, pages: int
) -> None:
    group = PagedGroup("swa", (0,), 1, 1, "float32", window_tokens=window)
    boundary = pages * page_tokens
    attended = range(max(0, boundary - (window - 1)), boundary)  # by the token at the boundary, besides itself
    needed = {token // page_tokens for token in attended}
    reach = group.reach_pages(page_tokens)
    assert set(range(max(0, pages - reach), pages)) == needed


def test_full_attention_reaches_everything_and_a_state_one_page() -> None:
    assert spec_of(GQA, STATE, page_tokens=7).reach_pages == (None, 1)


# -- the namespace ---------------------------------------------------------------------------------------------------

# For every field of every dataclass that describes a cache: two values that must not share a byte.
OTHERS: dict[type, dict[str, object]] = {
    PagedGroup: {
        "name": "other",
        "layers": (0, 1, 3),
        "heads": 4,
        "head_dim": 64,
        "dtype": "float16",
        "planes": 1,
        "window_tokens": 128,
        "stored_dtype": "float8_e4m3fn",
    },
    StateField: {"name": "other", "shape": (8, 4), "dtype": "int32", "transient": True, "split": HeadSplit(0)},
    StateGroup: {"name": "other", "layers": (3,), "fields": (FIELD,)},
    CacheSpec: {
        "model": "other",
        "revision": "other",
        "groups": (GQA,),
        "page_tokens": 32,
        "key_hash": "xxh3_128",
        "tp_size": 2,
        "tp_lcm": 2,
        "pp_layers": (2, 3),
        "identity": (("quantization", "awq"),),
    },
}
ONE_VALUE = {(CacheSpec, "layout")}  # the digest covers it, though there is only one as yet


def with_part(part: object) -> CacheSpec:
    """A spec that contains ``part``, which is of one of the four classes."""
    match part:
        case CacheSpec():
            return part
        case PagedGroup():
            return spec_of(part, STATE)
        case StateGroup():
            return spec_of(GQA, part)
        case StateField():
            return spec_of(GQA, dataclasses.replace(STATE, fields=(part, *STATE.fields[1:])))
    raise AssertionError(part)


PARTS = {PagedGroup: GQA, StateField: FIELD, StateGroup: STATE, CacheSpec: spec_of()}
ALL_FIELDS = [(kind, field.name) for kind in PARTS for field in dataclasses.fields(kind)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "name"), ALL_FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_every_field_that_describes_a_cache_is_part_of_the_namespace(kind: type, name: str) -> None:
    if (kind, name) in ONE_VALUE:
        assert name in spec_of().descriptor
        return
    assert name in OTHERS[kind], f"{kind.__name__}.{name} is new: give it another value in OTHERS"
    base = with_part(PARTS[kind])
    changed = with_part(dataclasses.replace(PARTS[kind], **{name: OTHERS[kind][name]}))  # type: ignore[type-var]
    assert changed.namespace != base.namespace
    assert differing_fields(base.descriptor, changed.descriptor)


def test_the_order_of_groups_and_fields_is_part_of_the_namespace() -> None:
    assert spec_of(GQA, STATE).namespace != spec_of(STATE, GQA).namespace
    turned = dataclasses.replace(STATE, fields=STATE.fields[::-1])
    assert spec_of(GQA, turned).namespace != spec_of(GQA, STATE).namespace


def test_equal_specs_have_equal_namespaces() -> None:
    assert spec_of().namespace == spec_of().namespace
    assert len(spec_of().namespace) == 32


def test_br_007_another_parallelism_is_another_namespace_although_the_bytes_are_as_many() -> None:
    one = spec_of(dataclasses.replace(GQA, heads=4), tp_size=1)
    two = spec_of(dataclasses.replace(GQA, heads=4), tp_size=2)
    assert one.object_bytes == two.object_bytes
    assert one.namespace != two.namespace
    assert differing_fields(one.descriptor, two.descriptor) == ["group.0.slices: 1 != 2"]


@given(
    left=st.dictionaries(st.text(max_size=2), st.none() | st.booleans() | st.integers(0, 1) | st.text(max_size=1)),
    right=st.dictionaries(st.text(max_size=2), st.none() | st.booleans() | st.integers(0, 1) | st.text(max_size=1)),
)
def test_a_difference_is_named_exactly_when_the_digests_differ(
    left: dict[str, object], right: dict[str, object]
) -> None:
    differs = namespace_digest(left) != namespace_digest(right)  # type: ignore[arg-type]
    assert bool(differing_fields(left, right)) == differs  # type: ignore[arg-type]


def test_a_difference_names_the_field_and_both_values() -> None:
    left, right = spec_of(), dataclasses.replace(spec_of(), page_tokens=32, identity=(("rope", "yarn"),))
    assert differing_fields(left.descriptor, right.descriptor) == [
        "identity.rope: None != 'yarn'",
        "page_tokens: 64 != 32",
    ]


def test_a_descriptor_that_was_sent_in_another_order_gives_the_same_namespace() -> None:
    descriptor = spec_of().descriptor
    received = dict(sorted(descriptor.items(), reverse=True))
    assert list(received) != list(descriptor)
    assert namespace_digest(received) == spec_of().namespace
    assert differing_fields(received, descriptor) == []


def test_an_identity_of_the_engine_may_hold_every_kind_of_value() -> None:
    pairs = (("none", None), ("yes", True), ("one", 1), ("text", "1"), ("raw", b"1"))
    namespaces = {spec_of(identity=(("x", value),)).namespace for _, value in pairs}
    assert len(namespaces) == len(pairs)


# -- what is refused -------------------------------------------------------------------------------------------------


def refused_spec(**settings: object) -> CacheSpec:
    return dataclasses.replace(spec_of(), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: dtype_bytes("float12"), "dtype = 'float12': expected one of float32"),
        (lambda: dataclasses.replace(GQA, dtype="half"), "dtype = 'half'"),
        (lambda: dataclasses.replace(GQA, name=""), "group name = ''"),
        (lambda: dataclasses.replace(GQA, layers=()), r"attn.layers = \(\)"),
        (lambda: dataclasses.replace(GQA, layers=(1, 1)), r"attn.layers = \(1, 1\): expected one or more distinct"),
        (lambda: dataclasses.replace(GQA, heads=0), "attn.heads = 0: expected a whole number of at least 1"),
        (lambda: dataclasses.replace(GQA, head_dim=-1), "attn.head_dim = -1: expected a whole number of at least 1"),
        (lambda: dataclasses.replace(GQA, planes=3), "attn.planes = 3: expected 2"),
        (lambda: dataclasses.replace(GQA, heads=8.0), "attn.heads = 8.0: expected a whole number"),
        (
            lambda: dataclasses.replace(GQA, layers=(0.5,)),
            r"attn.layers = \(0.5,\): expected a tuple of whole numbers of at least 0",
        ),
        (lambda: dataclasses.replace(GQA, layers=7), "attn.layers = 7: expected a tuple of whole numbers"),
        (lambda: dataclasses.replace(GQA, window_tokens=2.5), "attn.window_tokens = 2.5: expected a whole number"),
        (
            lambda: dataclasses.replace(GQA, window_tokens=0),
            "attn.window_tokens = 0: expected a whole number of at least 1, or None",
        ),
        (lambda: dataclasses.replace(FIELD, name=""), "state field name = ''"),
        (lambda: dataclasses.replace(FIELD, shape=()), r"ssm.shape = \(\)"),
        (lambda: dataclasses.replace(FIELD, shape=(2, 0)), r"ssm.shape = \(2, 0\)"),
        (lambda: dataclasses.replace(FIELD, dtype="x"), "dtype = 'x'"),
        (lambda: dataclasses.replace(STATE, fields=(FIELD, FIELD)), "gdn.fields = .*distinct names"),
        (lambda: dataclasses.replace(STATE, fields=()), "gdn.fields = .*at least one field that is not transient"),
        (
            lambda: dataclasses.replace(STATE, fields=(dataclasses.replace(FIELD, transient=True),)),
            "gdn.fields = .*at least one field that is not transient",
        ),
        (lambda: refused_spec(groups=()), r"groups = \[\]"),
        (lambda: refused_spec(groups=(GQA, GQA)), "groups = .*distinct names"),
        (
            lambda: refused_spec(groups=tuple(dataclasses.replace(GQA, name=f"g{i}") for i in range(33))),
            "groups = 33: expected at most 32",
        ),
        (lambda: refused_spec(page_tokens=0), "page_tokens = 0: expected a whole number of at least 1"),
        (lambda: refused_spec(page_tokens="x"), "page_tokens = 'x': expected a whole number"),
        (lambda: refused_spec(tp_size=None), "tp_size = None: expected a whole number"),
        (lambda: refused_spec(tp_size=True), "tp_size = True: expected a whole number"),
        (lambda: refused_spec(tp_lcm=2.0), "tp_lcm = 2.0: expected a whole number"),
        (lambda: refused_spec(pp_layers=4), "pp_layers = 4: expected a tuple of whole numbers"),
        (
            lambda: refused_spec(pp_layers=("2", 2)),
            r"pp_layers = \('2', 2\): expected a tuple of whole numbers of at least 1",
        ),
        (lambda: refused_spec(groups=("attn",)), "groups = .* a tuple of PagedGroup and StateGroup"),
        (
            lambda: StateField("t", (4.0,), "int8"),
            r"t.shape = \(4.0,\): expected a tuple of whole numbers of at least 1",
        ),
        (lambda: StateField("t", (4,), "int8", split=0), "t.split = 0: expected a HeadSplit"),
        (lambda: StateField("t", (4,), "int8", split=HeadSplit("0")), "t.split.axis = '0': expected a whole number"),
        (lambda: StateField("t", (4,), "int8", split=HeadSplit(0, (4,))), r"t.split.sections = \(4,\): .* in each"),
        (lambda: refused_spec(tp_size=0), "tp_size = 0"),
        (lambda: refused_spec(layout="layer_first"), "layout = 'layer_first': expected page_first_direct"),
        (lambda: refused_spec(key_hash="md5"), "key_hash = 'md5': expected one of blake2b"),
        (lambda: refused_spec(identity=(("a", 1), ("a", 2))), "identity = .*distinct names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_exist_is_refused_with_its_value_and_what_would_be_right(make: object, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        make()  # type: ignore[operator]


def test_a_group_is_found_by_its_name() -> None:
    assert spec_of().group_index("gdn") == 1
    with pytest.raises(KeyError):
        spec_of().group_index("nothing")


def test_a_spec_knows_whether_it_has_state() -> None:
    assert spec_of().has_state
    assert not spec_of(GQA).has_state


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_state_field_weighs_the_product_of_its_shape(shape: list[int]) -> None:
    assert StateField("f", tuple(shape), "bfloat16").bytes_per_layer == 2 * math.prod(shape)
