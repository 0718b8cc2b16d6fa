"""Cells of the fault matrix: what a call came to under a fault, what does not apply and why, and the tables of both."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
FAULTS = ("delay", "short", "EIO", "ENOSPC", "wrong bytes", "never answers", "answers late", "killed")
SLACK_S = 2.0  # a call is over so long after its deadline, on a machine that does nothing else
USUAL_TIMES = 20  # and so many times what the same call takes without a fault, now and here
TICK_S = 0.01

Place = tuple[str, str]  # fault, call
Table = dict[Place, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """What an operation came to while the fault lasted, and the same one when it was over."""

    during: str
    after: str

    def __str__(self) -> str:
        return f"`{self.during}`, then `{self.after}`"


@dataclass(frozen=True, slots=True)
class Part:
    """One table of the matrix. ``run`` fills the places it is given; ``reasons`` are of places that have no cell."""

    name: str
    calls: tuple[str, ...]
    run: Callable[[Collection[Place]], Table]
    reasons: Mapping[Place, str] = field(default_factory=dict)

    @property
    def places(self) -> list[Place]:
        """All that have a cell, fault by fault."""
        return [place for place in self.all_places if place not in self.reasons]

    @property
    def all_places(self) -> list[Place]:
        """All there are."""
        return [(fault, call) for fault in FAULTS for call in self.calls]

    @property
    def marks(self) -> tuple[str, str]:
        """What surrounds the table in the document."""
        return f"<!-- {self.name}: python -m tests.harnesses.fault_matrix --write -->\n", f"<!-- end of {self.name} -->"

    def markdown(self, table: Table) -> str:
        """The table as the document has it, with a numbered reason for each place without a cell."""
        numbers = {reason: number for number, reason in enumerate(dict.fromkeys(self.reasons.values()), start=1)}
        shown = {place: f"({numbers[reason]})" for place, reason in self.reasons.items()} | table
        lines = [f"| {self.name} | {' | '.join(FAULTS)} |", "| --- " * (len(FAULTS) + 1) + "|"]
        lines += [f"| {call} | {' | '.join(shown[fault, call] for fault in FAULTS)} |" for call in self.calls]
        lines += ["", *(f"- ({number}) {reason}" for reason, number in numbers.items())] if numbers else []
        return "\n".join(lines) + "\n"

    def documented(self) -> str:
        """What the document has."""
        begin, end = self.marks
        return DOCUMENT.read_text().split(begin, 1)[1].split(end, 1)[0]

    def documented_cells(self) -> Table:
        """The cells of the document."""
        rows = [line.strip("| ").split(" | ") for line in self.documented().splitlines() if line.startswith("| ")]
        return {
            (fault, row[0]): text
            for row in rows[2:]
            for fault, text in zip(FAULTS, row[1:], strict=True)
            if (fault, row[0]) not in self.reasons
        }

    def write(self, table: Table) -> None:
        """Put the table into the document."""
        begin, end = self.marks
        head, rest = DOCUMENT.read_text().split(begin, 1)
        DOCUMENT.write_text(f"{head}{begin}{self.markdown(table)}{end}{rest.split(end, 1)[1]}")


class Bound:
    """How long calls may take, by what they take without a fault and by what else this machine does meanwhile."""

    def __init__(self) -> None:
        self._usual_s: dict[str, float] = {}

    def learn(self, name: str, call: Callable[[], object]) -> None:
        """Has a call of this name made without a fault."""
        started_s = time.monotonic()
        call()
        self._usual_s[name] = time.monotonic() - started_s

    @contextlib.contextmanager
    def within(self, deadline_s: float, name: str) -> Iterator[None]:
        """Fails when what is inside ends much later than ``deadline_s`` after its begin."""
        lost_s = 0.0
        is_over = threading.Event()

        def tick() -> None:
            nonlocal lost_s
            while not is_over.is_set():
                at_s = time.monotonic()
                is_over.wait(TICK_S)
                lost_s += max(0.0, time.monotonic() - at_s - TICK_S)

        ticker = threading.Thread(target=tick, name="fault-matrix-ticker", daemon=True)
        started_s = time.monotonic()
        ticker.start()
        try:
            yield
        finally:
            elapsed_s = time.monotonic() - started_s
            is_over.set()
            ticker.join()
        limit_s = deadline_s + SLACK_S + USUAL_TIMES * self._usual_s.get(name, 0.0) + lost_s
        assert elapsed_s < limit_s, f"{name} took {elapsed_s:.2f} s with a deadline of {deadline_s} s"
