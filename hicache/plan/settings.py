"""What a plan is asked for: how a model is spread over a machine, how its cache is kept, and the requests it is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from hicache.costs.machine import Machine
from hicache.errors import ConfigError
from hicache.plan import dtypes
from hicache.plan.lengths import LengthMix
from hicache.plan.model import ModelShape, heads_on_rank
from hicache.slices import check_whole

Engine: TypeAlias = Literal["sglang", "vllm"]
Strategy: TypeAlias = Literal["no_buffer", "extra_buffer", "extra_buffer_lazy"]
FractionOf: TypeAlias = Literal["total", "free"]

FRACTION_MAX = {"sglang": 0.85, "vllm": 0.92}  # by default; SGLang's may have to be lower: see sizes.memory_fraction
RATIO_MAX = 2.0**64  # all for state
RING_DEPTH_MAX = 1 << 16
_OF_SGLANG = ("state_slots", "replay_ring", "skip_decode_lock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a plan depends on.

    ``tp`` ranks share the heads of each attention layer; ``dp`` such groups serve requests of their own; each of them
    in ``pp`` stages: ``tp * dp * pp`` GPUs. ``ep`` GPUs share the experts of a layer, by default all of a stage.
    ``dcp`` of the ``tp`` ranks share the tokens of a sequence. ``max_running_requests`` and ``state_slots`` are for all
    DP ranks together, as SGLang's flags are. ``draft_tokens`` counts the anchor, as
    ``--speculative-num-draft-tokens`` does; 0 is no speculation.
    """

    model: ModelShape
    machine: Machine
    engine: Engine = "sglang"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int | None = None
    dcp: int = 1
    kv_dtype: str = "bfloat16"
    state_dtype: str | None = None  # None: as the model says
    conv_dtype: str = "bfloat16"
    strategy: Strategy = "extra_buffer"
    overlap: bool = True
    radix_cache: bool = True
    skip_decode_lock: bool = False
    draft_tokens: int = 0
    draft_layers: int = 0
    replay_ring: bool = False
    ring_depth: int | None = None
    page_tokens: int = 64
    memory_fraction: float | None = None
    fraction_of: FractionOf = "total"
    reserved_bytes: int = 0
    rest_bytes: int | None = None  # what is left for KV and state, where it has been measured
    max_running_requests: int | None = None
    state_slots: int | None = None
    ratio: float = 0.9
    window_ratio: float = 0.8
    chunk_tokens: int = 8192
    lengths: LengthMix = field(default_factory=lambda: LengthMix.single(input_tokens=8192, output_tokens=1024))
    context_tokens: int | None = None  # None: the model's
    concurrency: int | None = None  # wanted, over all DP ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dtype", dtypes.kv_dtype(self.kv_dtype))
        object.__setattr__(self, "state_dtype", dtypes.state_dtype(self.state_dtype or self.model.state_dtype))
        object.__setattr__(self, "conv_dtype", dtypes.state_dtype(self.conv_dtype, setting="conv_dtype"))
        self._check_numbers()
        self._check_parallel()
        self._check_strategy()

    def _check_numbers(self) -> None:
        for name in ("tp", "pp", "dp", "dcp", "page_tokens", "chunk_tokens"):
            check_whole(name, getattr(self, name))
        for name in ("ep", "ring_depth", "max_running_requests", "state_slots", "context_tokens", "concurrency"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        for name in ("draft_tokens", "draft_layers", "reserved_bytes"):
            check_whole(name, getattr(self, name), at_least=0)
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError("memory_fraction", self.memory_fraction, "a share above 0 and at most 1")
        if not 0 < self.ratio <= RATIO_MAX:
            raise ConfigError("ratio", self.ratio, f"state to KV, above 0 and at most {RATIO_MAX:g}")
        if self.rest_bytes is not None:
            check_whole("rest_bytes", self.rest_bytes)
        if not 0.0 < self.window_ratio <= 1.0:
            raise ConfigError("window_ratio", self.window_ratio, "a share above 0 and at most 1")
        if self.engine not in get_args(Engine):
            raise ConfigError("engine", self.engine, f"one of {', '.join(get_args(Engine))}")

    def _check_parallel(self) -> None:
        if self.tp % self.dcp:
            raise ConfigError("dcp", self.dcp, f"a divisor of tp = {self.tp}, whose ranks it shares tokens between")
        if self.dcp > 1 and self.model.window_attention:
            raise ConfigError("dcp", self.dcp, "1 with sliding windows, whose tokens are not shared between ranks")
        if (self.tp * self.dp) % self.expert_ranks:
            raise ConfigError("ep", self.expert_ranks, f"a divisor of tp * dp = {self.tp * self.dp}")
        for attention in self.model.attention:
            if not attention.is_mla:
                heads_on_rank(attention.kv_heads, self.tp // self.dcp, setting="KV heads")
                copies = max(1, self.tp // attention.kv_heads)
                if self.engine == "vllm" and self.dcp > copies:
                    raise ConfigError("dcp", self.dcp, f"at most {copies} in vLLM, the ranks that have one KV head")
            if self.kv_dtype == "fp8_ds_mla" and not attention.is_mla:
                raise ConfigError("kv_dtype", self.kv_dtype, "fp8_e4m3: the packed format is for MLA")
        for recurrence in self.model.recurrence:
            heads_on_rank(recurrence.heads, self.tp, setting="heads of state")
            heads_on_rank(recurrence.groups or 1, self.tp, setting="groups of state")

    def _check_strategy(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ConfigError("strategy", self.strategy, f"one of {', '.join(get_args(Strategy))}")
        if self.strategy == "extra_buffer_lazy" and not self.overlap:
            raise ConfigError("strategy", self.strategy, "extra_buffer without overlap scheduling, which lazy needs")
        if self.draft_tokens and self.model.recurrence and self.max_running_requests is None:
            raise ConfigError(
                "max_running_requests", None, "a number with draft_tokens: states of drafts are kept for each request"
            )
        for name in _OF_SGLANG if self.engine == "vllm" else ():
            if getattr(self, name):
                raise ConfigError(name, getattr(self, name), "none with vLLM: the planner knows it of SGLang alone")
        if self.ring_depth is not None and not self.replay_ring:
            raise ConfigError("ring_depth", self.ring_depth, "replay_ring beside it: there is no other ring")
        if self.replay_ring and not self.draft_tokens:
            raise ConfigError("replay_ring", True, "draft_tokens of at least 2: the ring replays a verify window")
        if self.replay_ring and {group.kind for group in self.model.recurrence} - {"gdn", "kda"}:
            raise ConfigError("replay_ring", True, "a model with GDN or KDA layers")
        if self.ring_depth is not None and self.ring_depth > RING_DEPTH_MAX:
            raise ConfigError("ring_depth", self.ring_depth, f"at most {RING_DEPTH_MAX}")

    @property
    def gpus(self) -> int:
        """GPUs of the replica."""
        return self.tp * self.dp * self.pp

    @property
    def expert_ranks(self) -> int:
        """GPUs that share the experts of a layer."""
        return self.tp * self.dp if self.ep is None else self.ep

    @property
    def context(self) -> int:
        """The longest sequence that the engine is told to take."""
        return self.context_tokens or self.model.context_tokens

    @property
    def running_max_per_dp(self) -> int | None:
        """Running requests of one DP rank, where a limit is given."""
        return None if self.max_running_requests is None else max(1, self.max_running_requests // self.dp)
