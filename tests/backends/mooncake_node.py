"""A store node in a process of its own: python mooncake_node.py MASTER SEGMENT_BYTES. Says READY, ends on SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading

from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]  # the wheel has no types

if __name__ == "__main__":
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
    print("READY" if code == 0 else f"FAILED {code}", store.get_hostname(), flush=True)
    ended.wait()
    store.close()
