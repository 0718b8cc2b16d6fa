"""How tensor parallelism cuts heads: into the share of each rank, and into the canonical slices that are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from hicache.errors import SpecError

Span: TypeAlias = tuple[int, int]  # [start, stop) along an axis
Section: TypeAlias = tuple[int, int]  # heads, elements of each


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """How tensor parallelism splits one tensor of a state: along ``axis``, section by section.

    A section is ``(heads, elements of a head)``. Each section is split by itself, and a rank holds its heads of all of
    them, one section after the other: ``[q heads | k heads | v heads]`` of a GDN convolution, ``[x heads | B groups |
    C groups]`` of a Mamba2 one. Heads that are fewer than the ranks are replicated: ranks that compute with one head
    each hold it. No section: the axis itself is the heads, of one element each (a temporal state).
    """

    axis: int
    sections: tuple[Section, ...] = ()

    def sections_of(self, shape: tuple[int, ...], *, setting: str) -> tuple[Section, ...]:
        """The sections in a tensor of ``shape``. Raises SpecError where they do not make up the axis."""
        check_whole(f"{setting}.split.axis", self.axis, at_least=0)
        if self.axis >= len(shape):
            raise SpecError(f"{setting}.split.axis", self.axis, f"an axis of the shape {shape}, from 0")
        sections = self.sections or ((shape[self.axis], 1),)
        if not all(_is_section(section) for section in sections):
            raise SpecError(f"{setting}.split.sections", sections, "whole heads and elements of at least 1 in each")
        total = sum(heads * elements for heads, elements in sections)
        if total != shape[self.axis]:
            expected = f"sections of {shape[self.axis]} elements together, as axis {self.axis} has, not of {total}"
            raise SpecError(f"{setting}.split.sections", sections, expected)
        return sections


def is_whole(value: object, *, at_least: int) -> bool:
    """Whether it is a whole number, as 2.0, "2" and True are not: they would fail far from here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def check_whole(setting: str, value: object, *, at_least: int = 1, otherwise: str = "") -> None:
    """Raises SpecError unless ``value`` is a whole number."""
    if not is_whole(value, at_least=at_least):
        raise SpecError(setting, value, f"a whole number of at least {at_least}{otherwise}")


def whole_numbers(setting: str, values: object, *, at_least: int) -> tuple[int, ...]:
    """A list or tuple of whole numbers, as a tuple. Raises SpecError."""
    if not isinstance(values, list | tuple) or not all(is_whole(value, at_least=at_least) for value in values):
        raise SpecError(setting, values, f"a tuple of whole numbers of at least {at_least}")
    return tuple(values)


def _is_section(section: object) -> bool:
    return isinstance(section, list | tuple) and [is_whole(part, at_least=1) for part in section] == [True, True]


def slice_count(section_heads: Iterable[int], *, slices_max: int) -> int:
    """Canonical slices that tensors of these heads are stored in: the fewest in which no slice has heads in common
    with another only in part. ``slices_max``, or fewer where there are fewer heads; 1 for what is replicated.
    """
    return math.lcm(1, *(math.gcd(heads, slices_max) for heads in section_heads))


def check_heads(setting: str, heads: int, *, tp_size: int, slices_max: int) -> None:
    """Raises SpecError unless ``heads`` can be cut into as many parts: equal shares, or one head for several parts."""
    for name, parts in (("tp_size", tp_size), ("tp_lcm", slices_max)):
        if heads % parts and parts % heads:
            divisors = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
            expected = f"a multiple or a divisor of {name} = {parts}: {heads} heads go with {divisors} or k * {heads}"
            raise SpecError(setting, heads, expected)


def head_span(heads: int, *, parts: int, part: int) -> Span:
    """The heads of one of ``parts`` equal shares; or the one head that it has in common with its neighbours."""
    if heads % parts == 0:
        share = heads // parts
        return part * share, (part + 1) * share
    head = part * heads // parts
    return head, head + 1


def local_sections(sections: Iterable[Section], *, tp_size: int, tp_rank: int) -> tuple[Section, ...]:
    """The sections of a rank's own tensor."""
    spans = ((head_span(heads, parts=tp_size, part=tp_rank), elements) for heads, elements in sections)
    return tuple((stop - first, elements) for (first, stop), elements in spans)


def slice_spans(
    sections: Iterable[Section], *, slices: int, slice_index: int, tp_size: int, tp_rank: int
) -> tuple[Span, ...]:
    """Where along the axis of a rank's own tensor the elements of one slice lie, in their order within the slice.

    The rank must hold the slice. Neighbouring spans are one.
    """
    spans: list[Span] = []
    section_start = 0
    for heads, head_elements in sections:
        own_first, own_stop = head_span(heads, parts=tp_size, part=tp_rank)
        first, stop = head_span(heads, parts=slices, part=slice_index)
        assert own_first <= first < stop <= own_stop, "a rank holds its slices whole"
        start = section_start + (first - own_first) * head_elements
        end = section_start + (stop - own_first) * head_elements
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
        section_start += (own_stop - own_first) * head_elements
    return tuple(spans)


def rank_slices(slices: int, *, tp_size: int, tp_rank: int) -> range:
    """The slices that a rank holds: its share of them, or the one that it has in common with its neighbours."""
    return range(*head_span(slices, parts=tp_size, part=tp_rank))


def is_first_holder(slices: int, *, tp_size: int, tp_rank: int) -> bool:
    """Whether the rank is the first of those that hold its slices: the one that stores them."""
    return tp_rank == 0 or rank_slices(slices, tp_size=tp_size, tp_rank=tp_rank - 1) != rank_slices(
        slices, tp_size=tp_size, tp_rank=tp_rank
    )
