"""The tables of a study, as Markdown, from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from bench.admission.study_cells import BELADY, BOUND, CEILING

Row: TypeAlias = Mapping[str, Any]
CAPACITIES = {
    "0.5 M": 1000,
    "3 M": 5859,
    "10 M": 20_000,
    "25 M": 50_000,
}  # pages of 512 tokens, as in the golden counts
OURS = "continuation+continuation"
SECOND_TOUCH = "lru+write_through_selective"
_LIMITS = (BELADY, CEILING, BOUND)


def summary(rows: Sequence[Row]) -> str:
    """One line for each trace and capacity: ours, the best other one, the bounds, and what is written."""
    lines = [
        "| trace, capacity | continuation | best other | LRU | second touch | Belady to bound | of Belady | regret "
        "| written |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (trace, pages), here in _groups(rows).items():
        saved = {policy: row["saved_share"] for policy, row in here.items()}
        ours = saved[OURS]
        others = {policy: share for policy, share in saved.items() if policy not in (OURS, *_LIMITS)}
        best = max(others, key=lambda policy: others[policy])
        low, high = limits(here)
        share = f"{ours / low:.2f}" if low else ""
        lines.append(
            f"| {trace}, {capacity_name(pages)} | {ours:.3f} | {others[best]:.3f} ({best}) | {saved['lru']:.3f} | "
            f"{_share(saved.get(SECOND_TOUCH))} | {_interval(low, high)} | {share} | {regret(here, OURS)} | "
            f"{_written(here, OURS)} |"
        )
    return "\n".join(lines)


def every_policy(rows: Sequence[Row]) -> str:
    """For each trace a table with a line for each policy: GPU time saved, regret, and what is written of what LRU
    writes, by capacity."""
    tables = []
    groups = _groups(rows)
    for trace in dict.fromkeys(trace for trace, _ in groups):
        here = {pages: group for (name, pages), group in groups.items() if name == trace}
        lines = [
            f"| {trace} | " + " | ".join(capacity_name(pages) for pages in here) + " |",
            "| --- |" + " --- |" * len(here),
        ]
        for policy in dict.fromkeys(policy for group in here.values() for policy in group):
            cells = [_cell(group, policy) for group in here.values()]
            lines.append(f"| {policy} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def filled_in(text: str, rows: Sequence[Row]) -> str:
    """A document with the tables of ``rows`` between its marks: ``<!-- summary -->`` and so on, to ``<!-- end -->``."""
    whole = [row for row in rows if not row["warm_share"]]
    halves = [row for row in rows if row["warm_share"]]
    for name, table in (("summary", summary(whole)), ("policies", every_policy(whole)), ("blind", summary(halves))):
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{mark}{table}\n{end}{after}" if end else text
    return text


def limits(here: Mapping[str, Row]) -> tuple[float | None, float]:
    """What Belady's rule saves, if that was run, and what nothing passes, of one trace and capacity."""
    low = here[BELADY]["saved_share"] if BELADY in here else None
    high = min(here[limit]["saved_share"] for limit in (CEILING, BOUND) if limit in here)
    return low, max(low or 0.0, high)


def regret(here: Mapping[str, Row], policy: str) -> str:
    """How far a policy is from Belady's rule, and from what nothing passes; empty where nothing can be saved."""
    low, high = limits(here)
    if not high:
        return ""
    saved = here[policy]["saved_share"]
    most = f"{100 * (1 - saved / high):.0f} %"
    if low is None:
        return f"at most {most}"
    least = f"{100 * (1 - saved / low):.0f}" if low else "0"
    return most if f"{least} %" == most else f"{least} to {most}"


def capacity_name(pages: int) -> str:
    """As in the tables."""
    return next((name for name, its in CAPACITIES.items() if its == pages), f"{pages} pages")


def _groups(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    groups: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["trace"], row["pages"]), {})[row["policy"]] = row
    return groups


def _cell(here: Mapping[str, Row], policy: str) -> str:
    if policy not in here:
        return ""
    saved = f"{here[policy]['saved_share']:.3f}"
    if policy in _LIMITS:
        return saved
    return ", ".join(part for part in (saved, regret(here, policy), _written(here, policy)) if part)


def _interval(low: float | None, high: float) -> str:
    if low is None:
        return f"at most {high:.3f}"
    return f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _written(here: Mapping[str, Row], policy: str) -> str:
    return f"{here[policy]['written_pages'] / max(1, here['lru']['written_pages']):.0%}".replace("%", " %")
