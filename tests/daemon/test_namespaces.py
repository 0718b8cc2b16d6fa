"""What a daemon remembers of namespaces, and of whom."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.daemon.namespaces import NAMESPACES_PER_TENANT_MAX, Descriptor, KnownNamespaces, read_descriptor
from hicache.daemon.refusals import Refusal
from hicache.daemon.tenants import Tenant
from hicache.keys import FieldValue
from hicache.spec import CacheSpec, PagedGroup, namespace_digest

ALICE, BOB = Tenant.named("alice"), Tenant.named("bob")

values = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=10) | st.binary(max_size=10)


def meet(known: KnownNamespaces, tenant: Tenant, **fields: FieldValue) -> list[str]:
    descriptor: Descriptor = {"model": "m", **fields}
    return known.meet(tenant, namespace_digest(descriptor), descriptor)


def test_the_nearest_namespace_of_the_same_model_and_tenant_is_compared() -> None:
    known = KnownNamespaces()
    assert meet(known, ALICE, page=64, tp=1, layout="a") == []
    assert meet(known, ALICE, page=32, tp=4, layout="b") == ["layout: 'a' != 'b'", "page: 64 != 32", "tp: 1 != 4"]
    assert meet(known, ALICE, page=32, tp=4, layout="a") == ["layout: 'b' != 'a'"]
    assert meet(known, ALICE, page=64, tp=1, layout="a") == []
    assert meet(known, BOB, page=16, tp=1, layout="a") == []
    assert meet(known, ALICE, model="other", page=16) == []


def test_only_so_many_namespaces_are_remembered() -> None:
    known = KnownNamespaces()
    for number in range(NAMESPACES_PER_TENANT_MAX + 5):
        meet(known, ALICE, revision=number)
    assert len(known._by_tenant[ALICE]) == NAMESPACES_PER_TENANT_MAX


@given(descriptor=st.dictionaries(st.text(max_size=10), values, max_size=8))
def test_a_descriptor_comes_back_from_its_wire_form(descriptor: Descriptor) -> None:
    raw = msgspec.msgpack.encode(descriptor)
    assert read_descriptor(raw, namespace_digest(descriptor)) == descriptor


@given(raw=st.binary(max_size=200))
def test_no_bytes_make_the_reader_fail_otherwise_than_with_a_refusal(raw: bytes) -> None:
    with pytest.raises(Refusal, match="BAD_NAMESPACE"):
        read_descriptor(raw, b"\0" * 32)


def test_a_real_spec_is_understood() -> None:
    group = PagedGroup("attention", (0, 1), heads=2, head_dim=8, dtype="float16")
    spec = CacheSpec("model", "1", (group,))
    assert read_descriptor(msgspec.msgpack.encode(spec.descriptor), spec.namespace) == spec.descriptor
