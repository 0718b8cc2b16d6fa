"""The models whose pages and states are copied by the benchmarks, as they publish themselves."""

from __future__ import annotations

from hicache.spec import PagedGroup, StateField, StateGroup

PAGE_TOKENS = 64
TP = 8

# Of Kimi-K3: layer i keeps a state unless it is every fourth one, and the last two are attention.
_K3_LAYERS, _K3_LAST_LINEAR = 93, 90
_K3_KDA_HEADS, _K3_KDA_HEAD_DIM, _K3_CONV_KERNEL = 96, 128, 4
_K3_LINEAR = tuple(i for i in range(_K3_LAYERS) if (i + 1) % 4 and i <= _K3_LAST_LINEAR)
_K3_ATTENTION = tuple(i for i in range(_K3_LAYERS) if i not in _K3_LINEAR)
_K3_HEADS_OF_RANK = _K3_KDA_HEADS // TP

GQA_8B = PagedGroup("8B GQA", tuple(range(32)), heads=8, head_dim=128, dtype="bfloat16")
GQA_70B = PagedGroup("70B GQA, one of TP8", tuple(range(80)), heads=8 // TP, head_dim=128, dtype="bfloat16")
MLA = PagedGroup.mla("MLA", layers=tuple(range(61)), latent_dim=512, rope_dim=64, dtype="bfloat16")
K3_MLA = PagedGroup.mla("Kimi-K3 MLA, fp8", layers=_K3_ATTENTION, latent_dim=512, rope_dim=64, dtype="float8_e4m3fn")
K3_STATE = StateGroup(  # q, k and v of a KDA layer pass through a convolution, whose last inputs are kept
    "Kimi-K3 state, one of TP8",
    _K3_LINEAR,
    (
        StateField("conv", (_K3_CONV_KERNEL - 1, 3 * _K3_HEADS_OF_RANK * _K3_KDA_HEAD_DIM), "bfloat16"),
        StateField("temporal", (_K3_HEADS_OF_RANK, _K3_KDA_HEAD_DIM, _K3_KDA_HEAD_DIM), "bfloat16"),
    ),
)
