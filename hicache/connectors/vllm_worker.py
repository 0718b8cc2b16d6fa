"""A worker's half of the vLLM connector: one rank, over the tensors that vLLM has registered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache.connect import open_l3
from hicache.connectors.step_times import step_clock_for
from hicache.connectors.vllm_scheduler import StepPlan
from hicache.connectors.vllm_settings import VllmSettings
from hicache.connectors.vllm_spec import EngineSpec, LayerBlocks, adoptable, described, engine_spec
from hicache.errors import ConfigError, RankLost
from hicache.keys import FieldValue
from hicache.pools import L1Pool, L2Pool, l2_slot_counts
from hicache.ranks.settings import Ranks
from hicache.ranks.worker import RankWorker
from hicache.samples import Samples, l3_samples_of

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

# vLLM takes steps without a pause while requests wait, and its processes spin between them: on few cores the threads
# that move the bytes, and hicached, would get none. What is waited for takes longer, and its end ends the pause.
IDLE_STEP_S = 0.002


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in its engine."""

    rank: int  # stage * tp_size + tp_rank
    tp_size: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class Introduction:
    """What the workers tell each other, so that all have one spec; rank 0 says what the engine is."""

    layers: list[LayerBlocks]
    identity: tuple[str, str, tuple[tuple[str, FieldValue], ...]] | None


class WorkerSide:
    """Called by vLLM's model runner, in its thread: ``begin`` before and ``end`` after it computes, for every step."""

    def __init__(
        self,
        settings: VllmSettings,
        kv_cache_config: Any,  # vLLM's KVCacheConfig
        tensors: Mapping[str, torch.Tensor],
        place: Place,
        *,
        leader: Ranks,
        identity: Callable[[], tuple[str, str, tuple[tuple[str, FieldValue], ...]]],
        gather: Callable[[Introduction], Sequence[Introduction]],
    ) -> None:
        """Take L2, connect to L3, and wait in the background for the leader. ``identity`` is called on rank 0 only;
        ``gather`` gives what all ranks have said, in their order. Raises ConfigError.
        """
        own = Introduction(
            described(kv_cache_config, tensors, tp_size=place.tp_size), identity() if place.rank == 0 else None
        )
        said = gather(own)
        if said[0].identity is None:
            raise ConfigError("rank 0", None, "one that says what the engine is: gather in the order of ranks")
        model, revision, fields = said[0].identity
        self.engine: EngineSpec = engine_spec(
            [each.layers for each in said],
            tp_size=place.tp_size,
            page_tokens=place.page_tokens,
            model=model,
            revision=revision,
            identity=fields,
        )
        self._step: ExitStack | None = None
        self._worker: RankWorker | None = _open_worker(
            settings, self.engine, kv_cache_config, tensors, place.rank, leader
        )
        self._rank = place.rank
        self._stage = place.rank // place.tp_size
        self._clock = step_clock_for(next(iter(tensors.values())).device)
        self._l3 = self._worker.l3

    def begin(self, plan: StepPlan) -> None:
        """Compute may begin: what it must not overwrite has been copied. Takes no longer than that, and never raises
        for a fault: a rank that is lost goes on without the cache.
        """
        self._end_step()
        self._step = self._entered(plan.number, plan.after)
        if plan.is_timed:
            self._clock.begin(plan.number)

    def end(self, plan: StepPlan) -> None:
        """Compute has been asked for, and its blocks may be copied."""
        self._clock.end()
        self._end_step()
        if plan.fence is not None and (fence := self._entered(*plan.fence)) is not None:
            fence.close()
        if plan.is_idle and self._worker is not None:
            self._worker.pause(timeout_s=IDLE_STEP_S)

    def step_times(self) -> dict[tuple[int, int], float]:
        """Seconds that steps have computed here, of those that have ended since the last call, by step and stage."""
        return {(step, self._stage): seconds for step, seconds in self._clock.take().items()}

    def samples(self) -> Samples:
        """What its client of hicached has counted since start; nothing with another L3."""
        status = getattr(self._l3, "status", None)  # of DaemonL3, which only those import that have one
        return {} if status is None else l3_samples_of(status(), rank=self._rank)

    def close(self, *, settle_timeout_s: float = 2.0) -> None:
        """Leave the replica, and give L2 and L3 back, when what is on its way to L3 is there or the time is over.
        Idempotent.
        """
        self._end_step()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.settle(timeout_s=settle_timeout_s)
            worker.close()

    def _entered(self, number: int, after: tuple[int, ...]) -> ExitStack | None:
        if self._worker is None:
            return None
        step = ExitStack()
        try:
            step.enter_context(self._worker.step(number, after=after))
        except RankLost as error:
            _LOG.error("goes on without hicache: %s; start the engine again to have it back", error)
            self.close(settle_timeout_s=0)
            return None
        return step

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.close()


def _open_worker(
    settings: VllmSettings,
    engine: EngineSpec,
    kv_cache_config: Any,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    leader: Ranks,
) -> RankWorker:
    spec = engine.spec
    l1 = L1Pool.adopt(spec, adoptable(engine, tensors, rank=rank, num_blocks=kv_cache_config.num_blocks), rank=rank)
    with ExitStack() as undo:
        counts = l2_slot_counts(spec, settings.l2_bytes, state_share=settings.l2_state_share)
        l2 = L2Pool(spec, counts, rank=rank, device=l1.device)
        undo.callback(l2.close)
        l3 = open_l3(
            settings.l3,
            spec=spec,
            memory=l2,
            token=settings.secret,
            deployment=settings.deployment,
            asks_first=True,
        )
        if l3 is not None:
            undo.callback(l3.close)
        worker = RankWorker(spec, rank=rank, leader=leader, l1=l1, l2=l2, l3=l3, waits=False)
        undo.pop_all()
    return worker
