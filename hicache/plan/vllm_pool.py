"""vLLM's memory: equal blocks, from which every group of layers draws, attention and states alike."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.plan import formulas
from hicache.plan.formula import Ledger
from hicache.plan.lengths import requests_that_fit
from hicache.plan.model import pipeline_stages, stage_counts
from hicache.plan.settings import Settings
from hicache.plan.sizes import NO_STATE, KvSizes, StateSizes

BLOCK_TOKENS = 16
MLA_ALIGNMENT_TOKENS = 128
SEQUENCES_MAX = 1024  # its default of --max-num-seqs on large GPUs
GROUP_SIZE_SPREAD = 1.5  # up to which layers are padded to the larger kind's count, not split by the smaller's


@dataclass(frozen=True, slots=True)
class BlockPool:
    """What the blocks of one DP rank hold. ``attention_tokens`` if no state took any of them."""

    block_tokens: int
    blocks: int
    requests: int
    states_per_request: int
    state_slots: int
    attention_tokens: int
    sequences_max: int


@dataclass(frozen=True, slots=True)
class Groups:
    """How many groups of each kind the layers are put in, and how many layers each is padded to."""

    layers: int
    attention: int
    windows: int
    states: int


def layer_groups(attention: int, windows: int, states: int) -> Groups:
    """Groups of equally many layers: as many as the kind with the fewest has, or the most where they differ little."""
    counts = [count for count in (attention, windows, states) if count]
    smallest, largest = min(counts), max(counts)
    layers = largest if largest < smallest * GROUP_SIZE_SPREAD else smallest
    return Groups(layers, -(-attention // layers), -(-windows // layers), -(-states // layers))


def work_out(settings: Settings, kv: KvSizes, state: StateSizes, rest_bytes: int, ledger: Ledger) -> BlockPool:
    """The blocks out of ``rest_bytes``, and how many requests of the planned lengths they hold."""
    model = settings.model
    stages = pipeline_stages(model.layer_count, settings.pp)
    groups = layer_groups(
        *(
            max((max(stage_counts(group.layers, stages)) for group in kind), default=0)
            for kind in (model.full_attention, model.window_attention, model.recurrence)
        )
    )
    block_tokens = _block_tokens(settings, kv, state, ledger)
    row = kv.row_bytes or 1
    block_bytes = ledger.work_out(
        formulas.VLLM_BLOCK_BYTES, group_layers=groups.layers, block_tokens=block_tokens, row_bytes=row
    )
    blocks = max(0, ledger.work_out(formulas.VLLM_BLOCKS, rest_bytes=max(0, rest_bytes), block_bytes=block_bytes))
    numbers = _request_numbers(settings, groups, block_tokens)
    span = block_tokens * settings.dcp
    mean, deviation = settings.lengths.held_tokens(page_tokens=span)
    fixed = ledger_free(numbers, tokens=0)
    mean_blocks = mean / span * groups.attention + fixed
    requests = requests_that_fit(blocks, mean_blocks, deviation / span * groups.attention)
    if ledger.work_out(formulas.VLLM_REQUEST, tokens=settings.lengths.longest_tokens, **numbers) > blocks:
        requests = 0
    at_context = ledger_free(numbers, tokens=settings.context)
    ledger.work_out(
        formulas.VLLM_LOGGED, kv_blocks=blocks, blocks_at_context=at_context, context_tokens=settings.context
    )
    states_each = groups.states * int(numbers["states_per_request"])
    return BlockPool(
        block_tokens=block_tokens,
        blocks=blocks,
        requests=requests,
        states_per_request=max(1, int(numbers["states_per_request"])),
        state_slots=blocks // groups.states if groups.states else 0,
        attention_tokens=blocks // max(1, groups.attention) * span,
        sequences_max=blocks // max(1, states_each) if states_each else SEQUENCES_MAX,
    )


def ledger_free(numbers: dict[str, int], *, tokens: int) -> int:
    """Blocks of one request of ``tokens``, without a line in the plan."""
    return int(Ledger().work_out(formulas.VLLM_REQUEST, tokens=tokens, **numbers))


def _request_numbers(settings: Settings, groups: Groups, block_tokens: int) -> dict[str, int]:
    """What a request's blocks follow from: a state, and one to continue it with prefix caching, and one a draft."""
    window = max((group.window_tokens or 0 for group in settings.model.window_attention), default=0)
    window_tokens = min(window - 1 + settings.chunk_tokens, settings.context)
    return {
        "attention_groups": groups.attention,
        "block_tokens": block_tokens,
        "dcp": settings.dcp,
        "window_groups": groups.windows,
        "window_blocks": -(-window_tokens // block_tokens) + 1 if window else 0,
        "state_groups": groups.states,
        "states_per_request": (2 if settings.radix_cache else 1) + max(0, settings.draft_tokens - 1),
    }


def _block_tokens(settings: Settings, kv: KvSizes, state: StateSizes, ledger: Ledger) -> int:
    """Tokens of a block: as set, unless a state needs it larger."""
    alignment = settings.page_tokens
    if state is NO_STATE or not kv.row_bytes:
        return alignment
    if any(group.is_mla for group in settings.model.attention):
        alignment = max(alignment, MLA_ALIGNMENT_TOKENS)
    [recurrence] = settings.model.recurrence
    tokens: int = ledger.work_out(
        formulas.VLLM_BLOCK,
        alignment_tokens=alignment,
        state_page_bytes=state.all_stages_bytes // len(recurrence.layers),
        row_bytes=kv.row_bytes,
    )
    return tokens
