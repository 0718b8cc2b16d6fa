"""Bytes of weights, of a token and of a state slot, on the rank that has most of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hicache.costs.machine import GIB, Machine
from hicache.groups import dtype_bytes
from hicache.plan import formulas
from hicache.plan.dtypes import KV_DTYPES
from hicache.plan.formula import Ledger
from hicache.plan.model import Attention, Recurrence, heads_on_rank, pipeline_stages, stage_counts
from hicache.plan.settings import FRACTION_MAX, Settings


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes of the recurrent state: of a slot over all stages, and what the largest stage has of it."""

    all_stages_bytes: int
    stage_share: float
    slot_bytes: int
    ring_bytes: int
    ring_is_per_slot: bool  # KDA; GDN has one for each running request

    @property
    def ring_bytes_per_slot(self) -> int:
        """Bytes of rings that every slot brings along."""
        return self.ring_bytes if self.ring_is_per_slot else 0


GRAPH_BATCHES = {  # below so many GiB: with few GPUs of a stage, and with many
    20: (8, 8),
    35: (48, 160),
    60: (32, 160),
    160: (256, 512),
    math.inf: (512, 512),
}
GRAPH_GPUS_MANY = 4
GPU_LARGE_GIB, HEADROOM_MIN_GIB = 60, 10
GRAPH_BATCH_MAX = 512
GRAPH_BATCH_PADDED = 300  # above it, DP attention pads more
NO_STATE = StateSizes(0, 0.0, 0, 0, False)


@dataclass(frozen=True, slots=True)
class KvSizes:
    """Bytes of a token on a rank: in full attention (draft layers and indexer included), and in windows."""

    full_cell_bytes: int
    window_cell_bytes: int
    bytes_per_token: int
    row_bytes: int  # of one layer of full attention, or of a window where there is none


def rest_bytes(settings: Settings, ledger: Ledger) -> int:
    """Bytes that weights and reserve leave for KV and state; may be below 0. As measured, where that is given."""
    weights_bytes = weights(settings, ledger)
    if settings.rest_bytes is not None:
        return settings.rest_bytes
    formula = formulas.REST_OF_TOTAL if settings.fraction_of == "total" else formulas.REST_OF_FREE
    rest: int = ledger.work_out(
        formula,
        gpu_bytes=settings.machine.gpu_bytes,
        memory_fraction=memory_fraction(settings, ledger),
        weights_bytes=weights_bytes,
        reserved_bytes=settings.reserved_bytes,
    )
    return rest


def memory_fraction(settings: Settings, ledger: Ledger) -> float:
    """The share of GPU memory for weights and pools: as set, or one at which the engine's own headroom stays free."""
    if settings.memory_fraction is not None or settings.engine == "vllm":
        return settings.memory_fraction or FRACTION_MAX[settings.engine]
    gpus = settings.tp * settings.dp
    graph_batch = ledger.work_out(
        formulas.GRAPH_BATCH,
        graph_batch_max=graph_batch_max(settings.machine, gpus),
        running_max=settings.max_running_requests or GRAPH_BATCH_MAX,
    )
    padding_mib = 0.0 if settings.dp == 1 else 3.0 if graph_batch <= GRAPH_BATCH_PADDED else 4.5
    headroom = ledger.work_out(
        formulas.HEADROOM,
        chunk_tokens=settings.chunk_tokens,
        gpus=settings.gpus,
        graph_batch=graph_batch,
        padding_mib=padding_mib,
        attention_groups=settings.dp,
    )
    fraction: float = ledger.work_out(
        formulas.FRACTION,
        fraction_max=FRACTION_MAX["sglang"],
        headroom_bytes=headroom,
        headroom_bytes_min=HEADROOM_MIN_GIB * GIB if settings.machine.gpu_bytes > GPU_LARGE_GIB * GIB else 0,
        gpu_bytes=settings.machine.gpu_bytes,
    )
    return fraction


def graph_batch_max(machine: Machine, gpus: int) -> int:
    """The largest batch that SGLang captures a CUDA graph of, where it is not told."""
    gib = machine.gpu_bytes / GIB
    few, many = next(batches for limit, batches in GRAPH_BATCHES.items() if gib < limit)
    return few if gpus < GRAPH_GPUS_MANY else many


def weights(settings: Settings, ledger: Ledger) -> int:
    """Bytes of weights on the GPU that has most."""
    model = settings.model
    found: int = ledger.work_out(
        formulas.WEIGHTS,
        expert_bytes=model.weights.expert_bytes,
        dp=settings.dp,
        sharded_bytes=model.weights.sharded_bytes,
        copied_bytes=model.weights.copied_bytes,
        tp=settings.tp,
        stage_layers=max(len(stage) for stage in pipeline_stages(model.layer_count, settings.pp)),
        layers=model.layer_count,
        replicated_bytes=model.weights.replicated_bytes,
    )
    return found


def kv_sizes(settings: Settings, ledger: Ledger) -> KvSizes:
    """Bytes of a token on the rank of the stage that has most attention."""
    model = settings.model
    full = _cells(settings, model.full_attention, ledger, kind="full")
    window = _cells(settings, model.window_attention, ledger, kind="window")
    draft = 0
    if settings.draft_layers and full.layers:
        draft = ledger.work_out(
            formulas.KV_CELL_DRAFT,
            cell_bytes=full.bytes,
            draft_layers=settings.draft_layers,
            layers=full.layers,
            copies=settings.dcp if full.index_bytes else 1,
            index_bytes=full.index_bytes // full.layers * settings.dcp,
        )
    per_token: int = ledger.work_out(
        formulas.KV_PER_TOKEN,
        full_cell_bytes=full.bytes + window.bytes,
        draft_cell_bytes=draft,
        dcp=settings.dcp,
        index_cell_bytes=full.index_bytes,
    )
    cell = full.bytes + draft + full.index_bytes * settings.dcp  # as many tokens' indexes as all DCP ranks have tokens
    return KvSizes(cell, window.bytes, per_token, full.row_bytes or window.row_bytes)


@dataclass(frozen=True, slots=True)
class _Cells:
    layers: int = 0
    bytes: int = 0
    index_bytes: int = 0
    row_bytes: int = 0


def _cells(settings: Settings, attention: tuple[Attention, ...], ledger: Ledger, *, kind: str) -> _Cells:
    """What the layers of one kind take for a token; models have one geometry for each kind."""
    if not attention:
        return _Cells()
    stages = pipeline_stages(settings.model.layer_count, settings.pp)
    [group] = attention
    layers = max(stage_counts(group.layers, stages))
    prefix = "" if kind == "full" else f"{kind}_"
    row: int = kv_row_bytes(settings, group, ledger, prefix=prefix)
    cell = ledger.work_out_as(f"{prefix}kv_cell_bytes", formulas.KV_CELL, layers=layers, row_bytes=row)
    index = 0
    if group.index_dim:
        index = layers * ledger.work_out(formulas.INDEX_ROW, index_dim=group.index_dim)
    return _Cells(layers, cell, index, row)


def kv_row_bytes(settings: Settings, attention: Attention, ledger: Ledger, *, prefix: str = "") -> int:
    """Bytes of one token in one layer on a rank, in the format that KV is kept in."""
    name, element_bytes = f"{prefix}kv_row_bytes", KV_DTYPES[settings.kv_dtype]
    if attention.is_mla:
        dims = {"latent_dim": attention.latent_dim, "rope_dim": attention.rope_dim}
        if settings.kv_dtype == "fp8_ds_mla":
            return int(ledger.work_out_as(name, formulas.MLA_ROW_PACKED, **dims))
        if element_bytes is None:
            return int(ledger.work_out_as(name, formulas.MLA_ROW_FP4, **dims))
        return int(ledger.work_out_as(name, formulas.MLA_ROW, element_bytes=element_bytes, **dims))
    heads = ledger.work_out_as(
        f"{prefix}kv_heads_per_rank",
        formulas.KV_HEADS,
        kv_heads=attention.kv_heads,
        tp=settings.tp,
        dcp=settings.dcp,
    )
    dims = {"heads_per_rank": heads, "head_dim": attention.head_dim, "v_head_dim": attention.v_head_dim}
    if element_bytes is None:
        return int(ledger.work_out_as(name, formulas.GQA_ROW_FP4, **dims))
    return int(ledger.work_out_as(name, formulas.GQA_ROW, element_bytes=element_bytes, **dims))


def state_sizes(settings: Settings, ledger: Ledger) -> StateSizes:
    """Bytes of a state slot and of its rings on the rank of the stage that has most state layers."""
    if not settings.model.recurrence:
        return NO_STATE
    [recurrence] = settings.model.recurrence
    layers = len(recurrence.layers)
    stage_layers = max(stage_counts(recurrence.layers, pipeline_stages(settings.model.layer_count, settings.pp)))
    heads = heads_on_rank(recurrence.heads, settings.tp, setting="heads of state")
    groups = heads_on_rank(recurrence.groups, settings.tp, setting="groups of state") if recurrence.groups else 0
    conv = ledger.work_out(
        formulas.CONV_PER_LAYER,
        heads=heads,
        head_dim=recurrence.head_dim,
        groups=groups,
        state_dim=recurrence.state_dim,
        conv_kernel=recurrence.conv_kernel + _window_drafts(settings),
        conv_dtype_bytes=dtype_bytes(settings.conv_dtype),
    )
    ssm = ledger.work_out(
        formulas.SSM_PER_LAYER,
        heads=heads,
        head_dim=recurrence.head_dim,
        state_dim=recurrence.state_dim,
        state_dtype_bytes=dtype_bytes(settings.state_dtype or "float32"),
    )
    everything = ledger.work_out(formulas.STATE_ALL_LAYERS, conv_bytes=conv, ssm_bytes=ssm, layers=layers)
    share = ledger.work_out(formulas.STATE_SHARE, stage_layers=stage_layers, layers=layers)
    ledger.work_out(formulas.CONV_PER_SLOT, conv_bytes=conv, stage_layers=stage_layers)
    ledger.work_out(formulas.SSM_PER_SLOT, ssm_bytes=ssm, stage_layers=stage_layers)
    slot = ledger.work_out(formulas.STATE_PER_SLOT, all_stages_bytes=everything, stage_share=share)
    ring = _ring_bytes(settings, recurrence, ledger, heads=heads, groups=groups, share=share)
    return StateSizes(everything, share, slot, ring, recurrence.kind == "kda")


def _window_drafts(settings: Settings) -> int:
    """vLLM's convolution window holds the drafts of a step too."""
    return max(0, settings.draft_tokens - 1) if settings.engine == "vllm" else 0


def _ring_bytes(
    settings: Settings, recurrence: Recurrence, ledger: Ledger, *, heads: int, groups: int, share: float
) -> int:
    if not settings.replay_ring:
        return 0
    depth = settings.ring_depth or ledger.work_out(formulas.RING_DEPTH, window_tokens=settings.draft_tokens)
    numbers = {
        "depth": depth,
        "heads": heads,
        "head_dim": recurrence.head_dim,
        "key_heads": groups,
        "state_dim": recurrence.state_dim,
        "conv_dtype_bytes": dtype_bytes(settings.conv_dtype),
        "layers": len(recurrence.layers),
    }
    if recurrence.kind == "kda":
        everything = ledger.work_out(formulas.RING_KDA, **numbers)
    else:
        copies = 1 if settings.conv_dtype == "float32" else 2
        everything = ledger.work_out(formulas.RING_GDN, copies=copies, **numbers)
    ring: int = ledger.work_out(formulas.RING, all_stages_bytes=everything, stage_share=share)
    return ring
