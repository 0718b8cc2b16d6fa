"""The dashboard and the alert rules speak of metrics and labels that there are, and the rules do what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from hicache.metrics import EngineCollector
from tests.core.small_engine import HYBRID, SmallEngine, prompt
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import ALICE, http_get, wait_until
from tests.observability.conservation import read_scrape
from tests.observability.documented import ROOT, documented_metrics

MONITORING = ROOT / "monitoring"
METRICS = documented_metrics("hicached") | documented_metrics("Engines")
FROM_PROMETHEUS = {"instance", "job", "le"}  # labels that it adds, and the buckets of histograms
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Prometheus) is not installed")


def alerts() -> dict[str, str]:
    """The text of each rule by the name of its alert."""
    text = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    return {rule.split("\n", 1)[0].strip(): rule for rule in text.split("- alert:")[1:]}


def expression_of(rule: str) -> str:
    [found] = re.findall(r"^        expr: (.*?)^        for:", rule, flags=re.DOTALL | re.MULTILINE)
    return str(found)


def dashboard() -> list[str]:
    """Every query of the dashboard."""
    board = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


QUERIES = {name: expression_of(rule) for name, rule in alerts().items()} | {query: query for query in dashboard()}


def base_of(name: str) -> str:
    """The metric behind a series of a histogram."""
    shortened = re.sub(r"_(bucket|count|sum)$", "", name)
    return shortened if shortened in METRICS else name


def check_query(query: str) -> None:
    """Fails where it names what does not exist."""
    names = re.findall(r"\b(hicache_\w+)", query)
    assert names or 'up{job="hicached"}' in query
    assert {base_of(name) for name in names} <= set(METRICS), query
    for name, selectors in re.findall(r"\b(hicache_\w+)\{([^}]*)\}", query):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors))
        assert labels <= {*METRICS[base_of(name)], *FROM_PROMETHEUS}, f"{name}: {labels}"
    known = {label for name in names for label in METRICS[base_of(name)]} | FROM_PROMETHEUS
    for grouping in re.findall(r"\b(?:by|ignoring|on|without) \(?\(([^)]*)\)", query):
        assert {label.strip() for label in grouping.split(",")} <= known, query


@pytest.mark.parametrize("query", QUERIES.values(), ids=[name[:60] for name in QUERIES])
def test_every_query_is_of_metrics_and_labels_that_exist(query: str) -> None:
    check_query(query)


@pytest.mark.parametrize(
    "query",
    [
        "rate(hicache_store_gone_total[5m])",
        'hicache_ready{tenant="x"}',
        "sum by (colour) (hicache_ready)",
        "hicache_call_seconds_total",
    ],
)
def test_a_query_of_something_else_is_found(query: str) -> None:
    with pytest.raises(AssertionError):
        check_query(query)


@pytest.mark.parametrize("name", alerts())
def test_every_alert_waits_says_what_it_is_about_and_where_to_read_on(name: str) -> None:
    rule = alerts()[name]
    assert re.search(r"^        for: \d+[mh]$", rule, flags=re.MULTILINE)
    assert re.search(r"labels: \{severity: (critical|warning|info)\}", rule)
    assert re.search(r'summary: ".{20,}"', rule)
    assert re.search(r'description: ".{20,}"', rule)
    assert f'runbook_url: "docs/operations.md#alert-{name.lower()}"' in rule


def test_every_alert_has_its_place_in_the_runbook() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    assert {f"alert-{name.lower()}" for name in alerts()} <= headings


def test_every_alert_is_tested_both_ways() -> None:
    tests = (MONITORING / "alerts_test.yml").read_text(encoding="utf-8")
    for name in alerts():
        assert f"name: {name} fires" in tests
        assert f"name: {name} is silent" in tests


@needs_promtool
def test_promtool_takes_the_rules_and_their_tests_pass() -> None:
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=MONITORING, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert all(panel["title"] for panel in board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells


def scrapes_of_a_busy_hour(daemon: ThreadedDaemon) -> list[dict[str, str]]:
    """By job, a minute apart: one engine stores prompts, and another one finds them in hicached."""
    address = f"unix://{daemon.config.socket}"
    with (
        closing(SmallEngine(HYBRID, address=address, token=ALICE)) as writer,
        closing(SmallEngine(HYBRID, address=address, token=ALICE)) as reader,
    ):
        for engine in (writer, reader):
            wait_until(lambda one=engine: not one.cache.l3.status().is_degraded, what="it is connected")  # type: ignore
        registry = CollectorRegistry()
        registry.register(EngineCollector(reader.cache))  # type: ignore[arg-type]  # as in test_engine_metrics
        scrapes = []
        for seeds in ((0, 1), (2, 3), (4, 5)):
            for seed in seeds:
                writer.serve(prompt(5, seed=seed))
                writer.settle()
                reader.serve(prompt(5, seed=seed))
            reader.settle()
            _, text = http_get(daemon.ready.http, "/metrics")
            scrapes.append({"hicached": text, "engine": generate_latest(registry).decode()})
    return scrapes


def as_series(scrapes: list[dict[str, str]]) -> list[dict[str, str]]:
    """As the tests of promtool have them."""
    values: dict[str, list[str]] = {}
    for number, scrape in enumerate(scrapes):
        for job, text in scrape.items():
            for name, samples in read_scrape(text).items():
                for labels, value in samples.items():
                    named = ", ".join(f'{label}="{text}"' for label, text in (*labels, ("job", job), ("instance", job)))
                    values.setdefault(f"{name}{{{named}}}", ["_"] * len(scrapes))[number] = repr(value)
    return [{"series": name, "values": " ".join(numbers)} for name, numbers in values.items()]


ONLY_WHEN_SOMETHING_IS_WRONG = ("outcome!~", "result!~", "session_refusals")
ONLY_WITH_TLS = ("certificate_expiration",)


@needs_promtool
def test_every_panel_has_numbers_in_real_scrapes(
    start_thread: Callable[..., ThreadedDaemon], two_tenants: str, tmp_path: Path
) -> None:
    scrapes = scrapes_of_a_busy_hour(start_thread(tenants_file=two_tenants))
    for text in scrapes[-1].values():
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    queries = [query.replace("$__rate_interval", "2m").replace("$instance", ".*") for query in dashboard()]
    nothing = [{"expr": query, "eval_time": "2m", "exp_samples": []} for query in queries]  # else it is told
    test = {"interval": "1m", "input_series": as_series(scrapes), "promql_expr_test": nothing}
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": [], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    told = done.stdout + done.stderr
    silent = [query for query in queries if f"expr: {json.dumps(query)}" not in told]
    assert [
        query for query in silent if not any(part in query for part in ONLY_WHEN_SOMETHING_IS_WRONG + ONLY_WITH_TLS)
    ] == []
