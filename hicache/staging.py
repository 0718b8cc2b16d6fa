"""Device memory that objects pass through between L1 and L2, so that each crosses the bus in one copy."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Direction: TypeAlias = Literal["gather", "scatter"]

# A gather waits for the copy before it to leave the memory: 32 MiB take 600 us on PCIe 5, a launch takes 10.
STAGING_BYTES = 32 << 20
_ALIGNMENT_BYTES = 256  # of each row: what the widest loads and any DMA engine want


class Staging:
    """One buffer for each direction, taken when first reserved: a ring of rows, of which each copy uses as many as fit.

    Every user of a direction must enqueue on one stream at a time: its order is what keeps a row from being overwritten
    before it has been read.
    """

    def __init__(self, device: torch.device, *, size_bytes: int = STAGING_BYTES) -> None:
        self._device = device
        self._size_bytes = size_bytes
        self._buffers: dict[Direction, torch.Tensor] = {}

    def reserve(self, object_bytes: int) -> None:
        """Have room for at least one object in either direction. Nothing may be in flight.

        Raises RuntimeError when the device has no memory.
        """
        size_bytes = max(self._size_bytes, _stride(object_bytes))
        for direction in ("gather", "scatter"):
            buffer = self._buffers.get(direction)
            if buffer is None or buffer.numel() < size_bytes:
                self._buffers[direction] = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def rows(self, direction: Direction, object_bytes: int) -> torch.Tensor:
        """uint8 [rows, object_bytes], after ``reserve`` of as much: at least one row."""
        stride = _stride(object_bytes)
        buffer = self._buffers[direction]
        count = buffer.numel() // stride
        return buffer[: count * stride].view(count, stride)[:, :object_bytes]

    @property
    def size_bytes(self) -> int:
        """What is held of the device's memory."""
        return sum(buffer.numel() for buffer in self._buffers.values())


def _stride(object_bytes: int) -> int:
    return -(-object_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
