"""Families of metrics for prometheus_client, from numbers by the values of their labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from hicache.histogram import Histogram

Names = TypeVar("Names", str, tuple[str, ...], tuple[str, str])  # of one label, or of several


def counter(name: str, text: str, labels: Iterable[str], values: Mapping[Names, float]) -> Metric:
    """``name`` without ``_total``."""
    family = CounterMetricFamily(name, text, labels=tuple(labels))
    for names, value in values.items():
        family.add_metric(_tuple(names), value)
    return family


def gauge(name: str, text: str, labels: Iterable[str], values: Mapping[Names, float]) -> Metric:
    """What goes up and down."""
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    for names, value in values.items():
        family.add_metric(_tuple(names), value)
    return family


def histogram(name: str, text: str, labels: Iterable[str], histograms: Mapping[Names, Histogram]) -> Metric:
    """Durations, by bucket."""
    family = HistogramMetricFamily(name, text, labels=tuple(labels))
    for names, of_names in histograms.items():
        family.add_metric(_tuple(names), buckets=of_names.cumulative(), sum_value=of_names.sum)
    return family


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
