"""The store's counters in vLLM's own form: its log line and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hicache.samples import METRICS, Samples, add

PREFIX = "vllm:hicache_"


class HiCacheStats(KVConnectorStats):
    """Samples on their way to the process that logs: ``data`` is ``{"samples": [[..., value]]}``."""

    @classmethod
    def of(cls, samples: Samples) -> HiCacheStats:
        """To be returned by ``get_kv_connector_stats``; of increments, since vLLM adds up what it is given."""
        return cls(data={"samples": [[*sample, value] for sample, value in samples.items()]})

    @property
    def samples(self) -> Samples:
        """As they were given."""
        return samples_of_data(self.data)

    def reset(self) -> None:
        """See KVConnectorStats."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Counters add up, gauges are those of ``other``."""
        samples = self.samples
        add(samples, samples_of_data(other.data))
        self.data = self.of(samples).data
        return self

    def reduce(self) -> dict[str, int | float]:
        """One value for each sample, under a name such as ``tokens.l3``."""
        return {".".join(sample): value for sample, value in self.samples.items() if value}

    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return not self.data.get("samples")


def samples_of_data(data: Mapping[str, Any]) -> Samples:
    """Of the payload that vLLM carries between its processes."""
    return {tuple(map(str, each[:-1])): float(each[-1]) for each in data.get("samples", ())}


class HiCachePromMetrics(KVConnectorPromMetrics):
    """Registers ``METRICS`` under ``vllm:hicache_``, for each engine of the server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            metric.name: (
                metric,
                (self._gauge_cls if metric.is_gauge else self._counter_cls)(
                    name=PREFIX + metric.name,
                    documentation=metric.help,
                    labelnames=[*labelnames, *metric.labels],
                ),
            )
            for metric in METRICS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what came since the last time."""
        for sample, value in samples_of_data(transfer_stats_data).items():
            metric, family = self._metrics[sample[0]]
            child = family.labels(*self.per_engine_labelvalues[engine_idx], *sample[1:])
            if metric.is_gauge:
                child.set(value)
            elif value > 0:
                child.inc(value)
