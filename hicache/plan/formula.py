"""A formula is one text: it is evaluated, and the same text with its numbers is what `--explain` prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal, TypeAlias

Number: TypeAlias = int | float
Scope: TypeAlias = Literal["rank", "GPU", "DP rank", "replica", "cluster", "node", "request", "drive"]

FUNCTIONS = {"ceil": math.ceil, "floor": math.floor, "int": int, "log2": math.log2, "max": max, "min": min}
_NAME = re.compile(r"\b[a-z_]\w*\b")


@dataclass(frozen=True, slots=True)
class Formula:
    """How one figure is worked out. ``text`` is arithmetic over names, and the functions of ``FUNCTIONS``.

    ``figure`` is the name of what it gives; several formulas may give one figure, for different kinds of model.
    """

    figure: str
    text: str
    unit: str
    scope: Scope
    source: str

    @property
    def names(self) -> frozenset[str]:
        """The numbers that it needs."""
        return frozenset(_NAME.findall(self.text)) - FUNCTIONS.keys()


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit and scope, and where it comes from. ``numbers`` is the formula with its numbers in it."""

    name: str
    value: Number
    unit: str
    scope: Scope
    formula: str
    numbers: str
    source: str


class Ledger(Mapping[str, Figure]):
    """The figures of one plan, in the order in which they were worked out."""

    def __init__(self) -> None:
        self._figures: dict[str, Figure] = {}

    def work_out(self, formula: Formula, *, name: str | None = None, **numbers: Number) -> Any:
        """The value of the formula, int or float as its text has it; kept under its figure's name, or ``name``.

        Any, since the texts know no static types. Working out a figure anew replaces it.
        """
        value = evaluate(formula, numbers)
        name = name or formula.figure
        shown = _NAME.sub(lambda found: _shown(numbers.get(found[0], found[0])), formula.text)
        figure = Figure(name, value, formula.unit, formula.scope, formula.text, shown, formula.source)
        self._figures.pop(name, None)  # so that the order is that of the last time
        self._figures[name] = figure
        return value

    def nothing(self, formula: Formula) -> None:
        """A figure of 0: the model has no such thing."""
        self._figures[formula.figure] = Figure(
            formula.figure, 0, formula.unit, formula.scope, "0", "0", "the model has no such thing"
        )

    def __getitem__(self, name: str) -> Figure:
        return self._figures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)


_compiled: dict[str, CodeType] = {}  # a cache of our own constant texts, by text


def evaluate(formula: Formula, numbers: Mapping[str, Number]) -> Any:
    """The value of a formula, whose text is a constant of this package. Any: see ``work_out``."""
    assert numbers.keys() == formula.names, (formula.figure, sorted(numbers.keys() ^ formula.names))
    code = _compiled.get(formula.text)
    if code is None:
        code = _compiled.setdefault(formula.text, compile(formula.text, formula.figure, "eval"))
    return eval(code, {"__builtins__": {}, **FUNCTIONS, **numbers})


def _shown(value: Number | str) -> str:
    return f"({value})" if isinstance(value, int | float) and value < 0 else str(value)
