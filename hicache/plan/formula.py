"""A formula is one text: it is evaluated, and the same text with its numbers is what `--explain` prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal, TypeAlias

Number: TypeAlias = int | float
Scope: TypeAlias = Literal["rank", "GPU", "DP rank", "replica", "cluster", "node", "request", "drive"]

FUNCTIONS = {
    "ceil": math.ceil,
    "floor": math.floor,
    "int": int,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": round,
}
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
    names: frozenset[str] = field(init=False, compare=False)  # the numbers that it needs

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(_NAME.findall(self.text)).difference(FUNCTIONS))


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, the formula that it comes from, and the numbers that went into it."""

    name: str
    value: Number
    formula: Formula
    inputs: Mapping[str, Number]

    @property
    def numbers(self) -> str:
        """The formula with its numbers in it."""
        return _NAME.sub(lambda found: _shown(self.inputs.get(found[0], found[0])), self.formula.text)

    def as_json(self) -> dict[str, Number | str]:
        """What is known of it."""
        formula = self.formula
        return {
            "value": self.value,
            "unit": formula.unit,
            "scope": formula.scope,
            "formula": formula.text,
            "numbers": self.numbers,
            "source": formula.source,
        }


class Ledger(Mapping[str, Figure]):
    """The figures of one plan, in the order in which they were worked out."""

    def __init__(self) -> None:
        self._figures: dict[str, Figure] = {}

    def work_out(self, formula: Formula, /, **numbers: Number) -> Any:
        """The value of the formula, int or float as its text has it; kept under its figure's name.

        Any, since the texts know no static types. Working out a figure anew replaces it.
        """
        return self.work_out_as(formula.figure, formula, **numbers)

    def work_out_as(self, name: str, formula: Formula, /, **numbers: Number) -> Any:
        """As ``work_out``, kept under another name."""
        value = evaluate(formula, numbers)
        self._figures.pop(name, None)  # so that the order is that of the last time
        self._figures[name] = Figure(name, value, formula, numbers)
        return value

    def nothing(self, formula: Formula) -> None:
        """A figure of 0: the model has no such thing."""
        absent = Formula(formula.figure, "0", formula.unit, formula.scope, "the model has no such thing")
        self._figures[formula.figure] = Figure(formula.figure, 0, absent, {})

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
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # the same number, and shorter
    return f"({value})" if isinstance(value, int | float) and value < 0 else str(value)
