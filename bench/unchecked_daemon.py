"""hicached without checksums, to show what they cost: `python -m bench.unchecked_daemon`, same flags.

The daemon itself has no such setting. This process replaces the functions of ``hicache.checksum`` before anything that
uses them is imported, so it can only be had by running this module, from a checkout.
"""

from __future__ import annotations

import hicache.checksum


class NoHasher:
    """In place of a hasher of xxhash: takes bytes, looks at none of them."""

    def update(self, part: object) -> None:
        """Nothing."""

    def intdigest(self) -> int:
        """Always 0."""
        return 0


def remove_checksums() -> None:
    """From here on every payload of this process has checksum 0. Call it before anything else is imported."""
    hicache.checksum.payload_hasher = lambda key: NoHasher()  # type: ignore[assignment,return-value]  # same calls
    hicache.checksum.payload_checksum = lambda key, payload: 0


if __name__ == "__main__":
    remove_checksums()
    from hicache.daemon.cli import main

    main()
