"""BR-125, BR-123: names of any length become physical keys of one size, and one bad item spoils no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX
from hicache.backends.open import open_backend
from hicache.outcome import Outcome
from tests.backends.payloads import get_many, key, payload, put
from tests.core.small_engine import Make, by_source, prompt
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import wait_until

LMDB_KEY_BYTES_MAX = 511


@pytest.mark.parametrize("backend", ["lmdb", "file"])
@pytest.mark.parametrize("length", [0, PHYSICAL_KEY_BYTES_MAX + 1, LMDB_KEY_BYTES_MAX + 1, 1 << 16])
@pytest.mark.parametrize("position", [0, 50, 99])
def test_br_125_one_key_that_cannot_be_stored_does_not_abort_its_batch(
    tmp_path: Path, backend: str, length: int, position: int
) -> None:
    objects = [(key(number), payload(number, 100)) for number in range(100)]
    objects[position] = (b"k" * length, b"of the bad one")
    store = open_backend(f"{backend}://{tmp_path}/store", capacity_bytes=1 << 24)
    expected = [Outcome.REFUSED if number == position else Outcome.OK for number in range(100)]
    assert put(store, *objects) == expected
    found = get_many(store, [(name, len(content)) for name, content in objects])
    assert [result for number, result in enumerate(found) if number != position] == [
        (Outcome.OK, content) for number, (_, content) in enumerate(objects) if number != position
    ]
    assert found[position][0] is Outcome.ABSENT
    assert store.usage().objects == 99
    store.close()


def test_br_125_the_longest_names_make_keys_as_long_as_the_shortest(
    start_thread: Callable[..., ThreadedDaemon], folder: Path, make: Make
) -> None:
    """Tenant, model, revision, LoRA and salt of the caller: thousands of bytes each, but the tenant's 64."""
    tenant = "t" * 64
    (folder / "tenants").write_text(f"{tenant} token-of-the-long-one-0123\na token-of-the-short-one-012\n")
    (folder / "tenants").chmod(0o600)
    daemon = start_thread(tenants_file=str(folder / "tenants"))
    sizes: dict[str, set[int]] = {}
    for name, token, text in (("long", "token-of-the-long-one-0123", 5000), ("short", "token-of-the-short-one-012", 1)):
        identity = {"extras": {"lora": "l" * text, "salt": "\N{SNOWMAN}/" * text}}
        before = stored_keys(daemon)
        for turn, found in enumerate((0, 3)):
            engine = make(address=f"unix://{daemon.config.socket}", token=token, revision="r" * text)
            wait_until(lambda engine=engine: not engine.cache.l3.status().is_degraded, what="it is connected")
            restored = engine.serve(prompt(3), **identity)
            engine.settle()
            assert restored.by_source["l3"] == found * 4, (name, turn)
        sizes[name] = {len(stored) for stored in stored_keys(daemon) - before}
    assert sizes["long"] == sizes["short"]
    assert max(sizes["long"]) <= PHYSICAL_KEY_BYTES_MAX < LMDB_KEY_BYTES_MAX
    assert len(sizes["long"]) == 1
    assert by_source()


def stored_keys(daemon: ThreadedDaemon) -> set[bytes]:
    return {stored for batch in daemon.backend.scan() for stored in batch.keys}


def test_br_125_a_call_with_keys_that_are_too_long_is_refused_and_the_next_one_served(
    daemon: ThreadedDaemon, client: Client
) -> None:
    """All keys of a call have one length: a longer one cannot be among others."""
    for length in (LMDB_KEY_BYTES_MAX + 1, 4096):
        with pytest.raises(grpc.RpcError):
            client.present([bytes([number]) * length for number in range(3)])
    assert client.put_stream([object_key(1)], [b"fine"]) == [Outcome.OK]
    assert client.present([object_key(1)]) == [True]
