"""What computing and moving cost: one model for the planner, the replayer and the read policy of a running engine."""

from __future__ import annotations

from typing import Protocol


class Costs(Protocol):
    """Times in seconds, unloaded: whoever queues adds the waiting."""

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token."""
        ...

    def prefill_s(self, start_tokens: int, end_tokens: int) -> float:
        """GPU time of computing the tokens ``[start, end)``, with the KV of all before them there."""
        ...

    def load_s(self, tier: str, tokens: int) -> float:
        """Time of moving so many tokens from ``tier`` into GPU memory."""
        ...

    def transfer_s(self, tier: str, size_bytes: int) -> float:
        """The same for so many bytes."""
        ...
