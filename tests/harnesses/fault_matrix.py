"""The fault matrix: every fault in every copy, store and call, run for real, and written as tables for docs/faults.md.

``python -m tests.harnesses.fault_matrix`` runs all of it and says where the document differs; ``--write`` refreshes the
document, ``--part NAME`` takes some of the tables.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

import structlog

from tests.harnesses.cells import FAULTS, Part, Place
from tests.harnesses.storage_faults import storage_parts


def parts() -> list[Part]:
    """All tables, in the order of the document."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before kernels are imported
    from tests.harnesses.copy_faults import copy_part
    from tests.harnesses.rpc_faults import rpc_part

    return [copy_part(), *storage_parts(), rpc_part()]


def sample(part: Part, *, shift: int) -> list[Place]:
    """Some places of a table: every fault and every call at least once, where they have a cell there."""
    count = max(len(FAULTS), len(part.calls))
    diagonal = {(FAULTS[(i + shift) % len(FAULTS)], part.calls[i % len(part.calls)]) for i in range(count)}
    return [place for place in part.places if place in diagonal]


def main(arguments: list[str]) -> int:
    """The exit code: 1 where the document is not what happens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="refresh docs/faults.md")
    parser.add_argument("--part", action="append", help="only this table; may be given more than once")
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.WARNING)
    differing = 0
    for part in parts():
        if options.part and part.name not in options.part:
            continue
        started_s = time.monotonic()
        table = part.run(part.places)
        print(
            f"{part.name}: {len(table)} cells, {len(part.reasons)} named as none, {time.monotonic() - started_s:.0f} s"
        )
        if options.write:
            part.write(table)
        elif part.markdown(table) != part.documented():
            differing += 1
            print(f"differs from the document:\n{part.markdown(table)}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
