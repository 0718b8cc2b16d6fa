"""The flags of today's engines that realise a plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hicache.costs.machine import GB
from hicache.plan.capacity import Capacity
from hicache.plan.formula import Ledger
from hicache.plan.settings import Engine, Settings
from hicache.plan.sizes import memory_fraction

VERSIONS: Mapping[Engine, str] = {"sglang": "0.5.23", "vllm": "0.32.0"}
_SGLANG_KV = {"fp8_ds_mla": "fp8_e4m3", "fp4_e2m1": "nvfp4"}  # packed rows are its own choice, by kernel
_DRAFTS: Mapping[Engine, str] = {
    "sglang": "--speculative-algorithm, and the draft model that it takes",
    "vllm": 'to --speculative-config the "method", and the draft "model" that it takes',
}
_VLLM_KV = {"fp4_e2m1": "nvfp4", "float16": "float16"}


@dataclass(frozen=True, slots=True)
class Flags:
    """A command line: variables of the environment before it, and flags with their values, None for a bare one."""

    engine: Engine
    environment: dict[str, str]
    flags: dict[str, str | None]
    missing: str = ""  # what the plan does not know and the engine needs

    @property
    def version(self) -> str:
        """The version of the engine that they are for."""
        return VERSIONS[self.engine]

    @property
    def arguments(self) -> list[str]:
        """The flags as a command line has them."""
        return [part for name, value in self.flags.items() for part in ((name,) if value is None else (name, value))]

    def __str__(self) -> str:
        variables = [f"{name}={value} \\" for name, value in self.environment.items()]
        lines = [name if value is None else f"{name} {shlex.quote(value)}" for name, value in self.flags.items()]
        missing = [f"# add {self.missing}"] if self.missing else []
        return "\n".join((f"# {self.engine} {self.version}", *missing, *variables, " \\\n".join(lines)))


def engine_flags(engine: Engine, settings: Settings, capacity: Capacity, *, l2_bytes: int = 0) -> Flags:
    """The flags for ``engine``, whichever engine the plan was made for."""
    make: dict[Engine, Callable[..., Iterator[tuple[str, str | None]]]] = {"sglang": _sglang, "vllm": _vllm}
    environment = {}
    if engine == "sglang" and settings.skip_decode_lock:
        environment["SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK"] = "1"
    missing = _DRAFTS[engine] if settings.draft_tokens else ""
    return Flags(engine, environment, dict(make[engine](settings, capacity, l2_bytes)), missing)


def _sglang(settings: Settings, capacity: Capacity, l2_bytes: int) -> Iterator[tuple[str, str | None]]:
    yield "--tp-size", str(settings.tp * settings.dp)
    if settings.dp > 1:
        yield "--dp-size", str(settings.dp)
        yield "--enable-dp-attention", None
    if settings.pp > 1:
        yield "--pp-size", str(settings.pp)
    if settings.model.experts is not None:
        yield "--ep-size", str(settings.expert_ranks)
    if settings.dcp > 1:
        yield "--dcp-size", str(settings.dcp)
    yield "--kv-cache-dtype", _SGLANG_KV.get(settings.kv_dtype, settings.kv_dtype)
    yield "--page-size", str(settings.page_tokens)
    yield "--context-length", str(settings.context)
    yield "--chunked-prefill-size", str(settings.chunk_tokens)
    if settings.rest_bytes is None and settings.fraction_of == "total":
        yield "--mem-fraction-static", f"{memory_fraction(settings, Ledger()):g}"
    yield "--max-running-requests", str(max(1, capacity.concurrent_requests) * settings.dp)
    if settings.model.window_attention:
        yield "--swa-full-tokens-ratio", f"{settings.window_ratio:g}"
    if settings.model.recurrence:
        yield from _sglang_state(settings)
    if settings.draft_tokens:
        yield "--speculative-num-draft-tokens", str(settings.draft_tokens)
    if l2_bytes:
        yield "--enable-hierarchical-cache", None
        yield "--hicache-size", str(max(1, l2_bytes // GB))


def _sglang_state(settings: Settings) -> Iterator[tuple[str, str | None]]:
    yield "--mamba-ssm-dtype", settings.state_dtype
    if not settings.radix_cache:
        yield "--disable-radix-cache", None
    else:
        yield "--mamba-radix-cache-strategy", settings.strategy
    if not settings.overlap:
        yield "--disable-overlap-schedule", None
    if settings.state_slots is not None:
        yield "--max-mamba-cache-size", str(settings.state_slots)
    else:
        yield "--mamba-full-memory-ratio", f"{settings.ratio:g}"
    if settings.replay_ring:
        yield "--enable-linear-replayssm-spec", None
        if settings.ring_depth is not None:
            yield "--linear-replayssm-cache-len", str(settings.ring_depth)


def _vllm(settings: Settings, capacity: Capacity, l2_bytes: int) -> Iterator[tuple[str, str | None]]:
    yield "--tensor-parallel-size", str(settings.tp)
    if settings.dp > 1:
        yield "--data-parallel-size", str(settings.dp)
    if settings.pp > 1:
        yield "--pipeline-parallel-size", str(settings.pp)
    if settings.model.experts is not None and settings.expert_ranks > 1:
        yield "--enable-expert-parallel", None
    if settings.dcp > 1:
        yield "--decode-context-parallel-size", str(settings.dcp)
    yield "--kv-cache-dtype", _VLLM_KV.get(settings.kv_dtype, settings.kv_dtype)
    yield "--block-size", str(settings.page_tokens)
    yield "--max-model-len", str(settings.context)
    yield "--max-num-batched-tokens", str(settings.chunk_tokens)
    if settings.rest_bytes is None and settings.fraction_of == "total":
        yield "--gpu-memory-utilization", f"{memory_fraction(settings, Ledger()):g}"
    else:
        yield "--kv-cache-memory-bytes", str(max(0, capacity.rest_bytes))
    yield "--max-num-seqs", str(max(1, capacity.concurrent_requests))
    yield "--enable-prefix-caching" if settings.radix_cache else "--no-enable-prefix-caching", None
    if settings.model.recurrence:
        yield "--mamba-ssm-cache-dtype", settings.state_dtype
        yield "--mamba-cache-mode", "align" if settings.radix_cache else "none"
    if settings.draft_tokens > 1:
        yield "--speculative-config", f'{{"num_speculative_tokens": {settings.draft_tokens - 1}}}'
    if l2_bytes:
        yield "--kv-offloading-size", f"{l2_bytes * settings.tp / 2**30:g}"
