"""The dtypes of a spec as torch knows them."""

from __future__ import annotations

import torch

from hicache.errors import ConfigError
from hicache.spec import DTYPE_BYTES


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that a spec calls ``name``. Raises ConfigError for one that this torch does not have."""
    dtype = getattr(torch, name, None) if name in DTYPE_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise ConfigError("dtype", name, f"a dtype that torch {torch.__version__} has, of {', '.join(DTYPE_BYTES)}")
    return dtype
