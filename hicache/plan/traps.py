"""Known traps of sizing, each with the numbers of this plan: what engines log, divide and round without saying so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hicache.costs.machine import GIB
from hicache.plan.formula import Ledger
from hicache.plan.sizes import memory_fraction

if TYPE_CHECKING:
    from hicache.plan.plan import Plan

BLOCK_TOKENS_MAX = 512  # above it, prefixes are found in steps that shared prompts seldom end on
KV_USED_MIN = 0.5


def warnings(plan: Plan) -> list[str]:
    """One sentence for each trap that this plan is near to."""
    return [sentence for check in CHECKS for sentence in check(plan, plan.ledger)]


def _state_binds(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """Operators lose their concurrency to a state pool that nobody sized."""
    found = plan.capacity
    mean, _ = plan.settings.lengths.held_tokens(page_tokens=plan.settings.page_tokens)
    if found.bound_by != "state_slots" or not found.kv_tokens:
        return
    used = found.concurrent_requests * mean / found.kv_tokens
    if used < KV_USED_MIN:
        better = f": ratio {plan.solved.ratio:g} lets {plan.solved.requests} run" if plan.solved else ""
        yield (
            f"state slots bind: {found.concurrent_requests} requests on a DP rank use {used:.0%} of its KV"
            f" tokens{better}"
        )


def _tiny_host_tier(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """An L2 that is smaller than L1 holds nothing that L1 does not hold."""
    device = plan.capacity.rest_bytes
    if 0 < plan.l2_bytes < device:
        yield (
            f"L2 of {plan.l2_bytes / GIB:.1f} GiB a rank is smaller than L1 ({device / GIB:.1f} GiB): written through,"
            " it only mirrors what L1 holds; make it larger, or write back"
        )


def _absurd_blocks(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """vLLM raises the block size until a block of attention is as large as a state."""
    if "block_tokens" not in ledger:
        return
    tokens = int(ledger["block_tokens"].value)
    if tokens > BLOCK_TOKENS_MAX:
        yield (
            f"vLLM sets its block size to {tokens} tokens, so that a block is as large as a state: a prefix is"
            " reused in steps of that many tokens; a higher TP, or a state in bfloat16, makes them shorter"
        )


def _log_lines(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """Lines of engines' logs that look like promises."""
    if "logged_kv_cache_tokens" in ledger:
        logged = int(ledger["logged_kv_cache_tokens"].value)
        yield (
            f"vLLM will log 'GPU KV cache size: {logged:,} tokens': that is concurrency x max_model_len"
            f" ({plan.settings.context}), a bound for requests of that length and no promise for others"
        )
    elif plan.capacity.kv_tokens:
        yield (
            f"SGLang will log max_total_num_tokens={plan.capacity.kv_tokens}: tokens of the pool on each DP rank,"
            f" of which {plan.capacity.concurrent_requests} requests of the planned lengths can run"
        )


def _chunk_by_dp(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """SGLang divides the chunk size by DP."""
    settings = plan.settings
    if settings.dp > 1 and settings.engine == "sglang":
        yield (
            f"--chunked-prefill-size {settings.chunk_tokens} is divided by dp = {settings.dp}: each rank prefills"
            f" {settings.chunk_tokens // settings.dp} tokens at a time, and snapshots state as often"
        )


def _denominators(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """A memory fraction means different things to different engines."""
    settings = plan.settings
    if settings.rest_bytes is None:
        fraction = memory_fraction(settings, Ledger())
        other = "free" if settings.fraction_of == "total" else "total"
        yield (
            f"the memory fraction {fraction:g} is of {settings.fraction_of} memory, as"
            f" {'SGLang and vLLM' if settings.fraction_of == 'total' else 'TensorRT-LLM'} take it; of {other} memory"
            " it would be another number"
        )


def _nothing_reserved(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """vLLM measures activations, graphs and buffers, and takes them out of its share before it makes blocks."""
    settings = plan.settings
    if settings.engine == "vllm" and settings.rest_bytes is None and not settings.reserved_bytes:
        yield (
            "vLLM takes activations and CUDA graphs out of its share of memory, and nothing is reserved for them here:"
            " some GiB fewer are left; say --reserved-gib, or --rest-gib as its log has it"
        )


def _sheet_memory(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """The sheet's memory is not what can be planned with."""
    machine = plan.settings.machine
    if machine.name == "b300-sheet":
        yield "288 GB is what the sheet of a B300 says: an NVL72 has 279 GB to plan with, an HGX board 270 GB"


def _cores(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """Every process that polls wants a physical core."""
    needed, has = int(ledger["physical_cores"].value), plan.settings.machine.physical_cores
    if has is not None and has < needed:
        yield f"a node needs {needed} physical cores (not hyper-threads) and has {has}: the GPUs will wait for them"


def _replicated_latent(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """Every attention rank keeps all of MLA's latent unless DCP shares its tokens."""
    settings = plan.settings
    if settings.tp > settings.dcp and any(group.is_mla for group in settings.model.attention):
        copies = settings.tp // settings.dcp
        yield f"MLA's latent is on every attention rank: {copies} copies of each token; --dcp {settings.tp} keeps one"


def _packed_rows(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """Packed fp8 rows are larger than plain ones."""
    attention = plan.settings.model.attention
    if plan.settings.kv_dtype == "fp8_e4m3" and any(group.is_mla for group in attention):
        yield "plain fp8 MLA rows have 576 bytes; kernels that want fp8_ds_mla take 656, 13.9 % more: see --kv-dtype"


CHECKS: tuple[Callable[[Plan, Ledger], Iterator[str]], ...] = (
    _state_binds,
    _tiny_host_tier,
    _absurd_blocks,
    _chunk_by_dp,
    _cores,
    _replicated_latent,
    _packed_rows,
    _sheet_memory,
    _denominators,
    _nothing_reserved,
    _log_lines,
)
