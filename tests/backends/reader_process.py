"""A foreign process that holds an LMDB snapshot open: ``python -m tests.backends.reader_process DIRECTORY``.

Prints ``reading`` and goes on reading until its standard input ends.
"""

from __future__ import annotations

import sys

import lmdb


def hold(directory: str) -> None:
    """Keep one read transaction open."""
    with lmdb.open(directory, readonly=True, max_dbs=3) as env, env.begin() as txn:
        print(f"reading {txn.id()}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    hold(sys.argv[1])
