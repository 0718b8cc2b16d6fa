"""The cells of a study: a policy at a capacity on a trace. What has been worked out stays in a file, for the next run.

The file is replaced whole after each cell, so a run that is stopped, or killed, goes on where it was. A row counts for
the code and the trace that it is from: after a change of either its cell is worked out anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from bench.admission.bounds import belady, ceiling, compute_bounds
from bench.admission.replay import TierSpec, replay
from bench.admission.tasks import run_all
from bench.admission.traces import Trace
from hicache.errors import ConfigError

Row: TypeAlias = dict[str, Any]

BELADY, CEILING, BOUND = "belady", "ceiling", "bound"  # in the place of a policy: what none can beat
_SOLVED_REFERENCES = 500_000  # of longer traces the linear program takes more than minutes, and gigabytes
_HERE = Path(__file__).parent
_READS = ("prefetch.py", "read.py")  # nothing is fetched in a study
_CODE = (
    *sorted(path for path in (_HERE.parents[1] / "hicache" / "policies").glob("*.py") if path.name not in _READS),
    *(_HERE / f"{name}.py" for name in ("bounds", "generator", "replay", "study_cells", "traces", "tree")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A policy, or what none can beat, at a capacity on a trace. The first ``warm_share`` of requests do not count."""

    trace: str
    pages: int
    policy: str  # names of an eviction and a write policy with + between, or BELADY, CEILING or BOUND
    warm_share: float = 0.0

    @property
    def trace_number(self) -> int:
        """See ``tasks.Task``: a run has one trace at a time."""
        return 0

    def run(self, trace: Trace) -> Row:
        """``saved_share`` of the GPU time of all prompts; of what can be run also what was found and written."""
        if self.policy == CEILING:
            return {"saved_share": ceiling(trace, warm_share=self.warm_share).saved_share}
        if self.policy == BELADY:
            best = belady(trace, self.pages, warm_share=self.warm_share)
            return {
                "saved_share": best.saved_share,
                "token_share": best.token_share,
                "written_pages": best.written_blocks,
            }
        if self.policy == BOUND:
            assert not self.warm_share, "the program is of whole traces"
            bounds = compute_bounds(trace, self.pages, solve=trace.references <= _SOLVED_REFERENCES)
            return {"saved_share": bounds.get("upper", bounds["ceiling"])["saved_share"]}
        eviction, _, write = self.policy.partition("+")
        tier = TierSpec("cache", self.pages, eviction, write or "write_through")
        result = replay(trace, [tier], warm_share=self.warm_share)
        return {
            "saved_share": result.gpu_s_saved / result.gpu_s_total,
            "token_share": result.token_hit_share,
            "written_pages": result.tiers[0].pages_written,
        }


@dataclass(frozen=True, slots=True)
class Source:
    """Where a trace is from: a file, or the code that makes it."""

    load: Callable[[], Trace]
    path: Path | None = None

    def digest(self) -> str:
        """Of all that its rows depend on."""
        digest = hashlib.blake2b(digest_size=8)
        for path in (*_CODE, *([self.path] if self.path else ())):
            digest.update(path.read_bytes())
        return digest.hexdigest()


class KeptRows:
    """The rows of a file, by cell; of none if ``path`` is None. Raises ConfigError for a file that is no study's."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[Cell, Row] = {}
        if path is not None and path.exists():
            try:
                document = json.loads(path.read_bytes())
                self._rows = {_cell_of(row): row for row in document["rows"]}
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    "json", str(path), f"a file that a study has written, or a new one ({error})"
                ) from error

    def get(self, cell: Cell, digest: str) -> Row | None:
        """The row of a cell, if it has been worked out of what ``digest`` stands for."""
        row = self._rows.get(cell)
        return row if row is not None and row["source"] == digest else None

    def put(self, cell: Cell, row: Row, digest: str) -> None:
        """Adds a row, or takes the place of one, and replaces the file."""
        self._rows[cell] = {**asdict(cell), **row, "source": digest}
        if self._path is not None:
            text = ",\n".join(json.dumps(each) for each in self._rows.values())
            new = self._path.with_name(self._path.name + ".new")
            new.write_text(f'{{"format": 1, "rows": [\n{text}\n]}}\n')
            os.replace(new, self._path)


def _cell_of(row: Mapping[str, Any]) -> Cell:
    return Cell(**{name: row[name] for name in ("trace", "pages", "policy", "warm_share")})


def fill(
    cells: Iterable[Cell], sources: Mapping[str, Source], kept: KeptRows, console: Console, processes: int
) -> Iterator[Row]:
    """The row of each cell, by trace. What ``kept`` does not have is worked out; one trace is in memory at a time."""
    by_trace: dict[str, list[Cell]] = {}
    for cell in cells:
        by_trace.setdefault(cell.trace, []).append(cell)
    for name, its in by_trace.items():
        digest = sources[name].digest()
        _work_out([cell for cell in its if kept.get(cell, digest) is None], sources[name], kept, console, processes)
        yield from (row for cell in its if (row := kept.get(cell, digest)) is not None)


def _work_out(cells: Sequence[Cell], source: Source, kept: KeptRows, console: Console, processes: int) -> None:
    if cells:
        digest = source.digest()
        done: Callable[[int, Row], None] = lambda number, row: kept.put(cells[number], row, digest)  # noqa: E731
        run_all([source.load()], cells, console, processes, done=done, title=cells[0].trace)
