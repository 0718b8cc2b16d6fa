"""`python -m bench.gpu_copies`: copies between GPU memory and pinned L2, beside one large asynchronous copy.

`bench/gpu_check.sh` runs it after the kernels have been compared with their references.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import click
import torch
from rich.console import Console
from rich.table import Table

from bench.machine import machine_facts, write_json
from hicache.copies import Copies, PoolCopies
from hicache.kernel_copies import KernelCopies
from hicache.pools import L1Pool, L2Pool
from hicache.spec import CacheSpec, Group, PagedGroup, StateField, StateGroup

PAGES = (1, 16, 256, 2048)
STATES = (1, 4, 16)
LIMIT_BYTES = 1 << 30  # large enough that the start of the copy does not show
REPETITIONS = 7
MISSING = "no CUDA device here: the GPU figures are missing"

GROUPS: dict[str, Group] = {
    "8B GQA": PagedGroup("pages", tuple(range(32)), heads=8, head_dim=128, dtype="bfloat16"),
    "70B GQA, one of TP8": PagedGroup("pages", tuple(range(80)), heads=1, head_dim=128, dtype="bfloat16"),
    # 512 float8, 4 float32 scales and 64 bfloat16 of rope to a row
    "Kimi-K3 MLA, packed": PagedGroup("pages", tuple(range(24)), heads=1, head_dim=656, dtype="uint8", planes=1),
    "Kimi-K3 state, one of TP8": StateGroup(  # 27.69 MiB
        "states",
        tuple(range(69)),
        (
            StateField("conv", (3, 3 * 12 * 128), "bfloat16"),
            StateField("temporal", (12, 128, 128), "bfloat16"),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Median of the repetitions; GB are 10^9 bytes. ``limit_gbps``: one copy of LIMIT_BYTES in the same direction."""

    model: str
    direction: str
    layout: str
    backend: str
    device: str
    page_bytes: int
    pages: int
    layers: int
    gbps: float
    limit_gbps: float
    of_limit: float
    per_call_us: float


def measure(
    model: str, group: Group, counts: tuple[int, ...], *, device: str, limits: dict[str, float], repetitions: int
) -> Iterator[Row]:
    """A row for every count, direction and backend; ``limits`` in GB/s by direction. Back ends take turns."""
    spec = CacheSpec(model, "1", (group,))
    count_max = max(*counts, 8)
    l1 = L1Pool(spec, pages=count_max, state_slots=count_max, device=device)
    l2 = L2Pool(spec, (count_max,), device=device)
    try:
        copies: list[Copies] = [KernelCopies(l1, l2), PoolCopies(l1, l2)]
        page_bytes = group.object_bytes(spec.page_tokens)
        for count in counts:
            slots = list(range(count))
            seconds = _turns(_calls(copies, slots), device=device, repetitions=repetitions)
            for (direction, backend), each in seconds.items():
                gbps = count * page_bytes / each / 1e9
                yield Row(
                    model,
                    direction,
                    "page_first_direct",
                    backend,
                    device,
                    page_bytes,
                    count,
                    len(group.layers),
                    round(gbps, 2),
                    round(limits[direction], 2),
                    round(gbps / limits[direction], 3),
                    round(each * 1e6, 1),
                )
        del copies
    finally:
        l2.close()


def _calls(copies: list[Copies], slots: list[int]) -> dict[tuple[str, str], Callable[[], object]]:
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for each in copies:
        calls["D2H", each.name] = lambda each=each: each.backup(0, slots, slots)  # type: ignore[misc]  # bound now
        calls["H2D", each.name] = lambda each=each: each.load(0, slots, slots)  # type: ignore[misc]
    return calls


def _turns(
    calls: dict[tuple[str, str], Callable[[], object]], *, device: str, repetitions: int
) -> dict[tuple[str, str], float]:
    """Median seconds of each call, until its bytes are there. The first turn compiles, and does not count."""
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
    for _ in range(1 + repetitions):
        for name, call in calls.items():
            seconds[name].append(_timed(call, device=device))
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def _timed(call: Callable[[], object], *, device: str) -> float:
    _settle(device)
    start = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - start


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def bus_limits(device: str, *, size_bytes: int, repetitions: int) -> dict[str, float]:
    """GB/s of one copy between pinned and device memory, by direction."""
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    calls: dict[tuple[str, str], Callable[[], object]] = {
        ("H2D", "limit"): lambda: there.copy_(host, non_blocking=True),
        ("D2H", "limit"): lambda: host.copy_(there, non_blocking=True),
    }
    seconds = _turns(calls, device=device, repetitions=repetitions)
    return {direction: size_bytes / each / 1e9 for (direction, _), each in seconds.items()}


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--quick", is_flag=True, help="Fewer repetitions and pages; ends within 45 s.")
def main(json_path: str | None, quick: bool) -> None:
    """Copy pages and states between the GPU and L2 by kernels and by the reference."""
    console = Console(stderr=json_path == "-")
    load_before = os.getloadavg()[0]
    if not torch.cuda.is_available():
        console.print(MISSING)
        write_json({"rows": [], "missing": MISSING, "machine": machine_facts(load_before)}, json_path)
        return
    repetitions = 3 if quick else REPETITIONS
    limits = bus_limits("cuda", size_bytes=LIMIT_BYTES, repetitions=repetitions)
    rows: list[Row] = []
    for model, group in GROUPS.items():
        counts = PAGES if isinstance(group, PagedGroup) else STATES
        rows += measure(
            model, group, counts[:3] if quick else counts, device="cuda", limits=limits, repetitions=repetitions
        )
    table = Table(title=f"GB/s on {torch.cuda.get_device_name()}, median of {repetitions}")
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    console.print(table)
    write_json({"rows": [asdict(row) for row in rows], "machine": machine_facts(load_before)}, json_path)


if __name__ == "__main__":
    main()
