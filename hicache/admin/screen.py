"""The status of a daemon as a screen for people: ``hicache status`` prints it, ``hicache top`` keeps it up to date."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hicache.admin.status import Sample, Status, TenantUse

NAMES = {"l1": "L1", "l2": "L2", "ram": "RAM", "l3": "L3"}
BAR_COLUMNS = 16
SPARK_COLUMNS = 30
NAME_CHARS_MIN = 12
COLUMNS_MAX = 1000
LATE_S = 0.1  # an event loop that was never later is as it should be
OTHER_COLUMNS = 62  # of a line with a tenant's name
Row: TypeAlias = tuple[str | Text | ProgressBar, ...]

_SPARKS = "▁▂▃▄▅▆▇█"


def screen(status: Status, samples: Sequence[Sample] = (), *, columns: int, lines: int | None = None) -> RenderableType:
    """All of it, or as much as fits in ``lines``: the fullest tenants, the slowest objects and the most errors stay."""
    name_chars = max(NAME_CHARS_MIN, columns - OTHER_COLUMNS)
    head: list[RenderableType] = [_title(status), _tiers(status), _figures(status, samples), _latency(status)]
    taken = 1 + len(status.tiers) + 2 + 1 + len(status.latency)
    tables = [
        ("tenants", _tenants(status, name_chars)),
        ("errors in the last hour", _errors(status)),
        ("slowest objects in the last hour", _slowest(status, name_chars)),
    ]
    if lines is None:
        shares = [len(rows) for _, rows in tables]
    else:
        shares = _share([len(rows) for _, rows in tables], lines - taken - len(tables))
    body = [
        Group(Text(title, "bold"), _grid(rows[:share]))
        for (title, rows), share in zip(tables, shares, strict=True)
        if share
    ]
    return _Cut(Group(*head, *body))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Lines as long as they come, each cut where the terminal ends."""

    lines: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self.lines, options.update(width=COLUMNS_MAX), pad=False):
            yield from Segment.adjust_line_length(line, options.max_width, pad=False)
            yield Segment.line()


def _share(wanted: list[int], lines: int) -> list[int]:
    """Lines for each table: one after the other gets one more while there are any."""
    shares = [0] * len(wanted)
    while lines > 0 and shares != wanted:
        for index, want in enumerate(wanted):
            if lines > 0 and shares[index] < want:
                shares[index] += 1
                lines -= 1
    return shares


def _title(status: Status) -> Text:
    colour = "green" if status.state == "ready" else "yellow"
    text = Text.assemble(
        ("hicached ", "bold"), clean(status.version), "  ", (clean(status.state), f"bold {colour}"), "  "
    )
    return text.append(f"{clean(status.backend)}, up {span(status.uptime_s)}, {_clients(status)}")


def _clients(status: Status) -> str:
    sessions = status.sessions
    waiting = f", {sessions.inflight_waiting} transfers wait" if sessions.inflight_waiting else ""
    late_s = status.loop_delay.longest_s
    late = f", answers up to {seconds(late_s)} late" if late_s >= LATE_S else ""
    return f"{sessions.open} of {sessions.limit} sessions{waiting}{late}"


def _tiers(status: Status) -> Table:
    rows: list[Row] = []
    for tier in status.tiers:
        more = [f"{tier.objects:,} objects"] if tier.objects is not None else []
        more += [f"{tier.engines} engines"] if tier.engines is not None else []
        used = f"{size(tier.used_bytes)} of {size(tier.capacity_bytes)}"
        name = NAMES.get(tier.name, clean(tier.name))
        rows.append((name, bar(tier.used_bytes, tier.capacity_bytes, is_quota=False), used, ", ".join(more)))
    return _grid(rows)


def _figures(status: Status, samples: Sequence[Sample]) -> Table:
    lookups, traffic = status.lookups, status.traffic
    hits = f"{percent(lookups.hit_rate)} of {lookups.asked:,}, at best {percent(lookups.ceiling)}"
    moved = f"read {size(traffic.read_bytes_per_s)}/s, written {size(traffic.written_bytes_per_s)}/s"
    moved_bytes_per_s = [sample.read_bytes_per_s + sample.written_bytes_per_s for sample in samples]
    return _grid(
        [
            ("hits", hits, spark([sample.hit_rate for sample in samples], top=1.0)),
            ("bytes", moved, spark(moved_bytes_per_s)),
        ]
    )


def _latency(status: Status) -> Table:
    head = tuple(Text(word, "dim") for word in ("calls", "half within", "99% within", "in the last hour"))
    rows: list[Row] = [head]
    for latency in status.latency:
        rows.append((clean(latency.kind), seconds(latency.p50_s), seconds(latency.p99_s), f"{latency.calls:,}"))
    return _grid(rows)


def _tenants(status: Status, name_chars: int) -> list[Row]:
    capacity_bytes = next((tier.capacity_bytes for tier in status.tiers if tier.name == "l3"), 0)
    return [
        (
            clean(tenant.name, name_chars),
            bar(*_fullest_quota(tenant, capacity_bytes), is_quota=bool(tenant.quota_bytes or tenant.quota_objects)),
            f"{size(tenant.used_bytes)}{f' of {size(tenant.quota_bytes)}' if tenant.quota_bytes else ', no quota'}",
            f"{tenant.objects:,} objects",
        )
        for tenant in status.tenants
    ]


def _fullest_quota(tenant: TenantUse, capacity_bytes: int) -> tuple[int, int]:
    """Use and limit where the tenant is nearest to one."""
    limits = [(tenant.used_bytes, tenant.quota_bytes or capacity_bytes)]
    if tenant.quota_objects:
        limits.append((tenant.objects, tenant.quota_objects))
    return max(limits, key=lambda limit: limit[0] / limit[1] if limit[1] else 0.0)


def _errors(status: Status) -> list[Row]:
    return [(clean(error.reason.replace("_", " ")), clean(error.of), f"{error.count:,}") for error in status.errors]


def _slowest(status: Status, name_chars: int) -> list[Row]:
    return [
        (
            f"{slow.kind} {size(slow.size_bytes)}",
            f"among {slow.objects}" if slow.objects > 1 else "",
            seconds(slow.seconds),
            time.strftime("%H:%M:%S", time.localtime(slow.at_s)),
            clean(slow.tenant, name_chars),
            clean(slow.key),
        )
        for slow in status.slowest
    ]


def _grid(rows: Sequence[Row]) -> Table:
    """Rows of one line each."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in rows[0] if rows else ():
        grid.add_column(no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid


def bar(used: float, limit: float, *, is_quota: bool) -> ProgressBar:
    """A part of a whole. A quota is yellow and red near its end, where a cache is as it should be."""
    share = min(1.0, used / limit) if limit else 0.0
    colour = "cyan" if not is_quota or share < 0.9 else "yellow" if share < 0.98 else "red"
    return ProgressBar(100, 100 * share, width=BAR_COLUMNS, complete_style=colour, finished_style=colour)


def spark(values: Sequence[float | None], *, top: float = 0.0) -> str:
    """The latest values as a line of blocks; a space where there is none."""
    shown = list(values)[-SPARK_COLUMNS:]
    top = max([top, *(value for value in shown if value is not None)])
    if not top:
        return ""
    return "".join(" " if value is None else _SPARKS[round(7 * value / top)] for value in shown)


def clean(text: str, chars_max: int = 32) -> str:
    """Somebody else's words without anything that a terminal obeys, cut where they are too many."""
    printable = "".join(character if character.isprintable() else "?" for character in text[: chars_max + 1])
    return printable if len(printable) <= chars_max else printable[: chars_max - 1] + "…"


def size(value: float) -> str:
    """Bytes, in the largest unit that leaves something before the point."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1023.5 and len(units) > 1:
        value /= 1024
        del units[0]
    unit = units[0]
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def seconds(value: float | None) -> str:
    """A time that something took."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def span(value: float) -> str:
    """How long something has been going on, in two units."""
    minutes, hours, days = int(value // 60), int(value // 3600), int(value // 86_400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(value)} s"


def percent(value: float | None) -> str:
    """A share."""
    return "-" if value is None else f"{value:.1%}"
