"""Small cache descriptions, and bytes that tell where they came from."""

from __future__ import annotations

import torch

from hicache.spec import CacheSpec, PagedGroup, StateField, StateGroup

POISON = 0xA5


def paged_spec(*, dtype: str = "bfloat16", heads: int = 2, head_dim: int = 8, page_tokens: int = 4) -> CacheSpec:
    return CacheSpec("test", "1", (PagedGroup("full", (0, 2, 3), heads, head_dim, dtype),), page_tokens=page_tokens)


def hybrid_spec() -> CacheSpec:
    """Three kinds of group, of very different sizes; the state's fields are such that one of them lies at odd bytes."""
    return CacheSpec(
        "hybrid",
        "1",
        (
            PagedGroup("full", (0, 4), heads=2, head_dim=16, dtype="bfloat16"),
            PagedGroup.mla("latent", layers=(1,), latent_dim=24, rope_dim=9, dtype="float8_e4m3fn"),
            StateGroup(
                "delta",
                (2, 3, 5),
                (
                    StateField("conv", (7, 3), "int8"),
                    StateField("ring_d", (4, 5), "float32", transient=True),
                    StateField("temporal", (2, 8, 8), "float32"),
                    StateField("ring_k", (4, 6), "bfloat16", transient=True),
                ),
            ),
        ),
        page_tokens=4,
    )


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def fill_with_noise(tensor: torch.Tensor, seed: int) -> None:
    """Every bit pattern, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8, generator=generator)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.view(integers).copy_(noise.view(integers).view(tensor.shape))


def poison(tensor: torch.Tensor) -> None:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    pattern = torch.full((tensor.element_size(),), POISON, dtype=torch.uint8).view(integers)
    tensor.view(integers).copy_(pattern.expand(tensor.shape))
