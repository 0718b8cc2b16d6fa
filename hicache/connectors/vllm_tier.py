"""hicached below vLLM's own CPU tier: a secondary tier of ``TieringOffloadingSpec``, for those who keep that tier.

    {"type": "HiCacheTier", "module_path": "hicache.connectors.vllm_tier", "l3": "unix:///run/hicached/hicached.sock"}

All methods run in vLLM's scheduler and wait for nothing but ``drain_jobs`` and ``shutdown``, which end by the deadlines
of what is under way. See docs/vllm_tier.md.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from hicache.client import ClientSettings, DaemonL3
from hicache.connect import DAEMON_SCHEMES
from hicache.connectors.checkpoint import DEPTHS
from hicache.connectors.row_store import Finished, RowSettings, RowStore
from hicache.connectors.vllm_facts import engine_facts, weights_folder
from hicache.connectors.vllm_identity import (
    EngineIdentity,
    check_hash_algorithm,
    engine_identity,
    numbers_media,
    weights_revision,
)
from hicache.errors import ConfigError
from hicache.groups import StateField, StateGroup
from hicache.keys import FieldValue, object_key
from hicache.spec import CacheSpec

_log = logging.getLogger(__name__)

TIER_FORMAT = 1
_SETTINGS = ("l3", "token_file", "weights", "weights_revision", "adapters_never_change", "enable_kv_events", "locality")
_ROW_KEY = b"hicache.vllm.row"

METRICS = {
    "vllm:hicache_tier_lookups": "Chunks that hicached was asked for, by what became of it",
    "vllm:hicache_tier_loads": "Chunks loaded from hicached, by outcome",
    "vllm:hicache_tier_stores": "Chunks stored in hicached, by outcome",
}


class CpuTierMemory:
    """vLLM's CPU tier as SharedMemory. Its file cannot be sealed against shrinking, so hicached never maps it: bytes
    pass through a buffer of the client, or a stream, and nobody but the client touches a row."""

    fd: int | None = None

    def __init__(self, view: memoryview) -> None:
        self.buffer = view.cast("B")  # rows of a two-dimensional view cannot be sliced
        self.size_bytes = self.buffer.nbytes

    def close(self) -> None:
        """Let go of the mapping, which vLLM unmaps afterwards."""
        self.buffer.release()


class HiCacheTier(SecondaryTierManager):
    """See the module. Settings: docs/vllm_tier.md; vLLM hands them over as keywords."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """Raises ConfigError for settings, hashes and weights under which the wrong bytes could be found."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        rows = {each.name: settings.pop(each.name) for each in fields(RowSettings) if each.name in settings}
        row_settings = RowSettings(**rows)
        address, token = _address(settings), _token(settings)
        vllm_config, kv_cache_config = _configs_of_caller()
        _check_engine(vllm_config, settings)
        identity = _identity(vllm_config, kv_cache_config, settings)
        spec = _row_spec(identity, offloading_spec)
        self._root = spec.namespace
        self._row_bytes = spec.object_bytes_max
        self.locality = Locality(settings.get("locality", "REMOTE" if address.startswith("tcp") else "LOCAL"))
        self._events: list[OffloadingEvent] | None = _event_list(offloading_spec, settings)
        self._memory = CpuTierMemory(primary_kv_view)
        l3 = _connected(address, spec, self._memory, token)
        self._rows = RowStore(
            l3, row_bytes=self._row_bytes, row_stride_bytes=self.block_size_bytes, settings=row_settings
        )
        self._jobs: dict[int, list[bytes]] = {}  # vLLM's keys, in the order of ours
        self._told: dict[tuple[str, str], int] = {}  # counts that vLLM has

    # -- what is there -----------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing to prefer: every chunk is offered."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """RETRY until hicached has answered, ``lookup_timeout_s`` at most; then the same until the request ends."""
        is_there = self._rows.find(self._name(key), owner=req_context.req_id)
        if is_there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """What this step asked for goes out as one batch."""
        self._rows.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Its answers and failures are forgotten."""
        self._rows.forget(req_context.req_id)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Rows that do not come in ``load_timeout_s`` are computed; those that came are kept."""
        keys = self._begin(job_metadata)
        self._rows.load(job_metadata.job_id, keys, job_metadata.chunk_ids, owner=job_metadata.req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Dropped at once where ``queued_stores_max`` wait."""
        self._rows.store(job_metadata.job_id, self._begin(job_metadata), job_metadata.chunk_ids)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that touch none of their chunks any more."""
        return [self._result(ended) for ended in self._rows.finished()]

    def drain_jobs(self) -> None:
        """vLLM calls this before it resets its caches, of which weights that change may be the reason.

        vLLM does not say so. Hence nothing that was stored before is found afterwards, and what is stored from now on
        is found by this engine alone, until it is started again.
        """
        self._rows.drain()
        self._root = blake2b(os.urandom(32), key=self._root, digest_size=32).digest()

    def shutdown(self) -> None:
        """Ends what is under way, and lets go of the CPU tier's memory."""
        self._rows.close()
        self._memory.close()

    # -- what is told ------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that hicached has acknowledged since the last call. What it evicts later is not told here."""
        events = self._events or []
        if self._events:
            self._events = []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Counters of this tier, beside those that vLLM keeps of every tier."""
        return {
            name: OffloadingCounterMetadata(documentation=text, labelnames=("outcome",))
            for name, text in METRICS.items()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call."""
        counts = self._rows.counts
        now: dict[str, Counter[str]] = dict(zip(METRICS, (counts.lookups, counts.loads, counts.stores), strict=True))
        grown: dict[str, dict[tuple[str, ...], int]] = {}
        for name, by_outcome in now.items():
            for outcome, count in by_outcome.items():
                if more := count - self._told.get((name, outcome), 0):
                    grown.setdefault(name, {})[outcome,] = more
                    self._told[name, outcome] = count
        if not grown:
            return None
        return OffloadingConnectorStats(data={"types": dict.fromkeys(grown, "counter"), "data": grown})

    # -- inside ------------------------------------------------------------------------------------------------------

    def _name(self, key: bytes) -> bytes:
        """The name of a row in L3: vLLM's key is a block hash and a group, and says nothing of the model."""
        return object_key(blake2b(key, key=self._root, digest_size=32, person=_ROW_KEY).digest(), group=0, shard=0)

    def _begin(self, job: TransferJob) -> list[bytes]:
        keys = self._jobs[job.job_id] = list(job.keys)
        return [self._name(key) for key in keys]

    def _result(self, ended: Finished) -> JobResult:
        keys = self._jobs.pop(ended.number)
        arrived = [key for key, outcome in zip(keys, ended.outcomes, strict=True) if outcome.is_ok]
        if self._events is not None and not ended.is_load and arrived:
            self._events.append(
                OffloadingEvent(keys=arrived, medium=self.medium, removed=False, locality=self.locality)
            )
        return JobResult(
            job_id=ended.number,
            success=ended.is_ok,
            successful_keys=arrived if ended.is_load and not ended.is_ok and arrived else None,
            transfer_time=ended.seconds,
            transfer_bytes=len(arrived) * self._row_bytes,
        )


def _connected(address: str, spec: CacheSpec, memory: CpuTierMemory, token: str) -> DaemonL3:
    """A client whose first attempt has ended, so that the first requests find what is there. Where hicached is away, it
    is used as soon as it is there. Raises ConfigError for a refusal that lasts."""
    client = DaemonL3(address, spec=spec, memory=memory, token=token)
    fault = client.wait_first_answer()
    if fault is not None and fault.is_lasting:
        client.close()
        memory.close()
        raise ConfigError(
            "secondary_tiers.l3", address, f"a hicached that serves this engine, which refused it: {fault}"
        )
    if fault is not None or not client.wait_ready(timeout_s=ClientSettings().connect_timeout_s):
        _log.warning("hicached at %s does not answer (%s): its chunks are misses until it does", address, fault)
    return client


def _configs_of_caller() -> tuple[Any, Any]:
    """The engine's VllmConfig and KVCacheConfig, which vLLM does not hand to a tier.

    A tier is made while ``OffloadingConnector.__init__(vllm_config, role, kv_cache_config)`` runs, so they are up the
    stack. Raises ConfigError where they are not: without them, two checkpoints would share.
    """
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        if "vllm_config" in names and "kv_cache_config" in names and names["kv_cache_config"] is not None:
            return names["vllm_config"], names["kv_cache_config"]
        frame = frame.f_back  # type: ignore[assignment]  # None at the end, which the loop is for
    raise ConfigError(
        "secondary_tiers",
        "HiCacheTier",
        "a vLLM whose OffloadingConnector makes its tiers while it is made, as 0.31 and 0.32 do; with this one, use "
        "kv_connector HiCacheConnector of hicache.connectors.vllm",
    )


def _check_engine(vllm_config: Any, settings: Mapping[str, Any]) -> None:
    check_hash_algorithm(vllm_config.cache_config.prefix_caching_hash_algo)
    if numbers_media(vllm_config):
        raise ConfigError(
            "mm_processor_cache_gb",
            0,
            "more than 0, or prefix caching: without both, vLLM numbers images from 1 on at each start, and a tier is "
            "not told which request has any",
        )
    if vllm_config.lora_config is not None and settings.get("adapters_never_change") is not True:
        raise ConfigError(
            "enable_lora",
            True,
            "no LoRA adapters, since a tier is not told which request uses one, nor what is in it; or "
            "adapters_never_change = true in the tier's settings, if no adapter is ever replaced under its name and "
            "path; or kv_connector HiCacheConnector, which knows adapters by content",
        )


def _address(settings: Mapping[str, Any]) -> str:
    for name in settings:
        if name not in _SETTINGS:
            known = sorted((*_SETTINGS, *(each.name for each in fields(RowSettings)), "backpressure"))
            raise ConfigError(f"secondary_tiers.{name}", settings[name], f"one of {', '.join(known)}")
    address = settings.get("l3")
    if not isinstance(address, str) or not address.startswith(tuple(f"{scheme}://" for scheme in DAEMON_SCHEMES)):
        raise ConfigError(
            "secondary_tiers.l3",
            address,
            "unix:///path/to/socket, tls://host:port?ca=FILE or tcp://host:port of a hicached; "
            "only a daemon ends every call at its deadline",
        )
    for name, allowed in (("locality", ("LOCAL", "REMOTE")), ("weights", DEPTHS)):
        if name in settings and settings[name] not in allowed:
            raise ConfigError(f"secondary_tiers.{name}", settings[name], f"one of {', '.join(allowed)}")
    return address


def _token(settings: Mapping[str, Any]) -> str:
    path = settings.get("token_file")
    if path is None:
        return ""
    try:
        return Path(path).read_text().strip()
    except (OSError, TypeError) as error:
        raise ConfigError("secondary_tiers.token_file", path, f"a file with the token ({error})") from error


def _identity(vllm_config: Any, kv_cache_config: Any, settings: Mapping[str, Any]) -> EngineIdentity:
    facts = engine_facts(vllm_config)
    download_dir = vllm_config.load_config.download_dir
    revision = weights_revision(
        vllm_config,
        facts,
        find_folder=lambda model: weights_folder(model, download_dir),
        depth=settings.get("weights", "sampled"),
        given=settings.get("weights_revision"),
    )
    return engine_identity(vllm_config, kv_cache_config, facts, revision=revision)


def _row_spec(identity: EngineIdentity, offloading_spec: Any) -> CacheSpec:
    """A row is one object: ``[worker][tensor][block of the chunk]``, whatever group it is of."""
    config = offloading_spec.config
    copies = 1 if offloading_spec.replicated_layout else config.parallel.world_size
    row_bytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk * copies
    layout: list[tuple[str, FieldValue]] = [
        ("tier.format", TIER_FORMAT),
        ("tier.blocks_per_chunk", config.cache.blocks_per_chunk),
        ("tier.tokens_per_hash", config.cache.tokens_per_hash),
        ("tier.tokens_per_block", ",".join(f"{each.group_id}:{each.tokens_per_block}" for each in config.groups)),
        ("tier.layers", ",".join(str(len(each.layer_names)) for each in config.groups)),
        ("tier.copies", copies),
        ("tier.is_replicated", bool(offloading_spec.replicated_layout)),
        ("tier.is_canonical", bool(config.canonical_layout)),
    ]
    return CacheSpec(
        model=identity.model,
        revision=identity.revision,
        groups=(StateGroup("cpu_row", layers=(0,), fields=(StateField("bytes", (row_bytes,), "uint8"),)),),
        page_tokens=config.cache.tokens_per_hash,
        identity=(*identity.fields, *layout),
    )


def _event_list(offloading_spec: Any, settings: Mapping[str, Any]) -> list[OffloadingEvent] | None:
    wanted = settings.get("enable_kv_events", False) and offloading_spec.kv_events_config.enable_kv_cache_events
    return [] if wanted else None
