"""The settings of the vLLM connector: what an operator writes into ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from hicache.connectors.checkpoint import Depth
from hicache.costs.measured import MeasuredCosts
from hicache.errors import ConfigError
from hicache.policies.eviction_choice import eviction_policy_of
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy
from hicache.policies.read import READ_POLICY_DEFAULT, read_policy_of
from hicache.policies.write import write_policy_of
from hicache.ranks.settings import Ranks

_PREFIX = "kv_connector_extra_config."
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "float": (int, float),
    "Depth": (str,),
    "PrefetchMode": (str,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Checked when the engine starts, on every rank and in the scheduler. docs/vllm.md says what each does."""

    l2_bytes: int  # host memory of each rank
    l2_state_share: float = 0.25
    l3: str | None = None
    token: str = ""
    token_file: str | None = None
    deployment: str = ""
    prefetch_mode: PrefetchMode = "timeout"
    prefetch_base_s: float = 1.0
    prefetch_per_ki_token_s: float = 0.25
    prefetch_hard_cap_s: float = 30.0
    prefetch_threshold_tokens: int = 256
    write_policy: str = "write_through"
    eviction: str = "lru"
    read_policy: str = READ_POLICY_DEFAULT
    tenant_salt_required: bool = False
    media_ids_trusted: bool = False
    weights: Depth = "sampled"
    weights_revision: str | None = None
    ranks: str = ""
    ranks_token: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        if self.l2_bytes <= 0:
            raise ConfigError(f"{_PREFIX}l2_bytes", self.l2_bytes, "bytes of host memory for each rank, more than 0")
        if not 0 <= self.l2_state_share <= 1:
            raise ConfigError(f"{_PREFIX}l2_state_share", self.l2_state_share, "a fraction from 0 to 1")
        if self.token and self.token_file:
            raise ConfigError(f"{_PREFIX}token_file", self.token_file, "token or token_file, not both")
        self.prefetch  # noqa: B018  # its checks are part of these
        write_policy_of(self.write_policy)
        eviction_policy_of(self.eviction)
        read_policy_of(self.read_policy, MeasuredCosts())
        if self.weights not in get_args(Depth):
            raise ConfigError(f"{_PREFIX}weights", self.weights, f"one of {', '.join(get_args(Depth))}")
        if self.ranks:
            self.ranks_at("")  # checked here, not when the ranks meet

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> VllmSettings:
        """Raises ConfigError for unknown names, with those that there are, and for values that cannot be."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(extra_config.keys() - set(known))
        if unknown:
            raise ConfigError("kv_connector_extra_config", unknown, f"names out of {', '.join(known)}")
        if "l2_bytes" not in extra_config:
            raise ConfigError(f"{_PREFIX}l2_bytes", None, "bytes of host memory for each rank, such as 68719476736")
        return cls(**extra_config)

    @property
    def secret(self) -> str:
        """What hicached knows the engine by. Raises ConfigError where its file cannot be read."""
        if self.token_file is None:
            return self.token
        try:
            return Path(self.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{_PREFIX}token_file", self.token_file, f"a text file to read ({error})") from error

    @property
    def prefetch(self) -> PrefetchPolicy:
        """How long requests wait for L3. Raises ConfigError."""
        return PrefetchPolicy(
            mode=self.prefetch_mode,
            base_s=self.prefetch_base_s,
            per_ki_token_s=self.prefetch_per_ki_token_s,
            hard_cap_s=self.prefetch_hard_cap_s,
            threshold_tokens=self.prefetch_threshold_tokens,
        )

    def ranks_at(self, address: str) -> Ranks:
        """Where the scheduler and the workers of one engine meet: at ``address``, unless the operator says where."""
        return Ranks(self.ranks or address, token=self.ranks_token)


def _check_type(name: str, value: object, annotation: str) -> None:
    allowed = _TYPES[annotation]
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        expected = {"bool": "true or false", "int": "a whole number", "float": "a number"}.get(annotation, "text")
        shown = "..." if "token" in name and isinstance(value, str) else value
        raise ConfigError(f"{_PREFIX}{name}", shown, expected)
