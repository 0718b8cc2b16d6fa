"""What must add up in every scrape of hicached, by reading nothing but the scrape."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

Scrape = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]


def read_scrape(text: str) -> Scrape:
    """Samples by name, and then by their labels in order."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def total(scrape: Scrape, name: str, **labels: str) -> float:
    """The sum over all labels that are not given."""
    wanted = set(labels.items())
    return sum(value for names, value in scrape.get(name, {}).items() if wanted <= set(names))


def values_of(scrape: Scrape, name: str, label: str) -> set[str]:
    return {dict(names)[label] for names in scrape.get(name, {})}


def check_daemon(scrape: Scrape) -> None:
    """Fails where something is not conserved."""
    for method in values_of(scrape, "hicache_calls_active", "method"):
        started = total(scrape, "hicache_calls_started_total", method=method)
        finished = total(scrape, "hicache_calls_total", method=method)
        assert started == finished + total(scrape, "hicache_calls_active", method=method), f"calls of {method}"
        if method not in ("Session", "Watch"):
            assert total(scrape, "hicache_call_seconds_count", method=method) == finished, f"times of {method}"
        asked = total(scrape, "hicache_items_started_total", method=method)
        handled = total(scrape, "hicache_items_total", method=method)
        assert asked == handled + total(scrape, "hicache_items_active", method=method), f"keys of {method}"
    for operation in values_of(scrape, "hicache_store_asked_objects_total", "operation"):
        asked = total(scrape, "hicache_store_asked_objects_total", operation=operation)
        done = total(scrape, "hicache_store_finished_objects_total", operation=operation)
        assert asked == done + total(scrape, "hicache_store_open_objects", operation=operation), operation
    for unit, resident in (("objects", "hicache_store_objects"), ("bytes", "hicache_store_payload_bytes")):
        came = total(scrape, f"hicache_store_recovered_{unit}") + total(scrape, f"hicache_store_added_{unit}_total")
        went = total(scrape, f"hicache_store_removed_{unit}_total") + total(scrape, f"hicache_store_leaving_{unit}")
        assert came == went + total(scrape, resident), f"{unit} in the store"
    opened, closed = total(scrape, "hicache_sessions_opened_total"), total(scrape, "hicache_sessions_closed_total")
    assert opened == closed + total(scrape, "hicache_sessions"), "sessions"
    window = {kind: total(scrape, "hicache_window_keys", kind=kind) for kind in ("asked", "found", "new")}
    assert window["found"] + window["new"] <= window["asked"], "a store cannot find more than one that forgets nothing"


def check_engine(scrape: Scrape) -> None:
    """The same of an engine."""
    requested = total(scrape, "hicache_engine_requested_tokens_total")
    by_source = {
        source: total(scrape, "hicache_engine_tokens_total", source=source) for source in ("l1", "l2", "l3", "computed")
    }
    assert requested == sum(by_source.values()) == total(scrape, "hicache_engine_tokens_total"), by_source
    found = total(scrape, "hicache_engine_prefetch_found_tokens_total")
    ended = total(scrape, "hicache_engine_prefetch_tokens_total")
    assert found == ended + total(scrape, "hicache_engine_prefetch_in_flight_tokens"), "tokens found in L3"
    for leg in values_of(scrape, "hicache_engine_open_objects", "leg"):
        begun = total(scrape, "hicache_engine_begun_objects_total", leg=leg)
        ended = total(scrape, "hicache_engine_object_seconds_count", leg=leg)
        assert begun == ended + total(scrape, "hicache_engine_open_objects", leg=leg), f"objects of {leg}"
        if leg != "arrive":  # which moves nothing
            outcomes = total(scrape, "hicache_engine_objects_total", leg=leg)
            if leg == "lookup":  # those that confirm what L3 was known to have
                outcomes += total(scrape, "hicache_engine_objects_total", leg="confirm")
            assert outcomes == ended, f"outcomes of {leg}"


def check_no_counter_fell(before: Scrape, after: Scrape) -> None:
    """Counters never go down, and none goes away."""
    for name, samples in before.items():
        if name.endswith(("_total", "_count", "_bucket", "_sum")):
            for labels, value in samples.items():
                assert after[name][labels] >= value, f"{name}{dict(labels)} fell from {value} to {after[name][labels]}"


def check_every_scrape_of(
    lives: Sequence[Callable[[], object]], *, look: Callable[[], Scrape], check: Callable[[Scrape], None]
) -> None:
    """Live these lives, each in a thread; meanwhile two scrapers look, and every scrape adds up and loses nothing."""
    over = threading.Event()
    failed: list[BaseException] = []

    def scrape_on() -> None:
        try:
            before = look()
            while not over.is_set():
                now = look()
                check(now)
                check_no_counter_fell(before, now)
                before = now
        except BaseException as error:
            failed.append(error)

    living = [threading.Thread(target=life) for life in lives]
    scrapers = [threading.Thread(target=scrape_on) for _ in range(2)]
    for thread in (*living, *scrapers):
        thread.start()
    for thread in living:
        thread.join()
    over.set()
    for thread in scrapers:
        thread.join()
    assert not failed, failed
