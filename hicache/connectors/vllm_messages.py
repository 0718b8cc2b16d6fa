"""What the scheduler's half of the vLLM connector and its workers tell each other, as vLLM carries it."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hicache.connectors.step_times import slower
from hicache.connectors.vllm_scheduler import StepPlan
from hicache.connectors.vllm_spec import EngineSpec


@dataclass(frozen=True)
class HiCacheMetadata(KVConnectorMetadata):
    """From the scheduler to every worker, with each step."""

    plan: StepPlan


@dataclass(frozen=True)
class HiCacheHandshake(KVConnectorHandshakeMetadata):
    """From every worker to the scheduler, once: what the engine's cache is."""

    engine: EngineSpec


@dataclass(frozen=True)
class HiCacheStepTimes(KVConnectorWorkerMetadata):
    """From every worker to the scheduler: seconds that steps have computed, by step and stage of the pipeline."""

    seconds: dict[tuple[int, int], float]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HiCacheStepTimes:
        """Of all workers together."""
        assert isinstance(other, HiCacheStepTimes)
        return HiCacheStepTimes(slower(self.seconds, other.seconds))
