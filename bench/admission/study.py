"""`python -m bench.admission.study`: how far policies are from what is possible, and why. See docs/policies.md."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.admission.generator import agent_sessions
from bench.admission.study_cells import BELADY, BOUND, CEILING, Cell, KeptRows, Row, Source, fill
from bench.admission.study_duel import duel as run_duel
from bench.admission.study_limit import limits
from bench.admission.study_residency import residency
from bench.admission.study_tables import CAPACITIES, OURS, SECOND_TOUCH, every_policy, filled_in, summary
from bench.admission.traces import Trace, load_trace
from hicache.errors import ConfigError

_FILES = Path(__file__).parent.parent / "trace_files"
_PAGE_TOKENS = 512
POLICIES = (
    OURS, "lru", SECOND_TOUCH, "lru+tiny_lfu", "fifo", "lfu", "lfu_da", "slru", "s3_fifo", "sieve", "arc", "gdsf",
    "marconi", "ttl", "tail_trim", "marconi+write_through_selective", "marconi+tiny_lfu",
)  # fmt: skip


def of_file(name: str) -> Source:
    """A trace of a file, in pages of 512 tokens where its own are shorter."""
    path = Path(name)
    return Source(lambda: in_pages(load_trace(path), _PAGE_TOKENS), path)


def of_agents(seed: int) -> Source:
    """Generated sessions of agents."""
    return Source(lambda: agent_sessions(120, seed=seed))


SOURCES: dict[str, Source] = {
    "conversation": of_file(str(_FILES / "mooncake_conversation_trace.jsonl.zst")),
    "synthetic": of_file(str(_FILES / "mooncake_synthetic_trace.jsonl.zst")),
    "claude_code": of_file(str(_FILES / "claude_code_sessions_519.jsonl.zst")),
    "agents_1": of_agents(1),
    "agents_2": of_agents(2),
}


def in_pages(trace: Trace, page_tokens: int) -> Trace:
    """The same requests, of a cache with longer pages; ids name prefixes, so the last id of a page names it."""
    if trace.block_tokens >= page_tokens:
        return trace
    factor, rest = divmod(page_tokens, trace.block_tokens)
    if rest:
        raise ConfigError("block_size", trace.block_tokens, f"a divisor of {page_tokens}, or more than that")
    requests = []
    for request in trace.requests:
        blocks = array("I", request.blocks[factor - 1 :: factor])
        if len(request.blocks) % factor:
            blocks.append(request.blocks[-1])
        requests.append(replace(request, blocks=blocks))
    return Trace(trace.name, page_tokens, requests, trace.block_count)


def cells_of(traces: Sequence[str], capacities: Sequence[str], policies: Sequence[str], **how: Any) -> list[Cell]:
    """All policies at all capacities of all traces. What takes longest comes last, where it delays nobody."""
    return [
        Cell(trace=trace, pages=CAPACITIES[capacity], policy=policy, **how)
        for trace in traces
        for policy in policies
        for capacity in capacities
    ]


_json = click.option("--json", "json_path", metavar="FILE", help="Where the rows go; - for stdout.")
_rows = click.option(
    "--json",
    "rows_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where the rows go, and from where a run goes on that was stopped.",
)
_names = click.option("--traces", default="conversation,synthetic,claude_code", show_default=True, metavar="LIST")
_processes = click.option("--processes", type=click.IntRange(1, 256), default=os.cpu_count() or 1, metavar="N")
_capacities = click.option("--capacities", default=",".join(CAPACITIES), show_default=True, metavar="LIST")


def _write(document: Any, path: str | None) -> None:
    text = json.dumps(document, indent=1)
    if path is None or path == "-":
        click.echo(text)
    else:
        Path(path).write_text(text + "\n")


def _capacities_of(text: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",")]
    for part in chosen:
        if part not in CAPACITIES:
            raise click.BadParameter(f"capacities={part!r}: one of {', '.join(CAPACITIES)}")
    return chosen


def _sources(text: str) -> dict[str, Source]:
    """By name: of those that are known, and of files."""
    sources = {}
    for part in (part.strip() for part in text.split(",")):
        if part in SOURCES:
            sources[part] = SOURCES[part]
        elif Path(part).is_file():
            sources[Path(part).name.split(".")[0]] = of_file(part)
        else:
            raise click.BadParameter(f"traces={part!r}: a file, or one of {', '.join(SOURCES)}")
    return sources


def _run(cells: Sequence[Cell], sources: Mapping[str, Source], rows_path: Path | None, processes: int) -> list[Row]:
    try:
        return list(fill(cells, sources, KeptRows(rows_path), Console(stderr=True), processes))
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


@click.group()
def main() -> None:
    """How far policies are from what is possible, and why."""


@main.command()
@_rows
@_names
@_capacities
@_processes
@click.option("--bounds", is_flag=True, help="Also the linear program for Mooncake's traces: minutes.")
def table(rows_path: Path | None, traces: str, capacities: str, processes: int, *, bounds: bool) -> None:
    """Policies x capacities x traces, with regret. Traces are names, or files."""
    sources, sizes = _sources(traces), _capacities_of(capacities)
    limits = (BELADY, CEILING, *((BOUND,) if bounds else ()))
    rows = _run(cells_of(list(sources), sizes, (*POLICIES, *limits)), sources, rows_path, processes)
    click.echo(f"{summary(rows)}\n\n{every_policy(rows)}")


@main.command()
@_rows
@click.option("--traces", default="conversation,synthetic,agents_1,agents_2", show_default=True, metavar="LIST")
@_capacities
@_processes
def blind(rows_path: Path | None, traces: str, capacities: str, processes: int) -> None:
    """The same, scored on the second half of each trace alone, and on traces that no constant was chosen on."""
    sources, sizes = _sources(traces), _capacities_of(capacities)
    cells = cells_of(list(sources), sizes, (*POLICIES, BELADY, CEILING), warm_share=0.5)
    click.echo(summary(_run(cells, sources, rows_path, processes)))


@main.command()
@click.argument("rows_path", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="ROWS")
@click.argument("document", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="DOCUMENT")
def docs(rows_path: Path, document: Path) -> None:
    """Write the tables of a file of rows into a document, where its marks are."""
    document.write_text(filled_in(document.read_text(), json.loads(rows_path.read_text())["rows"]))


@main.command()
@_json
@click.option("--trace", "name", type=click.Choice(list(SOURCES)), default="conversation", show_default=True)
@click.option("--capacity", type=click.Choice(list(CAPACITIES)), default="3 M", show_default=True)
def limit(json_path: str | None, name: str, capacity: str) -> None:
    """How much of the distance to Belady's rule is knowledge, and how much machinery."""
    found = limits(SOURCES[name].load(), CAPACITIES[capacity])
    if json_path is not None:
        _write({"trace": name, "capacity": capacity, **found}, json_path)
    for key, value in found.items():
        click.echo(f"{key:48} {value:.4f}")


@main.command()
@_json
@click.option("--trace", "name", type=click.Choice(list(SOURCES)), default="synthetic", show_default=True)
@click.option("--capacity", type=click.Choice(list(CAPACITIES)), default="0.5 M", show_default=True)
@click.option("--one", type=click.Choice(POLICIES), default=OURS, show_default=True, metavar="POLICY")
@click.option("--other", type=click.Choice(POLICIES), default="marconi", show_default=True, metavar="POLICY")
@click.option("--warm", "warm_share", type=click.FloatRange(0, 0.99), default=0.0, help="Requests that do not count.")
def duel(json_path: str | None, name: str, capacity: str, one: str, other: str, warm_share: float) -> None:
    """Whether one policy is ahead of another one, or had luck."""
    found = run_duel(SOURCES[name].load(), CAPACITIES[capacity], one, other, warm_share=warm_share)
    if json_path is not None:
        _write({"trace": name, "capacity": capacity, "one": one, "other": other, **asdict(found)}, json_path)
    click.echo(
        f"{one} saves {found.ahead_share:+.4f} more than {other}, deviation {found.deviation:.4f}, and "
        f"less on {found.behind_chance:.0%} of traces drawn anew; {found.differing} requests of {found.requests} differ"
    )


@main.command()
@_json
@_names
def ttl(json_path: str | None, traces: str) -> None:
    """R(tau): hits, room and idle time by time to live."""
    rows: list[dict[str, Any]] = [
        {"trace": name, **row} for name, source in _sources(traces).items() for row in residency(source.load())
    ]
    if json_path is not None:
        _write({"rows": rows}, json_path)
    for row in rows:
        click.echo(
            f"{row['trace']:14} {row['ttl_s']:6.0f} s  hits {row['token_hit_share']:.4f}  "
            f"held {row['resident_tokens_mean'] / 1e6:.1f} M  R {row['R']:.2f}  A {row['A']:.2f}"
        )


if __name__ == "__main__":
    main()
