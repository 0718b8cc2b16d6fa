"""What a replay is priced with: a published rig, or a model of `hicache plan` on one of its machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hicache.costs.machine import Machine, Tier, machine
from hicache.costs.model import ModelCosts, Prefill
from hicache.costs.rigs import RIGS, Rig, rig
from hicache.errors import ConfigError
from hicache.plan.formula import Ledger
from hicache.plan.presets import model as model_shape
from hicache.plan.settings import Settings
from hicache.plan.sizes import kv_sizes, state_sizes
from hicache.plan.tiers import pair_flops

MODEL_DEFAULT = "llama-3-8b"
HARDWARE_DEFAULT = "llama-8b-h100"
_L3_NAMES = ("l3", "nvme")  # of a machine's tiers, the first of them that it has


def priced(model: str | None = None, hardware: str = HARDWARE_DEFAULT, *, gpus: int = 1, l3: str | None = None) -> Rig:
    """The costs of a model on hardware: a published rig, which has its model, or a machine of the planner.

    ``gpus`` of a machine compute one request together. Tier L2 is its ``dram``, L3 the tier named ``l3``, by default
    what ``hicache calibrate`` has measured, else one NVMe drive. Raises ConfigError.
    """
    if hardware in RIGS:
        for name, value in (("model", model), ("l3", l3), ("gpus", None if gpus == 1 else gpus)):
            if value is not None:
                raise ConfigError(
                    name, value, f"nothing: {hardware} is one measurement; or name a machine, such as h100"
                )
        return rig(hardware)
    try:
        place = machine(hardware)
    except ConfigError as error:
        raise ConfigError("hardware", hardware, f"a rig ({', '.join(RIGS)}), or {error.expected}") from error
    return _on_machine(model or MODEL_DEFAULT, place, gpus, l3)


def _on_machine(model: str, place: Machine, gpus: int, l3: str | None) -> Rig:
    if not 1 <= gpus <= place.gpus_per_node:
        raise ConfigError("gpus", gpus, f"1 to {place.gpus_per_node}, as {place.name} has in a node")
    whole = Settings(model=model_shape(model), machine=place)
    parameters = whole.model.weights.active_parameters
    if parameters <= 0:
        raise ConfigError("model", model, "a model that tells how many parameters are active")
    prefill = Prefill.roofline(
        parameters=parameters,
        pair_flops=pair_flops(whole),
        flops_per_s=place.prefill_tflops * 1e12 * gpus,
    )
    costs = ModelCosts(
        prefill,
        _tiers(place, gpus, l3),
        token_bytes=kv_sizes(whole, Ledger()).bytes_per_token,
        state_bytes=state_sizes(whole, Ledger()).all_stages_bytes,
    )
    return Rig(f"{whole.model.name} on {gpus} x {place.name}", costs, place.source)


def _tiers(place: Machine, gpus: int, l3: str | None) -> Mapping[str, Tier]:
    """By the replayer's names, with the bandwidth of all ``gpus``, of which each has its own unless it is shared."""
    below = {name: tier for name, tier in place.tiers.items() if name != "dram"}
    if l3 is not None and l3 not in below:
        raise ConfigError("l3", l3, f"one of {', '.join(below) or 'none'}, the tiers of {place.name}")
    name = l3 or next((known for known in _L3_NAMES if known in below), next(iter(below), None))
    named = {"L2": place.tiers.get("dram"), "L3": None if name is None else below[name]}
    return {
        name: tier if tier.shared else replace(tier, bytes_per_s=tier.bytes_per_s * gpus)
        for name, tier in named.items()
        if tier is not None
    }
