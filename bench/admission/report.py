"""The report of a run: one HTML page and its plots as PNG files, all drawn from the JSON that the run has written.

With matplotlib, of the extra ``bench``. A plot whose figures the JSON does not have is left out, and the page says so.
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

from bench.admission.plots import PLOTS, Document, Plot, by_policy, saved_share, written_bytes
from hicache.errors import ConfigError

_LISTS = ("traces", "runs", "computed", "bounds", "policy_cost", "orphans", "ttl")
_STYLE = """body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}img{width:100%}
table{border-collapse:collapse;font-size:14px}td,th{border-bottom:1px solid #ddd;padding:.2em .6em;text-align:right}
td:first-child,th:first-child{text-align:left}figure{margin:2em 0}figcaption{color:#555}"""


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
    if not isinstance(document, dict) or not all(isinstance(document.get(key), list) for key in _LISTS):
        raise ConfigError("report", str(path), "the JSON of python -m bench.admission, of format 1")
    return document


def _save(plot: Plot, document: Document, path: Path) -> bool:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    traces = [trace["name"] for trace in document["traces"]][: None if plot.by_trace else 1]
    figure = Figure(figsize=(12, 4.6 * max(1, len(traces))), layout="constrained")
    FigureCanvasAgg(figure)
    has_figures = False
    for place, trace in enumerate(traces, start=1):
        axes = figure.add_subplot(len(traces), 1, place)
        axes.grid(alpha=0.3)
        if plot.by_trace:
            axes.set_title(trace, loc="left")
        if plot.draw(document, trace, axes):
            has_figures = True
            _legend(plot, axes)
        else:
            axes.text(0.5, 0.5, "no figures", ha="center", transform=axes.transAxes)
    if has_figures:
        figure.savefig(path, dpi=110)
    return has_figures


def _legend(plot: Plot, axes: Any) -> None:
    if plot.by_trace and len(axes.get_legend_handles_labels()[1]) > 3:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.legend(fontsize=8, loc="best")


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
    head = ("policy", "capacity, tokens", "usable tokens", "GPU time saved", "written, TB", "regret", "mean TTFT, s")
    rows = [f"<h3>{html.escape(trace)}</h3><table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"]
    for name, runs in by_policy(document, trace):
        rows += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(name, run))}</tr>" for run in runs]
    return "\n".join([*rows, "</table>"])


def _cells(name: str, run: Document) -> tuple[str, ...]:
    pair, timed = run["regret"], run["queueing"]
    return (
        html.escape(name),
        f"{run['capacity_tokens']:,}",
        f"{run['usable_tokens'] / run['input_tokens']:.4f}",
        f"{saved_share(run):.4f}",
        f"{written_bytes(run) / 1e12:.3f}",
        "" if pair is None else f"{pair[0]:.3f} to {pair[1]:.3f}",
        f"{timed[0]['ttft_s']['mean']:.3f}" if timed else "",
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m bench.admission.report RUN.json DIR")
    try:
        print(write_report(sys.argv[1], sys.argv[2]))
    except ConfigError as error:
        sys.exit(str(error))
