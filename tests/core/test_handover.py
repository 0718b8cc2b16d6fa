"""A hand-over of which a part fails on either side: what is used is whole, and of one boundary."""

from __future__ import annotations

from collections.abc import Sequence

from tests.core.small_engine import SmallEngine

PAGES = 5


def object_of(engine: SmallEngine, tokens: Sequence[int], *, page: int, group: int) -> bytes:
    """The key in L3 of one group's part of a page."""
    keys = engine.cache._keys
    block_key = keys.chain(tokens, parent=keys.root())[page]
    [name] = [name for name in objects_of(engine) if name.startswith(block_key) and name[-4:-2] == bytes([0, group])]
    return name


def objects_of(engine: SmallEngine) -> dict[bytes, tuple[int, bytes]]:
    assert engine.l3 is not None
    return engine.l3.objects
