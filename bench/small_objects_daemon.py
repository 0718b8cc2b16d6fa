"""hicached whose LMDB chunks are tiny: `python -m bench.small_objects_daemon`, same flags.

With chunks of 64 KiB ten million objects take 655 GB, however small they are. What a lookup, a put and a restart cost
depends on how many there are and not on their size, so this process counts with small ones: the layout's constant is
replaced before anything that uses it is imported. Its stores can be read by nothing else.
"""

from __future__ import annotations

import hicache.backends.lmdb_layout as layout

MODULE = "bench.small_objects_daemon"
OBJECT_BYTES = 100
CHUNK_BYTES = 512
STORED_BYTES = {"lmdb": CHUNK_BYTES, "file": 8192}  # by backend, of an object


def use_small_chunks() -> None:
    """From here on chunks are small. Call it before anything else is imported."""
    layout.CHUNK_BYTES = CHUNK_BYTES


if __name__ == "__main__":
    use_small_chunks()
    from hicache.daemon.cli import main

    main()
