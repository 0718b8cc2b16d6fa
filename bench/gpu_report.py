"""`python -m bench.gpu_report transfer_cuda.json`: the section of docs/measurements.md that a run on a GPU gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

COMMAND = "bench/gpu_check.sh"
Figures = dict[str, Any]  # Any: rows of JSON, as bench/transfer_cuda.py writes them


def section(document: Figures) -> Iterator[str]:
    """Lines of Markdown. Raises click.ClickException for a document without figures of a GPU."""
    if not document.get("rows"):
        raise click.ClickException(document.get("missing", "no figures of a GPU in it: run bench/gpu_check.sh on one"))
    machine = document["machine"]
    yield "## On a GPU"
    yield ""
    yield f"`{COMMAND}` on {document['gpu']}, {machine['cpus']} cores, kernel {machine['kernel']}, load"
    yield f"{machine['load_before']} before. Kernels equal their references there, and prompts of a hybrid model came"
    yield "back from L1, L2 and L3 to the bit by each back end. GB/s (share of one copy of 1 GiB), medians:"
    yield ""
    yield from _table(
        ("model", "pages or states", "back end", "backup", "load"),
        (
            (model, str(pages), backend, *(_speed(rows, direction) for direction in ("backup", "load")))
            for (model, pages, backend), rows in _grouped(document["rows"]).items()
        ),
    )
    yield ""
    yield "A load of 64 pages by layer, beside the forward that waits for its layers, and matmuls beside copies:"
    yield ""
    names = ("backend", "load_ms", "forward_ms", "both_ms", "hidden", "slowdown_load", "slowdown_backup", "sm_share")
    yield from _table(names, (tuple(str(row[name]) for name in names) for row in document["overlap"]))
    for line in document["left_out"]:
        yield f"\nLeft out: {line}."


def _grouped(rows: list[Figures]) -> dict[tuple[str, int, str], list[Figures]]:
    grouped: dict[tuple[str, int, str], list[Figures]] = {}
    for row in rows:
        grouped.setdefault((row["model"], row["pages"], row["backend"]), []).append(row)
    return grouped


def _speed(rows: list[Figures], direction: str) -> str:
    return ", ".join(f"{row['gbps']} ({row['of_limit']})" for row in rows if row["direction"] == direction)


def _table(names: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"| {' | '.join('---' for _ in names)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


@click.command()
@click.argument("json_path", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(json_path: Path) -> None:
    """Print FILE, of `python -m bench.transfer --device cuda --json FILE`, as Markdown for docs/measurements.md."""
    click.echo("\n".join(section(json.loads(json_path.read_text()))))


if __name__ == "__main__":
    main()
