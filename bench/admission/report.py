"""The report of a run: one HTML page and its plots as PNG files, all drawn from the JSON that the run has written.

With matplotlib, of the extra ``bench``. A plot whose figures the JSON does not have is left out, and the page says so.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hicache.errors import ConfigError

Document = dict[str, Any]
_STYLE = """body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}img{width:100%}
table{border-collapse:collapse;font-size:14px}td,th{border-bottom:1px solid #ddd;padding:.2em .6em;text-align:right}
td:first-child,th:first-child{text-align:left}figure{margin:2em 0}figcaption{color:#555}"""


class Plot(NamedTuple):
    """One picture, and what to read from it."""

    name: str
    title: str
    caption: str
    draw: Callable[[Document, str, Any], bool]  # of one trace into axes; False where it has no figures


def write_report(source: str | Path | Document, folder: str | Path) -> Path:
    """Draw all plots of a run, or of its JSON file, into ``folder``, which is made; returns the path of the page.

    Raises ConfigError where the file is not the JSON of a run.
    """
    document = source if isinstance(source, dict) else _read(Path(source))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    drawn = [(plot, _save(plot, document, target / f"{plot.name}.png")) for plot in PLOTS]
    page = target / "index.html"
    page.write_text(_page(document, drawn), encoding="utf-8")
    return page


def _read(path: Path) -> Document:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "report", str(path), f"a readable JSON file of python -m bench.admission ({error})"
        ) from error
    if not isinstance(document, dict) or not all(isinstance(document.get(key), list) for key in ("traces", "runs")):
        raise ConfigError("report", str(path), "the JSON of python -m bench.admission, with traces and runs")
    return document


def _save(plot: Plot, document: Document, path: Path) -> bool:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    traces = [trace["name"] for trace in document["traces"]]
    figure = Figure(figsize=(11, 4.2 * max(1, len(traces))), layout="constrained")
    FigureCanvasAgg(figure)
    has_figures = False
    for place, trace in enumerate(traces, start=1):
        axes = figure.add_subplot(len(traces), 1, place)
        axes.set_title(trace, loc="left")
        axes.grid(alpha=0.3)
        if plot.draw(document, trace, axes):
            has_figures = True
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        else:
            axes.text(0.5, 0.5, "no figures", ha="center", transform=axes.transAxes)
    if has_figures:
        figure.savefig(path, dpi=110)
    return has_figures


# -- plots -------------------------------------------------------------------------------------------------------------


def policy_name(run: Document) -> str:
    """How a run is labelled: eviction, and what is written unless that is everything."""
    write, read = run.get("write", "write_through"), run.get("read", "always")
    name = str(run["eviction"])
    if write not in ("write_through", name):
        name += f" + {write}"
    return name if read in ("always", None) else f"{name} + read {read}"


def saved_share(run: Document) -> float:
    """GPU time saved, of what all prompts cost in full."""
    return float(run["gpu_s_saved"] / run["gpu_s_total"]) if run["gpu_s_total"] else 0.0


def written_bytes(run: Document) -> float:
    """Into all tiers."""
    return float(sum(tier["bytes_written"] for tier in run["tiers"]))


def _by_policy(document: Document, trace: str) -> Iterator[tuple[str, list[Document]]]:
    """Runs of one trace with a capacity, by policy, from the smallest capacity on."""
    runs: dict[str, list[Document]] = {}
    for run in document["runs"]:
        if run["trace"] == trace and run.get("capacity_tokens"):
            runs.setdefault(policy_name(run), []).append(run)
    for name in sorted(runs):
        yield name, sorted(runs[name], key=lambda run: int(run["capacity_tokens"]))


def _bounds(document: Document, trace: str) -> list[Document]:
    bounds = (bound for bound in document.get("bounds") or () if bound["trace"] == trace)
    return sorted(bounds, key=lambda bound: int(bound["capacity_tokens"]))


def _hits(document: Document, trace: str, axes: Any) -> bool:
    runs = list(_by_policy(document, trace))
    for name, of in runs:
        axes.plot(
            [run["capacity_tokens"] for run in of],
            [run["usable_tokens"] / run["input_tokens"] for run in of],
            marker="o", markersize=3, label=name,
        )  # fmt: skip
    bounds = _bounds(document, trace)
    if bounds:
        capacities = [bound["capacity_tokens"] for bound in bounds]
        axes.plot(capacities, [bound["belady"]["token_share"] for bound in bounds], "k--", label="Belady")
        axes.axhline(bounds[0]["ceiling"]["token_share"], color="k", linestyle=":", label="infinite cache")
    axes.set(xscale="log", xlabel="capacity, tokens", ylabel="usable share of prompt tokens")
    return bool(runs)


def _pareto(document: Document, trace: str, axes: Any) -> bool:
    runs = list(_by_policy(document, trace))
    for name, of in runs:
        axes.plot(
            [written_bytes(run) / 1e12 for run in of], [saved_share(run) for run in of],
            marker="o", markersize=4, linewidth=0.6, label=name,
        )  # fmt: skip
    bounds = _bounds(document, trace)
    pages = {(run["capacity_pages"], tier["bytes_written"] / max(1, tier["pages_written"]))
             for _, of in runs for run in of for tier in run["tiers"] if tier["pages_written"]}  # fmt: skip
    page_bytes = max((size for _, size in pages), default=0.0)
    if bounds and page_bytes:
        axes.plot(
            [bound["belady"]["written_blocks"] * page_bytes / 1e12 for bound in bounds],
            [bound["belady"]["saved_share"] for bound in bounds], "k*", label="Belady",
        )  # fmt: skip
    axes.set(xlabel="written, TB", ylabel="share of prefill GPU time saved")
    return bool(runs)


def regrets(document: Document, trace: str) -> dict[str, list[tuple[int, float, float]]]:
    """By policy: capacity in tokens, and what it falls short of Belady and of the upper bound, in shares of those."""
    bounds = {bound["capacity_pages"]: bound for bound in _bounds(document, trace)}
    found: dict[str, list[tuple[int, float, float]]] = {}
    for name, runs in _by_policy(document, trace):
        for run in runs:
            bound = bounds.get(run["capacity_pages"])
            if bound is not None and bound["belady"]["saved_share"]:
                low = bound["belady"]["saved_share"]
                above: Document = bound.get("upper") or bound["ceiling"]
                high = max(low, above["saved_share"])
                saved = saved_share(run)
                found.setdefault(name, []).append((run["capacity_tokens"], 1 - saved / low, 1 - saved / high))
    return found


def _regret(document: Document, trace: str, axes: Any) -> bool:
    found = regrets(document, trace)
    for name, points in found.items():
        capacities = [point[0] for point in points]
        (line,) = axes.plot(capacities, [point[2] for point in points], marker="o", markersize=3, label=name)
        axes.fill_between(
            capacities,
            [point[1] for point in points],
            [point[2] for point in points],
            color=line.get_color(),
            alpha=0.15,
        )
    axes.set(xscale="log", xlabel="capacity, tokens", ylabel="GPU time not saved, of the bound")
    return bool(found)


def _ttl(document: Document, trace: str, axes: Any) -> bool:
    points = sorted(
        (point for point in document.get("ttl", ()) if point["trace"] == trace), key=lambda point: float(point["ttl_s"])
    )
    axes.plot(
        [point["ttl_s"] for point in points], [point["token_hit_share"] for point in points], marker="o", label="hits"
    )
    right = axes.twinx()
    right.plot([point["ttl_s"] for point in points], [point["resident_tokens_mean"] / 1e6 for point in points], "C1s-")
    right.set_ylabel("held on average, million tokens", color="C1")
    axes.set(xlabel="kept after the last use, s", ylabel="usable share of prompt tokens")
    if points:
        axes.set_xscale("log")
    return bool(points)


def _break_even(document: Document, trace: str, axes: Any) -> bool:
    table: Document | None = document.get("break_even")
    if not table:
        return False
    needed = [
        tokens * table["token_bytes"] / seconds / 1e9
        for tokens, seconds in zip(table["tokens"], table["prefill_s"], strict=True)
    ]
    axes.plot(table["tokens"], needed, "k", label="computing is as fast")
    for place, (rig, speed) in enumerate(sorted(table.get("rigs", {}).items())):
        axes.axhline(speed, color=f"C{place}", linestyle="--", label=rig)
    axes.set(xscale="log", yscale="log", xlabel="tokens reused", ylabel="GB/s")
    return True


def _speed(document: Document, trace: str, axes: Any) -> bool:
    rows = [row for row in document.get("queueing", ()) if row.get("trace") == trace and "ttft_s_mean" in row]
    for row in rows:
        axes.plot(row["requests_per_s"], row["ttft_s_mean"], "o", label=f"{policy_name(row)}, {row.get('load', '')}")
    axes.set(xlabel="requests per second", ylabel="mean time to the first token, s")
    return bool(rows)


PLOTS = (
    Plot("hits", "What is found", "Above: better. No policy passes Belady's rule at its capacity.", _hits),
    Plot(
        "pareto", "GPU time saved against bytes written", "Up and to the left is better. A point per capacity.", _pareto
    ),
    Plot(
        "regret", "Regret by capacity",
        "What is not saved, of the best possible: between Belady's rule (lower edge) and the linear program (line).",
        _regret,
    ),
    Plot("ttl", "Hits and room by time to live", "The knee is where waiting longer costs room and finds little.", _ttl),
    Plot(
        "break_even", "Where loading pays", "A tier above the line loads a prefix faster than the GPU computes it.",
        _break_even,
    ),
    Plot("speed", "Time to the first token and throughput", "Right and below is better; they can disagree.", _speed),
)  # fmt: skip


# -- the page ----------------------------------------------------------------------------------------------------------


def _page(document: Document, drawn: list[tuple[Plot, bool]]) -> str:
    parts = [f"<!doctype html><meta charset=utf-8><title>Admission and eviction</title><style>{_STYLE}</style>"]
    parts.append("<h1>Which pages deserve to be kept</h1>")
    for plot, has_figures in drawn:
        title, caption = html.escape(plot.title), html.escape(plot.caption)
        parts.append(f"<h2>{title}</h2>")
        if has_figures:
            parts.append(f"<figure><img src={plot.name}.png alt='{title}'><figcaption>{caption}</figcaption></figure>")
        else:
            parts.append("<p>The run has no figures for this plot.</p>")
    parts.append("<h2>Figures</h2>")
    parts += [_table(document, trace["name"]) for trace in document["traces"]]
    return "\n".join(parts) + "\n"


def _table(document: Document, trace: str) -> str:
    regret = {(name, at): (low, high) for name, points in regrets(document, trace).items() for at, low, high in points}
    head = ("policy", "capacity, tokens", "usable tokens", "GPU time saved", "written, TB", "regret")
    rows = [f"<h3>{html.escape(trace)}</h3><table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"]
    for name, runs in _by_policy(document, trace):
        for run in runs:
            low, high = regret.get((name, run["capacity_tokens"]), (None, None))
            cells = (
                html.escape(name),
                f"{run['capacity_tokens']:,}",
                f"{run['usable_tokens'] / run['input_tokens']:.4f}",
                f"{saved_share(run):.4f}",
                f"{written_bytes(run) / 1e12:.3f}",
                "" if low is None or high is None else f"{low:.3f} to {high:.3f}",
            )
            rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return "\n".join([*rows, "</table>"])
