from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from hicache.connectors.host_pages import HostPages, PageItem, PagesSpec, Pool
from hicache.outcome import Outcome
from tests.client.hicached import HicachedProcess


def test_smoke(tmp_path: Path) -> None:
    daemon = HicachedProcess(tmp_path)
    daemon.start()
    memory = mmap.mmap(-1, 64 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pages = HostPages(daemon.address, spec=PagesSpec((("model", "m"),), 1 << 20), pools=[Pool(address, 64 << 20)])
    assert pages.wait_ready(timeout_s=10)
    items = [
        PageItem(b"k%d" % n, ((address + (n << 19), 1 << 19), (address + (32 << 20) + (n << 19), 1 << 19)))
        for n in range(20)
    ]
    for n in range(20):
        memory[n << 19 : (n + 1) << 19] = bytes([n]) * (1 << 19)
        memory[(32 << 20) + (n << 19) : (32 << 20) + ((n + 1) << 19)] = bytes([n + 100]) * (1 << 19)
    want = memory[:]
    assert pages.put(items) == [Outcome.OK] * 20
    assert pages.put(items) == [Outcome.EXISTS] * 20
    assert pages.contains([b"k3", b"x"]) == [True, False]
    memory[:] = bytes(64 << 20)
    assert pages.get(items) == [Outcome.OK] * 20
    assert memory[:] == want
    assert pages.delete([b"k3", b"x"]) == [Outcome.OK, Outcome.ABSENT]
    pages.close()
    daemon.end()
