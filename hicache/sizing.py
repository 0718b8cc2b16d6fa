"""How many slots a budget of bytes gives each group: arithmetic only, so that planning needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.errors import ConfigError
from hicache.spec import CacheSpec, StateGroup

SLOT_ALIGNMENT_BYTES = 4096  # a slot starts on a page of memory, as direct I/O and the daemon's reads want it
PAGED_SLOTS_MIN = 8  # fewer pages than this in L2 cannot hold one request's prefix and the next one's prefetch
STATE_SLOTS_MIN = 2  # one snapshot being used while the next one arrives


def slot_stride(object_bytes: int) -> int:
    """Bytes from one L2 slot to the next: the object, rounded up to whole pages of memory."""
    return -(-object_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def l2_size_bytes(spec: CacheSpec, slot_counts: Sequence[int]) -> int:
    """Bytes of an L2 pool with ``slot_counts[group_index]`` slots: exactly what it takes of the host's memory."""
    return sum(count * slot_stride(size) for count, size in zip(slot_counts, spec.object_bytes, strict=True))


def l2_slot_counts(spec: CacheSpec, l2_bytes: int, state_share: float) -> tuple[int, ...]:
    """Slots for each group out of ``l2_bytes``: equally many for all paged groups, equally many for all state groups.

    ``state_share`` of the bytes go to state groups, where there are both kinds; neither kind gets fewer than its
    minimum, whatever the share. The pool never takes more than ``l2_bytes``. Raises ConfigError when the minima do not
    fit, naming what would.
    """
    if not 0.0 <= state_share <= 1.0:
        raise ConfigError("l2_state_share", state_share, "a fraction from 0 to 1")
    states = [isinstance(group, StateGroup) for group in spec.groups]
    strides = [slot_stride(size) for size in spec.object_bytes]
    state_bytes = sum(stride for stride, is_state in zip(strides, states, strict=True) if is_state)
    page_bytes = sum(strides) - state_bytes
    bytes_min = page_bytes * PAGED_SLOTS_MIN + state_bytes * STATE_SLOTS_MIN
    if l2_bytes < bytes_min:
        expected = f"at least {bytes_min} bytes ({_minimum(page_bytes, state_bytes)})"
        raise ConfigError("l2_bytes", l2_bytes, expected)
    state_slots = _state_slots(l2_bytes, state_share, page_bytes=page_bytes, state_bytes=state_bytes)
    paged_slots = (l2_bytes - state_slots * state_bytes) // page_bytes if page_bytes else 0
    return tuple(state_slots if is_state else paged_slots for is_state in states)


def _state_slots(l2_bytes: int, state_share: float, *, page_bytes: int, state_bytes: int) -> int:
    if not state_bytes:
        return 0
    if not page_bytes:
        return l2_bytes // state_bytes
    slots_max = (l2_bytes - page_bytes * PAGED_SLOTS_MIN) // state_bytes
    return min(max(int(l2_bytes * state_share) // state_bytes, STATE_SLOTS_MIN), slots_max)


def _minimum(page_bytes: int, state_bytes: int) -> str:
    parts = []
    if page_bytes:
        parts.append(f"{PAGED_SLOTS_MIN} pages of {page_bytes} bytes over all paged groups")
    if state_bytes:
        parts.append(f"{STATE_SLOTS_MIN} state snapshots of {state_bytes} bytes")
    return " and ".join(parts)
