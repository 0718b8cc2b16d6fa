"""A client that is going to be killed or stopped: ``python -m tests.faults.victim ADDRESS TOKEN memory|bounce|stream``.

Prints ``ready``, then puts and gets 16 MiB at a time for as long as it lives.
"""

from __future__ import annotations

import os
import sys

from hicache.l3 import L3Item
from tests.client.memory import SmallMemory, UnshareableMemory
from tests.client.support import get, put
from tests.faults.other_client import connected

ITEMS, SIZE_BYTES = 8, 2 << 20


def main(address: str, token: str, bulk: str) -> None:
    memory = (UnshareableMemory if bulk == "bounce" else SmallMemory)(ITEMS * SIZE_BYTES)
    client = connected(address, memory, token=token)
    print("ready", flush=True)
    while True:
        items = [L3Item(os.urandom(36), number * SIZE_BYTES, SIZE_BYTES) for number in range(ITEMS)]
        put(client, items)
        get(client, items)


if __name__ == "__main__":
    main(*sys.argv[1:])
