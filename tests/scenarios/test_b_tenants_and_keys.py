"""Tenants and keys: collisions, names of any length, quotas that not everybody has."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache import keys as keys_module
from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX
from hicache.backends.key_rows import KeyHash
from hicache.cache import HiCache
from hicache.daemon.config import DaemonConfig
from hicache.daemon.tenants import Tenants
from hicache.errors import ConfigError, SpecError, UsageError
from hicache.keys import KEY_HASHES, BlockKeys
from hicache.keys import KeyHash as HashName
from hicache.outcome import Outcome
from hicache.pools import L1Pool, L2Pool
from hicache.spec import CacheSpec, PagedGroup
from hicache.tenancy import tenant_digest
from hicache.wire.protocol import KEY_BYTES_MAX
from tests.core.small_engine import ATTENTION, PAGE, SmallEngine, prompt
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import ALICE, BOB, DaemonProcess, refused_start, scrape

Start = Callable[..., DaemonProcess]
StartThread = Callable[..., ThreadedDaemon]

OBJECT_BYTES = 60 * 1024  # 64 KiB with its header


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_br_020_keys_whose_hashes_collide_in_the_index_are_still_two_objects(
    start_thread: StartThread, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(KeyHash, "of_row", lambda hasher, row: 5)
    monkeypatch.setattr(KeyHash, "of_rows", lambda hasher, rows: np.full(len(rows), 5, dtype=np.uint64))
    daemon = start_thread(backend=backend)
    with Client(daemon.target) as client:
        stored, other = object_key(1), object_key(2)
        assert client.put_stream([stored], [b"page A"]) == [Outcome.OK]
        assert client.present([other, stored]) == [False, True]
        assert client.get_stream([other, stored], [6, 6]) == [Outcome.ABSENT, b"page A"]
        assert client.put_stream([other], [b"page B"]) == [Outcome.OK]
        assert client.delete([stored]) == [Outcome.OK]
        assert client.get_stream([other, stored], [6, 6]) == [b"page B", Outcome.ABSENT]


def test_br_020_under_a_hash_that_can_be_attacked_no_request_may_have_a_salt_of_its_own() -> None:
    def opened(**changes: object) -> HiCache:
        spec = CacheSpec("m", "r", (ATTENTION,), page_tokens=PAGE, **changes)  # type: ignore[arg-type]
        return HiCache(spec, l1=L1Pool(spec, pages=4, state_slots=0), l2=L2Pool(spec, [4]), l3=None, salt=b"ours")

    with opened(key_hash="xxh3_128") as fast:
        for salt in (None, b"ours"):
            fast.release(fast.match(prompt(2), salt=salt))
        for salt in (b"", b"theirs"):
            with pytest.raises(UsageError, match=r"salt of its own.*expected key_hash 'blake2b'"):
                fast.match(prompt(2), salt=salt)
    with opened() as slow:
        slow.release(slow.match(prompt(2), salt=b"theirs"))


MODELS = ["org/" + "ä model " * 20 + "x" * 36, "a" * 255, "m/../../m", "m\x00n"]


@pytest.mark.parametrize("model", MODELS, ids=["200 characters", "255 characters", "dots", "a zero"])
@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_br_022_the_longest_names_that_are_allowed_store_and_load(
    start_thread: StartThread, folder: Path, backend: str, model: str
) -> None:
    tenant = "t" * 64
    (folder / "tenants").write_text(f"{tenant} {ALICE}\n")
    daemon = start_thread(backend=backend, tenants_file=str(folder / "tenants"))
    address = f"unix://{daemon.config.socket}"
    salt = b"s" * 100_000
    for is_first in (True, False):
        engine = SmallEngine((ATTENTION,), address=address, token=ALICE, model=model, revision="r" * 200, salt=salt)
        assert engine.cache.l3 is not None
        assert engine.cache.l3.wait_ready(timeout_s=20)
        found = engine.serve(prompt(3), extras={"lora": "l" * 10_000}).by_source
        assert found["computed" if is_first else "l3"] >= 3 * PAGE
        engine.settle()
        engine.close()
    names = [path.name for path in Path(daemon.config.path).rglob("*")]
    assert max(map(len, names)) <= 255
    assert scrape(daemon.ready.http)["hicache_store_objects"] == 3


def test_br_022_what_is_too_long_is_refused_once_at_the_start(folder: Path) -> None:
    (folder / "tenants").write_text(f"{'t' * 65} {ALICE}\n")
    with pytest.raises(ConfigError, match="tenants_file"):
        Tenants.load(str(folder / "tenants"))
    assert KEY_BYTES_MAX < PHYSICAL_KEY_BYTES_MAX <= 255, "half of it as hex digits, and LMDB takes 511"


@pytest.mark.parametrize("key_hash", KEY_HASHES)
def test_br_029_a_process_that_makes_other_keys_than_all_others_does_not_start(
    monkeypatch: pytest.MonkeyPatch, key_hash: str
) -> None:
    BlockKeys(bytes(32), page_tokens=4, key_hash=key_hash)  # type: ignore[arg-type]
    broken = keys_module.blake2b
    monkeypatch.setattr(keys_module, "blake2b", lambda *raw, **form: broken(*raw, **(form | {"person": b"other"})))
    monkeypatch.setattr(keys_module.xxhash, "xxh3_128_hexdigest", lambda raw: "0" * 32)
    with pytest.raises(ConfigError, match=f"key_hash = '{key_hash}'.*known page"):
        BlockKeys(bytes(32), page_tokens=4, key_hash=key_hash)  # type: ignore[arg-type]


def put(client: Client, numbers: range) -> list[Outcome]:
    keys = [object_key(number) for number in numbers]
    return client.put_stream(keys, [payload_of(number, OBJECT_BYTES) for number in numbers])


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_br_030_a_tenant_without_a_quota_keeps_what_it_has_whatever_one_with_a_quota_does(
    start_thread: StartThread, folder: Path, backend: str
) -> None:
    (folder / "tenants").write_text(f"alice {ALICE} quota_objects=20\nbob {BOB}\n")
    daemon = start_thread(
        backend=backend, tenants_file=str(folder / "tenants"), capacity_bytes="8MiB", object_bytes_max="1MiB"
    )
    with Client(daemon.target, token=ALICE) as alice, Client(daemon.target, token=BOB) as bob:
        assert put(bob, range(10)) == [Outcome.OK] * 10
        for first in range(0, 300, 30):
            assert put(alice, range(first, first + 30)) == [Outcome.OK] * 30
        assert bob.present([object_key(number) for number in range(10)]) == [True] * 10
        assert alice.stats().tenant_objects == 20
        assert put(bob, range(100, 400)) == [Outcome.OK] * 300, "and no quota is not one of zero"
        # Above what alice has left, less what is in flight: that counts twice for a moment, as stored and as reserved.
        assert bob.stats().tenant_objects > 60
        assert alice.stats().tenant_objects == 20, "within its share"


def test_br_030_a_default_quota_is_that_of_every_tenant_without_one(start_thread: StartThread, folder: Path) -> None:
    (folder / "tenants").write_text(f"alice {ALICE} quota_objects=20\nbob {BOB}\n")
    daemon = start_thread(tenants_file=str(folder / "tenants"), quota_objects=5)
    with Client(daemon.target, token=ALICE) as alice, Client(daemon.target, token=BOB) as bob:
        for client in (alice, bob):
            assert put(client, range(30)) == [Outcome.OK] * 30
        assert (alice.stats().tenant_objects, bob.stats().tenant_objects) == (20, 5)
    assert DaemonConfig().quota_objects == 0, "which is none"


def test_br_030_a_store_that_cannot_keep_a_quota_does_not_start(start: Start, folder: Path) -> None:
    (folder / "tenants").write_text(f"alice {ALICE} quota_bytes=1GiB\nbob {BOB}\n")
    shared = {"backend": "mooncake", "mooncake_master": "127.0.0.1:1", "path": None, "capacity_bytes": None}
    code, line = refused_start(start(wait=False, tenants_file=str(folder / "tenants"), **shared))
    assert code == 2
    assert "quota_bytes" in line
    assert "alice" in line


KEYS = [object_key(number) for number in range(4)]
PAYLOADS = [payload_of(number, 5000) for number in range(4)]


@pytest.fixture
def shared(start_thread: StartThread, two_tenants: str) -> ThreadedDaemon:
    return start_thread(tenants_file=two_tenants)


@pytest.fixture
def alice(shared: ThreadedDaemon) -> Iterator[Client]:
    with Client(shared.target, token=ALICE) as client:
        assert client.put_stream(KEYS, PAYLOADS) == [Outcome.OK] * 4
        yield client


@pytest.fixture
def bob(shared: ThreadedDaemon) -> Iterator[Client]:
    with Client(shared.target, token=BOB) as client:
        yield client


def test_br_024_another_tenants_objects_are_absent_by_every_way_and_present_for_their_owner(
    shared: ThreadedDaemon, alice: Client, bob: Client, memory: Memory
) -> None:
    region = bob.attach(memory).region_id
    sizes = [len(payload) for payload in PAYLOADS]

    assert bob.lookup(KEYS, lease_ms=60_000) == ([Outcome.ABSENT] * 4, 0)
    assert bob.get(region, KEYS, [n * 5000 for n in range(4)], sizes) == [Outcome.ABSENT] * 4
    assert bob.get_stream(KEYS, sizes) == [Outcome.ABSENT] * 4
    assert bob.delete(KEYS) == [Outcome.ABSENT] * 4
    assert memory.bytes[:] == bytes(memory.size_bytes)
    assert (bob.stats().tenant_objects, bob.stats().tenant_used_bytes) == (0, 0)

    with Client(shared.target, token=ALICE) as control:
        assert control.present(KEYS) == [True] * 4
        assert control.get_stream(KEYS, sizes) == PAYLOADS


def test_br_024_a_key_forged_with_the_owners_digest_in_it_reads_nothing(alice: Client, bob: Client) -> None:
    physical = tenant_digest("alice") + KEYS[0]
    for forged in (physical, tenant_digest("alice"), tenant_digest("alice") + b"k"):
        assert bob.present([forged]) == [False]
    assert alice.present([KEYS[0]]) == [True]


def test_br_024_the_same_key_of_two_tenants_names_two_objects(alice: Client, bob: Client) -> None:
    assert bob.put_stream(KEYS[:1], [b"mine"]) == [Outcome.OK], "EXISTS would tell that alice has it"
    assert bob.get_stream(KEYS[:1], [4]) == [b"mine"]
    assert alice.get_stream(KEYS[:1], [5000]) == PAYLOADS[:1]
    assert bob.delete(KEYS[:1]) == [Outcome.OK]
    assert alice.present(KEYS[:1]) == [True]


def test_br_024_probes_for_foreign_present_and_absent_keys_take_as_long(alice: Client, bob: Client) -> None:
    absent = [object_key(number) for number in range(100, 104)]
    times_s: dict[str, list[float]] = {"foreign": [], "absent": []}
    for _ in range(300):
        for name, keys in (("foreign", KEYS), ("absent", absent)):
            started = time.perf_counter()
            assert bob.present(keys) == [False] * 4
            times_s[name].append(time.perf_counter() - started)
    foreign, missing = (statistics.median(times_s[name]) for name in ("foreign", "absent"))
    assert 0.7 < foreign / missing < 1.4


def test_br_028_heads_that_are_declared_to_be_replicated_are_refused_at_the_start() -> None:
    """Latents have one plane; keys and values of heads, of which each rank has its own, have two."""
    latent = PagedGroup.mla("mla", layers=(0,), latent_dim=24, rope_dim=8, dtype="float32")
    spec = CacheSpec("m", "r", (latent,), page_tokens=PAGE, tp_size=4)
    pages = 8
    L1Pool.adopt(spec, {0: [torch.zeros(pages, 1, PAGE, 1, 32)]}, rank=1)
    for heads in (
        torch.zeros(pages, 2, PAGE, 1, 32),
        torch.zeros(pages, 2, PAGE, 4, 8),
        torch.zeros(pages, 1, PAGE, 4, 8),
    ):
        with pytest.raises(SpecError, match="mla"):
            L1Pool.adopt(spec, {0: [heads]}, rank=1)


@pytest.mark.parametrize("seed", ["0", "1", "random", None])
def test_br_029_keys_do_not_depend_on_the_seed_of_the_process(seed: str | None) -> None:
    program = (
        "from hicache.keys import BlockKeys\n"
        "k = BlockKeys(bytes(range(32)), page_tokens=4)\n"
        "root = k.root(salt=b's', extras={'lora': 'x', 'image': b'y', 'rank': 1})\n"
        "print(k.chain(list(range(12)), parent=root)[-1].hex())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    made = BlockKeys(bytes(range(32)), page_tokens=4)
    root = made.root(salt=b"s", extras={"rank": 1, "image": b"y", "lora": "x"})
    assert answer.stdout.strip() == made.chain(list(range(12)), parent=root)[-1].hex()


@pytest.mark.parametrize("key_hash", KEY_HASHES)
def test_br_018_the_same_string_in_another_field_is_another_key(key_hash: HashName) -> None:
    def root(namespace: bytes = b"n", **parts: object) -> bytes:
        return BlockKeys(namespace, page_tokens=4, key_hash=key_hash).root(**parts)  # type: ignore[arg-type]

    roots = [
        root(),
        root(namespace=b"X"),
        root(salt=b"X"),
        root(salt=b""),
        root(extras={"lora": "X"}),
        root(extras={"lora": b"X"}),
        root(extras={"lora": ""}),
        root(extras={"lora": None}),
        root(extras={"image": "X"}),
        root(extras={"salt": "X"}),
        root(extras={"salt": b"X"}),
        root(extras={"namespace": b"X"}),
        root(salt=b"X", extras={"lora": ""}),
        root(salt=b"", extras={"lora": "X"}),
        root(extras={"lora": "X", "image": ""}),
        root(extras={"lora": "", "image": "X"}),
    ]
    assert len(set(roots)) == len(roots)
