"""The vLLM connector: ``--kv-transfer-config`` with ``kv_connector_module_path`` "hicache.connectors.vllm".

Hands vLLM's calls on to ``SchedulerSide`` in the scheduler and ``WorkerSide`` in each worker. See docs/vllm.md.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hicache.client import DaemonL3
from hicache.connect import DAEMON_SCHEMES
from hicache.connectors.adapters import AdapterIdentities
from hicache.connectors.vllm_events import EventGroup, L3Removals, StoreEvents
from hicache.connectors.vllm_facts import engine_facts, weights_folder
from hicache.connectors.vllm_identity import (
    EngineIdentity,
    check_hash_algorithm,
    check_version,
    embedded_positions,
    engine_identity,
    has_media_by_name,
    numbers_media,
    weights_revision,
)
from hicache.connectors.vllm_messages import HiCacheHandshake, HiCacheMetadata, HiCacheStepTimes
from hicache.connectors.vllm_metrics import HiCachePromMetrics, HiCacheStats
from hicache.connectors.vllm_pages import Geometry
from hicache.connectors.vllm_scheduler import Identity, SchedulerSide, StepPlan
from hicache.connectors.vllm_settings import VllmSettings
from hicache.connectors.vllm_spec import EngineSpec
from hicache.connectors.vllm_worker import Place, WorkerSide
from hicache.errors import ConfigError
from hicache.samples import Increments
from hicache.slot_cache import SlotCache

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class HiCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """L2 and L3 for an engine as released. A cache: what fails is computed, and nothing has to be delivered."""

    _cache_hit_source = CacheHitSource.HOST

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that was dropped is a later miss."""
        return False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError, with the fix, for what would be wrong or slow without anybody seeing why."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = VllmSettings.of(self._kv_transfer_config.kv_connector_extra_config)
        _check_config(vllm_config)
        self._leader = self._settings.ranks_at(_meeting_point(vllm_config))
        self._page_tokens, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._adapters = AdapterIdentities() if role is KVConnectorRole.SCHEDULER else None
        self._own_name = uuid.uuid4().hex  # of this start of this engine
        self._increments = Increments()
        self._scheduler: SchedulerSide | None = None
        self._events: StoreEvents | None = None
        self._watching = ExitStack()  # what hicached removes
        self._worker: WorkerSide | None = None

    # -- in every worker ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take L2 and connect to L3; the scheduler's half is waited for in the background."""
        if self._worker is not None:
            raise ConfigError("register_kv_caches", "again", "one KV cache for the life of the engine")
        tp_size = self._vllm_config.parallel_config.tensor_parallel_size
        self._worker = WorkerSide(
            self._settings,
            self._kv_cache_config,
            kv_caches,
            Place(get_pp_group().rank_in_group * tp_size + get_tp_group().rank_in_group, tp_size, self._page_tokens),
            leader=self._leader,
            identity=self._identity,
            gather=_gather,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this rank's cache is."""
        return None if self._worker is None else HiCacheHandshake(self._worker.engine)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before each step computes, whatever vLLM calls it: blocks of it may still be read."""
        if self._worker is not None:
            self._worker.begin(_plan(kv_connector_metadata))

    def wait_for_save(self) -> None:
        """Called after each step was given to compute."""
        if self._worker is not None:
            self._worker.end(_plan(self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What the scheduler's half knows of loads, said by every worker alike: vLLM counts them."""
        plan = _plan(self._get_connector_metadata())
        return KVConnectorTransferResults(finished_recving=set(plan.received), failed_recving=set(plan.failed))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the steps that have ended took to compute."""
        seconds = {} if self._worker is None else self._worker.step_times()
        return HiCacheStepTimes(seconds) if seconds else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads have their place between steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM computes on blocks when all of them are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: blocks are saved when they are complete in all layers."""

    # -- in the scheduler --------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have registered: lead them. Raises ConfigError where they do not come, or differ."""
        engines = [each.engine for _, each in sorted(metadata.items()) if isinstance(each, HiCacheHandshake)]
        if not engines or any(each != engines[0] for each in engines):
            raise ConfigError("workers", sorted(metadata), "ranks that agree on the cache of the engine")
        engine, settings = engines[0], self._settings
        cache = SlotCache.lead(
            engine.spec,
            ranks=self._leader,
            prefetch=settings.prefetch,
            write_policy=settings.write_policy,
            eviction=settings.eviction,
            read_policy=settings.read_policy,
            one_numbering=True,
            tells_changes=self._tells_events,
        )
        if self._tells_events:
            self._events = self._follow(cache, engine)
        self._scheduler = SchedulerSide(
            cache,
            Geometry(engine.groups, page_tokens=self._page_tokens, hash_tokens=self._hash_tokens),
            identity_of=self._identity_of,
            loads=self._kv_transfer_config.is_kv_consumer,
            saves=self._kv_transfer_config.is_kv_producer,
            zeroes_early=bool(getattr(self._vllm_config, "use_v2_model_runner", False)),
            events=self._events,
            stages=self._vllm_config.parallel_config.pipeline_parallel_size,
        )

    def on_new_request(self, request: Request) -> None:
        """Ask L3 for it while it waits."""
        self._side.opened(request, self._computed_here(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Always loaded between steps: a load within one would come after vLLM has copied the state."""
        tokens = self._side.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The load itself begins with ``build_connector_meta``."""
        self._side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last call: in the scheduler, or by a worker's client of hicached."""
        side = self._scheduler or self._worker
        samples = self._increments.take(side.samples()) if side is not None else {}
        return HiCacheStats.of(samples) if samples else None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What came into L2 and L3 since the last call, and what went; nothing where vLLM publishes no events."""
        return self._events.take() if self._events is not None else ()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """What ``get_kv_connector_stats`` has given, in the process that logs."""
        return HiCacheStats(data=data) if data is not None else HiCacheStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """The counters under ``vllm:hicache_``."""
        return HiCachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Once for each step."""
        state = scheduler_output.kv_connector_block_state
        plan = self._side.plan(
            scheduler_output.num_scheduled_tokens,
            state.get_block_ids if state is not None else lambda request_id: None,
            state.boundary_state_offloads if state is not None else {},
            _new_blocks(scheduler_output),
        )
        return HiCacheMetadata(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What workers have timed."""
        times = connector_output.kv_connector_worker_meta
        if isinstance(times, HiCacheStepTimes):
            self._side.prefill_times.computed(times.seconds)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may go at once: whoever gets them waits until they have been copied."""
        self._side.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        """What was saved before is not found again by this engine. False: blocks are still read or written, and their
        memory must stay."""
        return self._side.reset()

    # -- both --------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free everything: threads, sockets, shared memory. Idempotent."""
        if self._worker is not None:
            self._worker.close()
        self._watching.close()
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.close()
        if self._adapters is not None:
            self._adapters.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise ConfigError("workers", None, "workers that have registered their KV caches before the first request")
        return self._scheduler

    @property
    def _tells_events(self) -> bool:
        config = self._vllm_config.kv_events_config
        return config is not None and bool(config.enable_kv_cache_events)

    def _follow(self, cache: SlotCache, engine: EngineSpec) -> StoreEvents:
        """The events of a cache; where L3 is hicached, also of what it removes."""
        address = self._settings.l3 or ""
        events = StoreEvents(
            _event_groups(self._kv_cache_config, engine),
            page_tokens=self._page_tokens,
            take_changes=cache.take_changes,
            locality="REMOTE" if address.startswith(("tcp://", "tls://")) else "LOCAL",
        )
        if address.startswith(tuple(f"{scheme}://" for scheme in DAEMON_SCHEMES)):
            client = DaemonL3(address, spec=engine.spec, memory=None, token=self._settings.secret)
            self._watching.callback(client.close)
            self._watching.callback(L3Removals(client.watch(), events).close)
        return events

    def _computed_here(self, request: Request) -> int:
        """Tokens of a request in vLLM's own prefix cache, on the scheduler's blocks."""
        manager, found = self._kv_cache_manager, int(request.num_computed_tokens)
        if manager is not None and not found:
            found = int(manager.get_computed_blocks(request)[1])
        return found - found % int(self._page_tokens)

    def _identity(self) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
        config, settings = self._vllm_config, self._settings
        facts = engine_facts(config)
        revision = weights_revision(
            config,
            facts,
            find_folder=lambda model: weights_folder(model, config.load_config.download_dir),
            depth=settings.weights,
            given=settings.weights_revision,
        )
        identity: EngineIdentity = engine_identity(config, self._kv_cache_config, facts, revision=revision)
        return identity.model, identity.revision, identity.fields

    def _identity_of(self, request: Request) -> Identity | None:
        """None where a salt is required and missing, and for adapters of unknown content."""
        if not request.cache_salt and self._settings.tenant_salt_required:
            return None
        extras: dict[str, Any] = {}
        is_doubted = not self._settings.media_ids_trusted and has_media_by_name(request)
        if is_doubted or (request.mm_features and numbers_media(self._vllm_config)):
            extras["names_of"] = self._own_name
        if (positions := embedded_positions(request)) is not None:
            extras["embedded_positions"] = positions
        if request.lora_request is not None:
            assert self._adapters is not None
            content = self._adapters.identity(request.lora_request)
            if content is None:
                return None
            extras["lora"] = content
        return Identity(request.cache_salt.encode() if request.cache_salt else None, extras)


def _event_groups(config: KVCacheConfig, engine: EngineSpec) -> list[EventGroup]:
    found = []
    for index, group in enumerate(config.kv_cache_groups):
        mask = sum(1 << number for number, each in enumerate(engine.groups) if each.group == index)
        if mask:
            kind = get_kv_cache_spec_kind(group.kv_cache_spec).value
            found.append(EventGroup(index, mask, kind, get_kv_cache_spec_sliding_window(group.kv_cache_spec)))
    return found


def _plan(metadata: KVConnectorMetadata) -> StepPlan:
    assert isinstance(metadata, HiCacheMetadata)
    return metadata.plan


def _new_blocks(scheduler_output: SchedulerOutput) -> Iterable[int]:
    """Every block that the step may be the first to write to."""
    tables: list[Sequence[Sequence[int]]] = [each.block_ids for each in scheduler_output.scheduled_new_reqs]
    tables += [each for each in scheduler_output.scheduled_cached_reqs.new_block_ids if each is not None]
    found = {block for table in tables for blocks in table for block in blocks}
    found.update(scheduler_output.new_block_ids_to_zero or ())
    return found


def _check_config(config: VllmConfig) -> None:
    check_version(vllm.__version__)
    check_hash_algorithm(config.cache_config.prefix_caching_hash_algo)
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "kv_load_failure_policy",
            transfer.kv_load_failure_policy,
            '"recompute" in --kv-transfer-config: with "fail", a page that cannot be loaded ends its request',
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(name, getattr(parallel, name), "1: context parallelism is not supported")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError("distributed_executor_backend", "external_launcher", "mp or ray, which have one scheduler")


def _meeting_point(config: VllmConfig) -> str:
    """Where scheduler and workers of this start of this engine meet, unless ``ranks`` says where."""
    parallel = config.parallel_config
    names = (config.kv_transfer_config.engine_id, config.instance_id, str(parallel.data_parallel_rank))
    digest = blake2b("\0".join(map(str, names)).encode(), digest_size=16).hexdigest()
    return f"unix://{tempfile.gettempdir()}/hicache-{digest}.sock"


def _gather(own: Any) -> list[Any]:
    """What every rank of the engine has said, in the order of ranks."""
    stage = [own]
    for group in (get_tp_group(), get_pp_group()):
        said: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(said, stage, group=group.cpu_group)
        stage = [each for part in said for each in part]
    return stage
