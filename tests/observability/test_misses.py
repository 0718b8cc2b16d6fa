"""Whatever is missed has its reason in a metric, in the log and in the documentation."""

from __future__ import annotations

import ast
import json
import logging
import re
from contextlib import closing

import pytest

from hicache.daemon.call_tally import CallTally
from hicache.daemon.miss_watch import MissWatch
from hicache.misses import INTERVAL_S, OUTCOMES, REASONS, Miss, MissLog, misses_of
from hicache.outcome import Outcome
from hicache.samples import samples_of
from hicache.stats import DirectoryStats
from tests.core.small_engine import PAGE, SmallEngine, fill, prompt
from tests.observability.documented import ROOT, TEXT


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def reasons_in_the_code() -> set[str]:
    """Every text that is given as a reason anywhere in the core."""
    found: set[str] = set()
    for path in (ROOT / "hicache").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            found |= {text for text in reasons_of(node) if isinstance(text, str)}
    return found


def reasons_of(node: ast.AST) -> list[object]:
    match node:
        case ast.keyword(arg="reason", value=value):
            return constants(value)
        case ast.Assign(targets=[ast.Attribute(attr="cut_reason")], value=value):
            return constants(value)
        case ast.AnnAssign(target=ast.Name(id="cut_reason"), value=value) if value is not None:
            return constants(value)
        case ast.Call(func=ast.Attribute(attr="_drop"), args=[_, reason]):
            return constants(reason)
        case ast.Subscript(value=ast.Attribute(attr="skipped"), slice=key):
            return constants(key)
        case ast.FunctionDef(name="_reason_to_decline" | "reason_to_decline"):
            returns = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
            return [text for value in returns for text in constants(value)]
    return []


def constants(node: ast.AST) -> list[object]:
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]


def test_every_reason_in_the_code_has_a_meaning_and_no_meaning_is_dead() -> None:
    assert reasons_in_the_code() == set(REASONS) - OUTCOMES
    assert len(reasons_in_the_code()) > 15, "the search finds nothing any more"
    assert set(REASONS) >= OUTCOMES


def test_every_reason_is_documented_with_what_it_means() -> None:
    table = TEXT.split("\n## Reasons\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\*\*)?`([\w.]+)`(?:\*\*)? \|[^|]*\|[^|]*\| ([^|]*) \|$", table, flags=re.MULTILINE)
    assert {name: (text, bool(bold)) for bold, name, text in rows} == {
        name: (reason.text, reason.is_fault) for name, reason in REASONS.items()
    }


def stats_with(kind: str, reason: str) -> DirectoryStats:
    stats = DirectoryStats(object_bytes=(8,))
    match kind:
        case "dropped":
            stats.prefetch_dropped[reason] += 3
        case "declined":
            stats.prefetch_declined[reason] += 3
        case "skipped":
            stats.skipped[reason] += 3
        case _:
            stats.objects[f"{kind}.{reason}"] += 3
    return stats


CASES = [("dropped", reason) for reason in REASONS if "." not in reason]
DECLINED = ("no_l3", "nothing_to_gain", "below_threshold", "faster_computed", "unmeasured")
CASES += [("declined", reason) for reason in DECLINED]
CASES += [("skipped", reason) for reason in REASONS if "." in reason]
CASES += [("fetch", reason) for reason in sorted(OUTCOMES)]


@pytest.mark.parametrize(("kind", "reason"), CASES)
def test_every_reason_has_a_line_and_a_sample(kind: str, reason: str) -> None:
    stats = stats_with(kind, reason)
    [miss] = MissLog(clock=Clock()).news(misses_of(stats))
    assert (miss.kind, miss.reason, miss.count) == (kind, reason, 3)
    assert miss.meaning.text
    assert any(reason in sample for sample, value in samples_of(stats).items() if value == 3)


def test_a_reason_is_told_at_once_and_then_once_per_interval_with_what_came_meanwhile() -> None:
    clock = Clock()
    log = MissLog(clock=clock)
    key = ("fetch", "corrupt", "objects")
    assert log.news({key: 2}) == [Miss("fetch", "corrupt", 2, "objects")]
    assert log.news({key: 5}) == []
    clock.now_s += INTERVAL_S
    assert log.news({key: 9, ("load", "io_error", "objects"): 1}) == [
        Miss("fetch", "corrupt", 7, "objects"),
        Miss("load", "io_error", 1, "objects"),
    ]
    clock.now_s += INTERVAL_S
    assert log.news({key: 9}) == [], "nothing has happened"


def test_an_engine_says_why_it_computed_what_l3_had(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hicache.misses")
    with closing(SmallEngine(objects={})) as engine:
        assert engine.l3 is not None
        fill(engine, prompt(4))
        caplog.clear()
        engine.l3.fault = lambda operation, key: Outcome.CORRUPT if operation == "get" else None
        assert engine.serve(prompt(4)).tokens == 0
    told = {record.hicache["reason"]: record for record in caplog.records if hasattr(record, "hicache")}
    assert told["corrupt"].levelno == logging.WARNING
    kinds = {record.hicache["kind"] for record in caplog.records if hasattr(record, "hicache")}
    assert {"fetch", "dropped"} <= kinds
    dropped = [r.hicache for r in caplog.records if hasattr(r, "hicache") and r.hicache["kind"] == "dropped"]
    assert dropped == [{"kind": "dropped", "reason": "corrupt", "count": 4 * PAGE, "unit": "tokens"}]


def test_hicached_says_what_its_clients_did_not_get(capsys: pytest.CaptureFixture[str]) -> None:
    import structlog

    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    tally = CallTally()
    watch = MissWatch(tally.read, clock=Clock())
    with tally.call("Lookup"), tally.keys("Lookup", 3) as items:
        items.outcomes = [Outcome.OK, Outcome.ABSENT, Outcome.ABSENT]
    with tally.call("Get") as result, tally.keys("Get", 1) as items:
        result.name, items.outcomes = "RATE_LIMITED", [Outcome.CORRUPT]
    try:
        watch.look()
        watch.look()
    finally:
        structlog.reset_defaults()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["kind"], line["reason"], line["count"], line["unit"], line["level"]) for line in lines] == [
        ("Lookup", "absent", 2, "keys", "info"),
        ("Get", "corrupt", 1, "keys", "warning"),
        ("Get", "RATE_LIMITED", 1, "calls", "warning"),
    ]
    assert all(line["event"] == "miss" and line["meaning"] for line in lines)
