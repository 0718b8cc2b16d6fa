"""vLLM's memory: equal blocks, from which every group of layers draws, attention and states alike."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.costs.machine import GIB, Machine
from hicache.plan import formulas
from hicache.plan.formula import Ledger
from hicache.plan.lengths import requests_that_fit
from hicache.plan.model import pipeline_stages, stage_counts
from hicache.plan.settings import Settings
from hicache.plan.sizes import NO_STATE, KvSizes, StateSizes

BLOCK_TOKENS = 16
MLA_ALIGNMENT_TOKENS = 128
SEQUENCES_MAX, SEQUENCES_MAX_SMALL = 1024, 256  # its defaults of --max-num-seqs: _get_batch_defaults
LARGE_GPU_BYTES = 70 * GIB
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


def sequences_max(machine: Machine) -> int:
    """The requests that vLLM runs beside each other when it is not told how many."""
    is_large = machine.gpu_bytes >= LARGE_GPU_BYTES and "a100" not in machine.name.lower()
    return SEQUENCES_MAX if is_large else SEQUENCES_MAX_SMALL


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
    row = kv.row_bytes or _state_page_bytes(settings, state)  # without attention, a block is a state
    block_bytes = ledger.work_out(
        formulas.VLLM_BLOCK_BYTES, group_layers=groups.layers, block_tokens=block_tokens, row_bytes=row
    )
    blocks = max(0, ledger.work_out(formulas.VLLM_BLOCKS, rest_bytes=max(0, rest_bytes), block_bytes=block_bytes))
    numbers = _request_numbers(settings, groups, block_tokens, ledger)
    requests = _requests(settings, groups, blocks, numbers)
    if ledger.work_out(formulas.VLLM_REQUEST, tokens=settings.lengths.longest_tokens, **numbers) > blocks:
        requests = 0
    at_context = _blocks_of(numbers, settings.context)
    ledger.work_out(
        formulas.VLLM_LOGGED, kv_blocks=blocks, blocks_at_context=at_context, context_tokens=settings.context
    )
    tokens = ledger.work_out(
        formulas.VLLM_TOKENS,
        kv_blocks=blocks,
        attention_groups=max(1, groups.attention),
        block_tokens=block_tokens,
        dcp=settings.dcp,
    )
    states_each = numbers["states_per_request"]
    slots = 0
    if groups.states:
        slots = ledger.work_out(formulas.VLLM_STATES, kv_blocks=blocks, state_groups=groups.states)
    sequences = slots // states_each if groups.states else SEQUENCES_MAX
    return BlockPool(block_tokens, blocks, requests, states_each, slots, tokens, sequences)


def _requests(settings: Settings, groups: Groups, blocks: int, numbers: dict[str, int]) -> int:
    """Requests of the planned lengths that draw their blocks from one pool, with 95 % certainty."""
    span = numbers["block_tokens"] * settings.dcp
    mean, deviation = settings.lengths.held_tokens(page_tokens=span)
    mean_blocks = mean / span * groups.attention + _blocks_of(numbers, 0)
    return requests_that_fit(blocks, mean_blocks, deviation / span * groups.attention)


def _blocks_of(numbers: dict[str, int], tokens: int) -> int:
    """Blocks of one request, without a line in the plan."""
    return int(Ledger().work_out(formulas.VLLM_REQUEST, tokens=tokens, **numbers))


def _request_numbers(settings: Settings, groups: Groups, block_tokens: int, ledger: Ledger) -> dict[str, int]:
    """What a request's blocks follow from."""
    states = 1
    if groups.states:
        states = ledger.work_out(
            formulas.VLLM_SLOTS_PER_REQUEST,
            running_states=2 if settings.radix_cache else 1,
            draft_states=max(0, settings.draft_tokens - 1),
        )
    window = max((group.window_tokens or 0 for group in settings.model.window_attention), default=0)
    window_tokens = min(window - 1 + settings.chunk_tokens, settings.context)
    return {
        "attention_groups": groups.attention,
        "block_tokens": block_tokens,
        "dcp": settings.dcp,
        "window_groups": groups.windows,
        "window_blocks": -(-window_tokens // block_tokens) + 1 if window else 0,
        "state_groups": groups.states,
        "states_per_request": states,
    }


def _block_tokens(settings: Settings, kv: KvSizes, state: StateSizes, ledger: Ledger) -> int:
    """Tokens of a block: as set, unless a state needs it larger."""
    alignment = settings.page_tokens
    if not kv.row_bytes:
        return 1
    if state is NO_STATE:
        return alignment
    if any(group.is_mla for group in settings.model.attention):
        alignment = max(alignment, MLA_ALIGNMENT_TOKENS)
    tokens: int = ledger.work_out(
        formulas.VLLM_BLOCK,
        alignment_tokens=alignment,
        state_page_bytes=_state_page_bytes(settings, state),
        row_bytes=kv.row_bytes,
    )
    return tokens


def _state_page_bytes(settings: Settings, state: StateSizes) -> int:
    """Bytes of a state in one layer."""
    [recurrence] = settings.model.recurrence
    return state.all_stages_bytes // len(recurrence.layers)
