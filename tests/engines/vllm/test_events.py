"""What a router learns of hicache from the event stream of a real engine, and an operator from its metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hicache.client import DaemonL3, WatchKind
from tests.client.support import SPEC
from tests.daemon.rig import DaemonProcess, wait_until
from tests.engines.vllm.conftest import StartEngine
from tests.engines.vllm.rig import hicache, prompt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn of themselves while they are imported
    import zmq
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

BLOCK = 32
L2_BLOCKS = 24  # of two prompts
BLOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Block:
    """What an event said of one block."""

    parent: object
    tokens: tuple[int, ...]
    event: BlockStored


class Router:
    """Subscribes to an engine's events, and knows from them alone which blocks are where."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("")
        self._socket.connect(endpoint)
        self.blocks: dict[str, dict[object, Block]] = {}  # by medium, by hash

    def follow(self) -> bool:
        """Apply what has come; whether there was anything."""
        has_heard = False
        while self._socket.poll(100):
            payload = self._socket.recv_multipart()[-1]
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                has_heard = True
                if isinstance(event, BlockStored):
                    self._add(event)
                elif isinstance(event, BlockRemoved):
                    for block in event.block_hashes:
                        del self.blocks[event.medium or ""][block]  # which was told to be there
        return has_heard

    def _add(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        for number, block in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[number * event.block_size :][: event.block_size])
            self.blocks.setdefault(event.medium or "", {})[block] = Block(parent, tokens, event)
            parent = block

    def prefix(self, tokens: list[int], medium: str) -> list[object]:
        """The hashes of the leading blocks of a prompt that are there."""
        by_content = {(each.parent, each.tokens): block for block, each in self.blocks.get(medium, {}).items()}
        found: list[object] = []
        for start in range(0, len(tokens), BLOCK):
            block = by_content.get((found[-1] if found else None, tuple(tokens[start : start + BLOCK])))
            if block is None:
                break
            found.append(block)
        return found

    def close(self) -> None:
        self._socket.close(linger=0)


def test_a_router_knows_what_is_in_l2_and_l3_and_an_operator_what_was_moved(
    engine: StartEngine, start: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    target = f"unix://{start().settings['socket']}"
    router = Router(f"ipc://{tmp_path}/events")
    process = engine().start(
        "llama",
        hicache(target, l2_bytes=L2_BLOCKS * BLOCK_BYTES),
        kv_events_config={"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"},
    )
    short = prompt(99, tokens=BLOCK - 1)  # has no whole block: its steps only carry what is to be told

    def heard_after_a_step() -> bool:
        process.ask(short)
        return router.follow()

    tries = iter(range(1000, 2000))
    wait_until(
        lambda: bool(process.ask(prompt(next(tries), tokens=BLOCK + 1))) and heard_after_a_step(),
        what="the router hears of the engine",
    )

    first = prompt(1, tokens=10 * BLOCK + 1)
    process.ask(first)
    process.flush()
    heard_after_a_step()
    in_memory = [router.prefix(first, medium)[:10] for medium in ("GPU", "CPU", "STORAGE")]
    assert in_memory[0] == in_memory[1] == in_memory[2]
    assert len(in_memory[0]) == 10
    stored = router.blocks["STORAGE"][in_memory[2][0]].event
    assert (stored.group_idx, stored.kv_cache_spec_kind, stored.locality, stored.ownership) == (
        0,
        "full_attention",
        "LOCAL",
        "hicache",
    )

    process.reset()  # the GPU's blocks are told to be cleared, ours are not
    for seed in (2, 3, 4):
        process.ask(prompt(seed, tokens=10 * BLOCK + 1))
        process.flush()
    heard_after_a_step()
    assert len(router.blocks["CPU"]) <= L2_BLOCKS
    assert not router.prefix(first, "CPU")
    assert router.prefix(first, "STORAGE") == in_memory[2]

    process.ask(first)
    heard_after_a_step()
    assert router.prefix(first, "CPU") == in_memory[1], "what came from L3 lies in L2"

    samples = process.run("metrics", prefix="vllm:hicache_l3_")
    assert metric(samples, "ready", rank="0") == 1
    assert metric(samples, "objects", operation="put", outcome="ok") >= 40
    assert metric(samples, "bytes", operation="get") >= 10 * BLOCK_BYTES

    assert empty(target) >= 40
    wait_until(lambda: heard_after_a_step() and not router.blocks["STORAGE"], what="all is told to have left hicached")
    router.close()
    process.end()


def metric(samples: list[Any], name: str, **labels: str) -> float:
    [value] = [v for n, has, v in samples if n == f"vllm:hicache_l3_{name}" and labels.items() <= has.items()]
    return float(value)


def empty(target: str) -> int:
    """Remove everything that a daemon has; how many objects."""
    client = DaemonL3(target, spec=SPEC, memory=None)
    try:
        assert client.wait_ready(timeout_s=20)
        watch, keys = client.watch(), list[bytes]()
        for event in watch:
            keys += event.keys
            if event.kind is WatchKind.SYNCED:
                break
        watch.close()
        return len(client.delete(keys, timeout_s=20))
    finally:
        client.close()
