"""Typed refusals of whole calls: what the daemon raises."""

from __future__ import annotations

from hicache.wire.protocol import RefusalCode


class Refusal(Exception):
    """One call is refused with a reason that its client can act on; nothing else is disturbed."""

    def __init__(self, code: RefusalCode, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
