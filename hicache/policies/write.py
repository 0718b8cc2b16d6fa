"""Write policy: which pages of L1 are copied down, and when."""

from __future__ import annotations

from typing import Protocol


class WritePolicy(Protocol):
    """Asked once for each page that a request publishes; its ancestors have been asked before it."""

    def backs_up(self, block_key: bytes) -> bool:
        """Whether the page is copied to L2, and from there to L3, now."""
        ...


class WriteThrough:
    """Every page, as soon as it is complete."""

    def backs_up(self, block_key: bytes) -> bool:
        return True
