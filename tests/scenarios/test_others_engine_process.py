"""What others met where a process of an engine ends in other ways than it should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import wait_until

ROOT = Path(__file__).parents[2]
EXIT_S = 120.0

FORKS_AND_LIVES_ON = """
import os, signal
from tests.daemon.client import Client
from tests.daemon.raw_links import Memory
client, memory = Client({target!r}, name="victim"), Memory(1 << 20)
client.attach(memory)
child = os.fork()
if not child:
    signal.pause()
print(child, flush=True)
signal.pause()
"""

ENDS_WITHOUT_A_CLOSE = """
import sys
from hicache import CacheSpec, HiCache, PagedGroup
spec = CacheSpec("m", "1", (PagedGroup("kv", (0, 1), heads=2, head_dim=8, dtype="float32"),), page_tokens=4)
cache = HiCache.open(spec, l1_pages=16, l2_bytes=1 << 20, l3=sys.argv[1], l3_capacity_bytes=64 << 20)
request = cache.match(list(range(41)))
cache.prefetch(request)
cache.wait(request)
assert cache.load(request, timeout_s=60) is not None
assert cache.extend(request, tokens=41)
cache.store(request, computed=40)
if sys.argv[2] == "raises":
    raise RuntimeError("the engine's own fault")
"""


def test_oe_20_memory_of_a_killed_engine_is_let_go_although_a_child_of_it_lives_on(
    start_thread: Callable[..., ThreadedDaemon],
) -> None:
    """The child, forked for something else, has the engine's sockets and the memory that was handed over."""
    daemon = start_thread(session_keepalive_s=5.0)
    program = FORKS_AND_LIVES_ON.format(target=daemon.target)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as victim:
        assert victim.stdout is not None
        child = int(victim.stdout.readline())
        try:
            assert (daemon.metric("hicache_regions"), daemon.metric("hicache_sessions")) == (1, 1)
            victim.kill()
            victim.wait()
            wait_until(lambda: daemon.metric("hicache_sessions") == 0, what="the killed engine's session has ended")
            wait_until(lambda: daemon.metric("hicache_regions") == 0, what="its memory is mapped no longer")
            os.kill(child, 0)
        finally:
            victim.kill()
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(("l3", "end"), [("lmdb", "raises"), ("away", "returns")])
def test_oe_21_an_engine_that_ends_without_closing_its_cache_ends(tmp_path: Path, l3: str, end: str) -> None:
    """With copies and stores on their way, in an exception or not.

    A thread that is inside native code when the interpreter goes may abort the process then: it has ended all the same.
    """
    address = {"away": f"unix://{tmp_path}/none.sock", "lmdb": f"lmdb://{tmp_path}/store"}[l3]
    arguments = [sys.executable, "-c", ENDS_WITHOUT_A_CLOSE, address, end]
    ended = subprocess.run(arguments, cwd=ROOT, timeout=EXIT_S, capture_output=True, text=True, check=False)
    assert ended.returncode in ((1, -signal.SIGABRT) if end == "raises" else (0,)), ended.stderr
    assert ("the engine's own fault" in ended.stderr) == (end == "raises")
