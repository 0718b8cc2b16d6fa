"""Where the kernels of a test run, and twins of tensors there."""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor lies in, on the CPU, after everything that was enqueued."""
    if DEVICE == "cuda":  # pinned memory, too, is written when the kernels have come to it
        torch.cuda.synchronize()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).cpu()


def twin(pool: Any, copies: dict[int, torch.Tensor] | None = None) -> Any:
    """The same tensor, or nested lists of them, on the device.

    Shapes and strides are kept, so is what lies between the elements, and which tensors lie in one memory.
    """
    copies = {} if copies is None else copies  # by address of the memory that they are of
    if not isinstance(pool, torch.Tensor):
        return [twin(part, copies) for part in pool]
    address = pool.untyped_storage().data_ptr()
    if address not in copies:
        copies[address] = memory_of(pool).clone().to(DEVICE)
    return copies[address].view(pool.dtype).as_strided(pool.shape, pool.stride(), pool.storage_offset())


def pinned_twin(blocks: torch.Tensor) -> torch.Tensor:
    """The same blocks in other host memory, which kernels can reach."""
    memory = memory_of(blocks).clone().view(blocks.dtype)
    return (memory if DEVICE == "cpu" else memory.pin_memory()).as_strided(blocks.shape, blocks.stride())


def assert_same_memory(left: Any, right: Any) -> None:
    """Every byte, also between and around the elements. Tensors, or nested lists of them."""
    if isinstance(left, torch.Tensor):
        assert torch.equal(memory_of(left), memory_of(right))
        return
    for one, other in zip(left, right, strict=True):
        assert_same_memory(one, other)
