"""Machines: what a GPU offers that can be planned with, and how fast the tiers below it are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hicache.errors import ConfigError

GB = 10**9
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tier below GPU memory: what a load costs at least, and its bandwidth, of each GPU unless it is ``shared``."""

    bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = False

    def load_s(self, size_bytes: float) -> float:
        """A load of so many bytes, with nothing before it."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of node. ``gpu_gb`` is what can be planned with, in 10^9 bytes; ``sheet_gb`` what the sheet says.

    ``prefill_tflops`` is what prefill reaches on one GPU, not what the sheet says. ``source`` tells where numbers come
    from.
    """

    name: str
    gpu_gb: float
    sheet_gb: float = 0.0
    gpus_per_node: int = 8
    physical_cores: int | None = None
    prefill_tflops: float = 400.0
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    source: str = ""

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a GPU to plan with."""
        return round(self.gpu_gb * GB)


_DRAM = Tier(bytes_per_s=43.5 * GB, latency_s=0.010)  # a fit of vLLM's published loads on an H100, 8B model
_NVME = Tier(bytes_per_s=6.9 * GB, latency_s=0.010, shared=True)  # PegaFlow's published peak of one PCIe 4 SSD
_TIERS = {"dram": _DRAM, "nvme": _NVME, "nvme_x2": Tier(bytes_per_s=13.5 * GB, latency_s=0.010, shared=True)}
_FITTED = "tiers: vLLM's loads on an H100 (DRAM), published SSD peaks; compute: 60 % of the sheet's dense bf16"

MACHINES = {
    machine.name: machine
    for machine in (
        Machine(name="b300-sheet", gpu_gb=288, sheet_gb=288, prefill_tflops=1350, tiers=_TIERS, source=_FITTED),
        Machine(
            name="b300-nvl72",
            gpu_gb=279,
            sheet_gb=288,
            gpus_per_node=4,
            prefill_tflops=1350,
            tiers=_TIERS,
            source=_FITTED,
        ),
        Machine(name="b300-hgx", gpu_gb=270, sheet_gb=288, prefill_tflops=1350, tiers=_TIERS, source=_FITTED),
        Machine(
            name="gb200-nvl72",
            gpu_gb=186,
            sheet_gb=192,
            gpus_per_node=4,
            prefill_tflops=1350,
            tiers=_TIERS,
            source=_FITTED,
        ),
        Machine(name="b200-hgx", gpu_gb=180, sheet_gb=192, prefill_tflops=1350, tiers=_TIERS, source=_FITTED),
        Machine(name="h200", gpu_gb=149, sheet_gb=141, prefill_tflops=593, tiers=_TIERS, source=_FITTED),
        Machine(name="h100", gpu_gb=85, sheet_gb=80, prefill_tflops=593, tiers=_TIERS, source=_FITTED),
        Machine(name="a100", gpu_gb=85, sheet_gb=80, prefill_tflops=187, tiers=_TIERS, source=_FITTED),
    )
}


def machine(name: str) -> Machine:
    """A preset, or a calibrated machine from a JSON file of Machine's fields. Raises ConfigError."""
    if name in MACHINES:
        return MACHINES[name]
    if not name.endswith(".json"):
        raise ConfigError("machine", name, f"one of {', '.join(MACHINES)}, or a .json file with a machine's fields")
    try:
        found = msgspec.convert(json.loads(Path(name).read_text()), Machine)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError("machine", name, f"a JSON object with the fields of a machine ({error})") from error
    above_zero = {"gpu_gb": found.gpu_gb, "prefill_tflops": found.prefill_tflops, "gpus_per_node": found.gpus_per_node}
    above_zero |= {f"tiers.{tier}.bytes_per_s": found.tiers[tier].bytes_per_s for tier in found.tiers}
    for field_name, value in above_zero.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"machine.{field_name}", value, f"a number above 0 in {name}")
    for tier_name, tier in found.tiers.items():
        if not 0 <= tier.latency_s < math.inf:
            raise ConfigError(f"machine.tiers.{tier_name}.latency_s", tier.latency_s, f"seconds, 0 or more, in {name}")
    return found
