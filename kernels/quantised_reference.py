"""Pages that are stored as float8_e4m3fn, in plain torch, on any device: what the kernels are compared with.

Each plane of each layer of a page has a scale: the smallest power of two by which its largest finite magnitude becomes
at most 448, and at least 2^-110. A value is stored as the nearest float8 of ``value / scale``, ties to even. So

    |loaded - value| <= max(|value| / 16, scale / 1024)      for finite values
    NaN and infinities are loaded as NaN, zeros with their sign
    what was loaded is loaded as the same numbers again after it has been stored again

The bound is half a unit in the last place of e4m3: 3 bits of mantissa, and steps of 2^-9 below 2^-6. Since scales are
powers of two, multiplying by them loses nothing.
"""

from __future__ import annotations

import torch

from hicache.kernels.legs import PagedPool, Slots
from hicache.kernels.reference import gather_pages, scatter_pages

SCALE_EXPONENT_MIN = -110  # what is loaded is then a normal number of every dtype with 8 bits of exponent, and exact
_PLANE_DIMS = (3, 4, 5)  # page_tokens, heads, head_dim of [n_pages, layers, planes, page_tokens, heads, head_dim]


def quantise_pages(
    pool: PagedPool, pages: torch.Tensor, scales: torch.Tensor, *, sources: Slots, targets: Slots
) -> None:
    """``gather_pages`` into float8 ``pages``, with the ``scales`` [n_slots, layers, planes] float32 of each."""
    wide = _wide_pages(pool, pages, len(sources))
    gather_pages(pool, wide, sources=sources, targets=range(len(wide)))
    _check_targets(pages, targets)
    stored, powers = quantised(wide)
    for page, target in enumerate(targets):
        pages.view(torch.uint8)[int(target)] = stored[page].view(torch.uint8)
        scales[int(target)] = powers[page]


def dequantise_pages(
    pages: torch.Tensor, scales: torch.Tensor, pool: PagedPool, *, sources: Slots, targets: Slots
) -> None:
    """``scatter_pages`` out of float8 ``pages``: the way back of ``quantise_pages``, with equal rules."""
    wide = _wide_pages(pool, pages, len(sources))
    _check_targets(pages, sources, unique=False)
    for page, source in enumerate(sources):
        stored, powers = pages[int(source)].to(wide.device), scales[int(source)].to(wide.device)
        wide[page] = dequantised(stored.unsqueeze(0), powers.unsqueeze(0), wide.dtype)[0]
    scatter_pages(wide, pool, sources=range(len(wide)), targets=targets)


def quantised(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages [n_pages, layers, planes, page_tokens, heads, head_dim] as float8, and scales [n_pages, layers, planes]."""
    values = wide.float()
    peaks = torch.where(values.isfinite(), values.abs(), 0).amax(dim=_PLANE_DIMS)
    fractions, exponents = torch.frexp(peaks)  # peak = fraction * 2^exponent, fraction in [0.5, 1)
    powers = exponents - torch.where(fractions <= 448 / 512, 9, 8)
    powers = torch.where(peaks == 0, SCALE_EXPONENT_MIN, powers.clamp(min=SCALE_EXPONENT_MIN))
    inverses = torch.ldexp(torch.ones_like(peaks, dtype=torch.float64), -powers).float()
    scaled = values * inverses[..., None, None, None]
    stored = torch.where(values.isfinite(), scaled, torch.nan).to(torch.float8_e4m3fn)
    return stored, torch.ldexp(torch.ones_like(peaks, dtype=torch.float64), powers).float()


def dequantised(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The way back of ``quantised``. Rounding carries nothing beyond the largest number of ``dtype``."""
    values = stored.float() * scales[..., None, None, None]
    largest = torch.finfo(dtype).max
    return torch.where(values.isnan(), values, values.clamp(-largest, largest)).to(dtype)


def _wide_pages(pool: PagedPool, pages: torch.Tensor, count: int) -> torch.Tensor:
    first = pool[0] if isinstance(pool[0], torch.Tensor) else pool[0][0]
    return torch.empty((count, *pages.shape[1:]), dtype=first.dtype, device=first.device)


def _check_targets(pages: torch.Tensor, slots: Slots, *, unique: bool = True) -> None:
    named = [int(slot) for slot in slots]
    if unique and len(set(named)) != len(named):
        raise ValueError("a target slot is named twice")
    for slot in named:
        if not 0 <= slot < len(pages):
            raise IndexError(f"slot {slot} is outside of [0, {len(pages)})")
