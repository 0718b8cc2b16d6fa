"""Everything together: the tiny model, HiCache, and a real hicached on LMDB."""

from __future__ import annotations

import mmap
import time

import pytest

from bench.demo.processes import Daemon
from bench.tiny_engine import Generated, TinyEngine
from bench.tiny_reference import Reference, reference_generate, restored_differences
from hicache import PrefetchPolicy
from hicache.client import ClientState, DaemonL3
from tests.e2e.conftest import TENANTS, WAIT_S, MakeEngine, until

OUTPUT_TOKENS = 6


def serve(engine: TinyEngine, prompt: list[int], *, salt: bytes | None = None) -> Generated:
    """Serve a prompt and hold tokens and restored bytes against a full recompute."""
    generated = engine.generate(prompt, OUTPUT_TOKENS, salt=salt, copy_restored_bytes=True)
    reference: Reference = reference_generate(engine.model, prompt, OUTPUT_TOKENS)
    assert isinstance(generated, Generated)
    assert generated.tokens == reference.tokens
    assert generated.restored is not None
    assert restored_differences(engine.spec, generated.restored, reference) == []
    return generated


def client_of(engine: TinyEngine) -> DaemonL3:
    client = engine.cache.l3
    assert isinstance(client, DaemonL3)
    return client


def connect(engine: TinyEngine) -> TinyEngine:
    until(lambda: client_of(engine).status().state is ClientState.READY)
    return engine


def flush(engine: TinyEngine) -> None:
    assert engine.cache.flush(timeout_s=WAIT_S)


def test_what_one_engine_computed_another_one_loads(
    daemon: Daemon, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    first, second = connect(make_engine(daemon.address)), connect(make_engine(daemon.address))
    for prompt in prompts:
        assert serve(first, prompt).by_source["computed"] == len(prompt)
    flush(first)
    for prompt in prompts:
        expected = (len(prompt) - 1) // 16 * 16
        assert serve(second, prompt).by_source["l3"] == expected
        again = serve(second, prompt).by_source
        assert (again["l1"], again["l2"]) == (expected - 16, 16)  # the state snapshot itself stays in L2


def test_streams_carry_the_same_bytes_as_registered_memory(
    daemon: Daemon, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    daemon.kill()
    daemon.listen = "127.0.0.1:0"
    tcp = daemon.start()["listen"]
    local, remote = connect(make_engine(daemon.address)), connect(make_engine(f"tcp://{tcp}"))
    assert client_of(local).status().bulk == "memory"
    assert client_of(remote).status().bulk == "stream"
    serve(local, prompts[0])
    serve(remote, prompts[1])
    flush(local)
    flush(remote)
    assert serve(remote, prompts[0]).by_source["l3"] > 0
    assert serve(local, prompts[1]).by_source["l3"] > 0


def test_a_daemon_that_is_gone_is_done_without_and_come_back_to(
    daemon: Daemon, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    engine = connect(make_engine(daemon.address))
    serve(engine, prompts[0])
    flush(engine)
    daemon.kill()
    assert serve(engine, prompts[1]).by_source["computed"] == len(prompts[1])
    daemon.start()
    until(lambda: client_of(engine).status().state is ClientState.READY)
    other = connect(make_engine(daemon.address))
    assert serve(other, prompts[0]).by_source["l3"] > 0
    assert serve(engine, prompts[2]).by_source["computed"] == len(prompts[2])
    flush(engine)
    assert serve(other, prompts[2]).by_source["l3"] > 0


def test_an_engine_starts_and_serves_before_its_daemon(
    daemon: Daemon, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    daemon.stop()
    engine = make_engine(daemon.address)
    serve(engine, prompts[0])
    daemon.start()
    connect(engine)
    serve(engine, prompts[1])
    flush(engine)
    assert serve(connect(make_engine(daemon.address)), prompts[1]).by_source["l3"] > 0


def test_br_076_a_flipped_byte_on_disk_is_a_miss_that_is_counted_and_removed(
    daemon: Daemon, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    writer = connect(make_engine(daemon.address))
    serve(writer, prompts[0])
    flush(writer)
    assert writer.cache.l2 is not None
    page = bytes(writer.cache.l2.view(0)[0].contiguous().view(-1).numpy().tobytes()[:48])
    assert daemon.stop() == 0
    assert flip_a_byte_after(daemon, page) == 1
    daemon.start()
    reader = connect(make_engine(daemon.address))
    restored = serve(reader, prompts[0])
    assert restored.by_source["l3"] < (len(prompts[0]) - 1) // 16 * 16
    assert reader.cache.stats.objects["fetch.corrupt"] == 1
    assert reader.cache.stats.prefetch_dropped["corrupt"] > 0
    flush(reader)  # the recomputed page is stored again
    again = serve(connect(make_engine(daemon.address)), prompts[0])
    assert again.by_source["l3"] == (len(prompts[0]) - 1) // 16 * 16


def flip_a_byte_after(daemon: Daemon, needle: bytes) -> int:
    """Flip one bit of the payload that begins with ``needle``; returns how many places had it."""
    places = 0
    for path in daemon.data_folder.rglob("*"):
        if not path.is_file() or path.stat().st_size == 0:
            continue
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            position = memory.find(needle)
            while position >= 0:
                places += 1
                memory[position + 7] ^= 1
                position = memory.find(needle, position + len(needle))
    return places


def test_a_wrong_token_costs_l3_and_nothing_else(
    daemon: Daemon, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    stranger = make_engine(daemon.address, token="nobody-has-this-token")
    friend = connect(make_engine(daemon.address))
    serve(friend, prompts[0])
    flush(friend)
    until(lambda: client_of(stranger).status().state is ClientState.REFUSED)
    assert client_of(stranger).status().refusal == "BAD_TOKEN"
    assert serve(stranger, prompts[0]).by_source["computed"] == len(prompts[0])
    assert serve(connect(make_engine(daemon.address)), prompts[0]).by_source["l3"] > 0


@pytest.mark.parametrize("guess", [{"salt": TENANTS[0].salt}, {}], ids=["with the other's salt", "with its own"])
def test_br_017_a_tenant_never_reads_another_ones_data(
    daemon: Daemon, make_engine: MakeEngine, prompts: list[list[int]], guess: dict[str, bytes]
) -> None:
    owner = connect(make_engine(daemon.address))
    serve(owner, prompts[0])
    flush(owner)
    settings = {"salt": TENANTS[1].salt, **guess}
    stranger = connect(make_engine(daemon.address, token=TENANTS[1].token, **settings))
    assert serve(stranger, prompts[0]).by_source["computed"] == len(prompts[0])
    control = connect(make_engine(daemon.address))
    assert serve(control, prompts[0]).by_source["l3"] > 0


def test_br_024_a_salt_of_the_request_separates_within_one_engine(
    daemon: Daemon, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    engine = connect(make_engine(daemon.address))
    serve(engine, prompts[0], salt=b"one")
    flush(engine)
    assert serve(engine, prompts[0], salt=b"two").by_source["computed"] == len(prompts[0])
    assert serve(engine, prompts[0], salt=b"one").by_source["l1"] > 0


def test_an_engine_without_a_daemon_keeps_l3_in_its_own_process(
    make_engine: MakeEngine, prompts: list[list[int]], tmp_path: object
) -> None:
    for scheme in ("lmdb", "file"):
        settings = {"token": "", "l3_capacity_bytes": 64 << 20}
        address = f"{scheme}://{tmp_path}/{scheme}"
        engine = make_engine(address, **settings)
        serve(engine, prompts[0])
        flush(engine)
        engine.cache.close()
        assert serve(make_engine(address, **settings), prompts[0]).by_source["l3"] > 0


def test_a_stopped_daemon_costs_a_request_no_more_than_its_patience(
    daemon: Daemon, make_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    writer = connect(make_engine(daemon.address))
    serve(writer, prompts[0])
    flush(writer)
    patience_s = 0.5
    policy = PrefetchPolicy(mode="timeout", base_s=patience_s, per_ki_token_s=0.0, threshold_tokens=16)
    reader = connect(make_engine(daemon.address, prefetch=policy))
    daemon.suspend()
    try:
        start_s = time.monotonic()
        request = reader.cache.match(prompts[0])
        reader.cache.prefetch(request)
        assert not reader.cache.wait(request)
        assert time.monotonic() - start_s < patience_s + 5.0
        reader.cache.release(request)
        assert serve(reader, prompts[0]).by_source["computed"] == len(prompts[0])
    finally:
        daemon.resume()
    until(lambda: client_of(reader).status().items_in_doubt == 0)
    flush(reader)
    stats = reader.cache.stats
    assert stats.prefetch_in_flight == 0
