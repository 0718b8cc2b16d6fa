"""The formats in which engines keep KV and states, and what they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.plan.model import Attention

KV_DTYPES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_ds_mla": None,  # packed rows: see formulas.MLA_ROW_PACKED
    "fp4_e2m1": None,  # half a byte, and scales
}
STATE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "fp4": "fp4_e2m1",
}
_SPEC_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def kv_dtype(name: str) -> str:
    """The one name of a KV format. Raises ConfigError for one whose bytes are not known: they are never guessed."""
    found = _ALIASES.get(name, name)
    if found not in KV_DTYPES:
        raise ConfigError("kv_dtype", name, f"one of {', '.join(KV_DTYPES)}")
    return found


def state_dtype(name: str, *, setting: str = "state_dtype") -> str:
    """The one name of a state's dtype. Raises ConfigError."""
    found = _ALIASES.get(name, name)
    if found not in STATE_DTYPES:
        raise ConfigError(setting, name, f"one of {', '.join(STATE_DTYPES)}")
    return found


def row_elements(attention: Attention, dtype: str) -> tuple[int, str]:
    """Elements of a row (of the latent, or of one head), and their dtype, as a PagedGroup has them.

    Packed rows are bytes. Raises ConfigError where a row is no whole number of elements of one dtype.
    """
    latent = attention.latent_dim + attention.rope_dim
    if dtype == "fp8_ds_mla" and attention.is_mla:
        return attention.latent_dim + attention.latent_dim // 128 * 4 + attention.rope_dim * 2, "uint8"
    if dtype == "fp4_e2m1":
        elements = latent if attention.is_mla else attention.head_dim
        return elements // 2 + elements // 16, "uint8"
    if dtype == "fp8_ds_mla":
        raise ConfigError("kv_dtype", dtype, "fp8_e4m3: the packed format is for MLA")
    return (latent if attention.is_mla else attention.head_dim), _SPEC_DTYPES.get(dtype, dtype)
