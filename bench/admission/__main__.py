"""`python -m bench.admission`: what eviction and admission policies make of request traces. See docs/policies.md."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console

from bench.admission.figures import break_even, regret
from bench.admission.generator import agent_sessions
from bench.admission.options import (
    Load,
    PolicyChoice,
    pages_of,
    parse_loads,
    parse_policies,
    parse_tiers,
    parse_tokens,
)
from bench.admission.plots import saved_share
from bench.admission.priced import HARDWARE_DEFAULT, priced
from bench.admission.queueing import Overlap, Queueing
from bench.admission.report import write_report
from bench.admission.tables import table_of, verdicts
from bench.admission.tasks import (
    BoundsTask,
    ComputedTask,
    OrphanTask,
    PolicyCostTask,
    ReplayTask,
    Row,
    Setup,
    Task,
    TtlTask,
    run_all,
)
from bench.admission.timed import groups_needed
from bench.admission.traces import SESSION_GAP_S, Trace, load_trace
from bench.machine import machine_facts, write_json
from hicache.costs.rigs import Rig
from hicache.errors import ConfigError
from hicache.policies.write import write_policy_of

TRACES = Path(__file__).parent.parent / "trace_files"
TRACES_DEFAULT = ("mooncake_conversation_trace.jsonl.zst", "mooncake_synthetic_trace.jsonl.zst")
POLICIES_DEFAULT = (
    "lru,lru+write_through_selective,lru+tiny_lfu,fifo,lfu,slru,s3_fifo,sieve,arc,gdsf,marconi,ttl,"
    "continuation+continuation"
)
POLICIES_QUICK = "lru,lru+write_through_selective"
CAPACITIES_DEFAULT = "0.5M,3M,10M,25M"
TTLS_S = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Study:
    """What has been asked for."""

    rig: Rig
    setup: Setup
    policies: Sequence[PolicyChoice]
    capacities: Sequence[int | None]
    traces: Sequence[Trace]
    gpu_groups: Sequence[int]  # of each trace
    with_bounds: bool  # by linear program
    with_plots: bool  # what only the report shows

    def replays(self) -> Iterator[ReplayTask]:
        """Each policy at each capacity of each trace."""
        for number, groups in enumerate(self.gpu_groups):
            for capacity in self.capacities:
                for policy in self.policies:
                    yield ReplayTask(
                        setup=self.setup,
                        trace_number=number,
                        policy=policy,
                        capacity_tokens=capacity,
                        gpu_groups=groups,
                    )

    def ceilings(self) -> Iterator[ReplayTask]:
        """A cache without bounds, of each trace."""
        setup = Setup(costs=self.setup.costs, warm_share=self.setup.warm_share)
        for number in range(len(self.traces)):
            yield ReplayTask(setup=setup, trace_number=number, policy=PolicyChoice("lru"), capacity_tokens=None)

    def baselines(self) -> Iterator[ComputedTask]:
        """No cache at all, of each trace."""
        for number, groups in enumerate(self.gpu_groups):
            yield ComputedTask(self.setup, number, groups)

    def bounds(self) -> Iterator[BoundsTask]:
        """Of all tiers together, whose pages are at best all different ones."""
        if not (self.with_bounds or self.with_plots):
            return
        for number, trace in enumerate(self.traces):
            fixed = [pages_of(tier.capacity_tokens, trace.block_tokens) or 0 for tier in self.setup.tiers]
            for capacity in self.capacities:
                pages = pages_of(capacity, trace.block_tokens)
                if pages is not None:
                    yield BoundsTask(self.setup, number, pages + sum(fixed), self.with_bounds)

    def policy_costs(self) -> Iterator[PolicyCostTask]:
        """Of each policy, at the first capacity."""
        for number in range(len(self.traces)):
            for policy in dict.fromkeys(PolicyChoice(policy.eviction, policy.write) for policy in self.policies):
                if not write_policy_of(policy.write).ahead_share:  # which needs a tier above it
                    yield PolicyCostTask(number, policy, self.capacities[0])

    def orphans(self) -> Iterator[OrphanTask]:
        """Of each eviction policy that the report compares."""
        for number, trace in enumerate(self.traces if self.with_plots else ()):
            for pages in (pages_of(capacity, trace.block_tokens) for capacity in self.capacities):
                for eviction in dict.fromkeys(policy.eviction for policy in self.policies):
                    if pages is not None and eviction != "continuation":  # which learns from whole requests
                        yield OrphanTask(number, eviction, pages)

    def ttl_curve(self) -> Iterator[TtlTask]:
        """For the report."""
        for number in range(len(self.traces) if self.with_plots else 0):
            yield TtlTask(number, TTLS_S)


@click.command()
@click.option(
    "--trace", "paths", metavar="FILE", multiple=True, help="Mooncake, Claude Code or Azure; may be repeated."
)
@click.option("--agents", type=click.IntRange(1), metavar="N", help="Also N generated sessions of coding agents.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N requests, or sessions.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the starts of sessions.")
@click.option("--session-gap", "session_gap_s", type=float, default=SESSION_GAP_S, show_default=True, metavar="SECONDS")
@click.option("--warm", "warm_share", type=click.FloatRange(0, 0.99), default=0.0, help="Requests that do not count.")
@click.option("--model", metavar="NAME", help="A model of `hicache plan`, or a config.json; for a machine as hardware.")
@click.option(
    "--hardware", default=HARDWARE_DEFAULT, show_default=True, help="A published rig, or a machine of the planner."
)
@click.option(
    "--gpus", type=int, default=1, show_default=True, help="GPUs of the machine that serve a request together."
)
@click.option("--l3", metavar="NAME", help="Which of the machine's tiers L3 is.")
@click.option(
    "--groups",
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="So many times those GPUs; else as computing all needs.",
)
@click.option(
    "--policies", metavar="LIST", help="EVICTION, EVICTION+WRITE or EVICTION+WRITE+READ, with commas between."
)
@click.option("--capacities", metavar="LIST", help="In tokens, such as 512k,3M; inf for no limit.")
@click.option(
    "--tiers", default="L2", show_default=True, help="Such as L1:200k,L2:2M:lru:write_through,L3: the last is studied."
)
@click.option(
    "--speedup", "speedups", default="1", show_default=True, help="Open loop: the trace so many times as fast."
)
@click.option("--clients", metavar="LIST", help="Closed loop: so many clients, each with a request at a time.")
@click.option("--overlap", type=click.Choice(get_args(Overlap)), default="serial", show_default=True)
@click.option(
    "--decode-ms", type=float, default=10.0, show_default=True, help="Of one token of every request under way."
)
@click.option("--untimed", is_flag=True, help="Only what is found and written: no queues, no TTFT.")
@click.option(
    "--drive-tb", type=float, default=7.68, show_default=True, help="What drive writes per day are counted of."
)
@click.option("--write-amplification", type=float, default=1.0, show_default=True, help="Bytes a drive writes for one.")
@click.option("--processes", type=click.IntRange(1, 256), metavar="N", help="As many as there are cores otherwise.")
@click.option("--json", "json_path", metavar="FILE", help="Write everything as JSON; - for stdout.")
@click.option("--bounds", is_flag=True, help="Also what no policy can beat: a linear program, of minutes; needs scipy.")
@click.option("--report", metavar="DIR", help="Also an HTML page with plots, with Belady's rule; needs matplotlib.")
@click.option("--quick", is_flag=True, help="Two policies, Mooncake's conversations; ends within 45 s.")
def main(**options: Any) -> None:
    """Replay request traces: each policy at each capacity, in parallel processes."""
    load_before = os.getloadavg()[0]
    console = Console(stderr=options["json_path"] == "-", width=None if sys.stdout.isatty() else 160)
    try:
        study = read_study(options)
        document = carry_out(study, console, options["processes"] or os.cpu_count() or 1)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    document = {"format": 1, "machine": machine_facts(load_before), **document}
    for trace in document["traces"]:
        console.print(table_of(document, trace))
        for line in verdicts(document, trace):
            console.print(line, highlight=False)
    if options["json_path"] is not None:
        write_json(document, options["json_path"])
    if options["report"] is not None:
        console.print(f"report: {write_report(document, options['report'])}")


def read_study(options: dict[str, Any]) -> Study:
    """What the options stand for, with all traces read. Raises ConfigError."""
    quick: bool = options["quick"]
    rig = priced(options["model"], options["hardware"], gpus=options["gpus"], l3=options["l3"])
    setup = _setup(options, rig)
    policies = options["policies"] or (POLICIES_QUICK if quick else POLICIES_DEFAULT)
    capacities = options["capacities"] or ("3M" if quick else CAPACITIES_DEFAULT)
    choices = tuple(dict.fromkeys(parse_policies(policies, setup.tiers)))
    tokens = tuple(dict.fromkeys(parse_tokens(text) for text in capacities.split(",")))
    traces = list(_traces(options))
    for trace in traces:
        for capacity in (*tokens, *(tier.capacity_tokens for tier in setup.tiers)):
            pages_of(capacity, trace.block_tokens)
    return Study(
        rig,
        setup,
        choices,
        tokens,
        traces,
        [options["groups"] or groups_needed(trace, rig.costs) for trace in traces],
        options["bounds"],
        options["report"] is not None,
    )


def _setup(options: dict[str, Any], rig: Rig) -> Setup:
    for name, low in (("session_gap_s", 0.0), ("drive_tb", 0.0), ("write_amplification", 0.0)):
        if not low < options[name] < 1e9:
            raise ConfigError(name, options[name], "a number above 0, and below 1e9")
    loads = (*parse_loads(options["speedups"], options["clients"]), Load(saturated=True))
    return Setup(
        costs=rig.costs,
        tiers=parse_tiers(options["tiers"], rig.costs),
        loads=() if options["untimed"] else loads,
        queueing=Queueing(overlap=options["overlap"], decode_token_s=options["decode_ms"] / 1e3),
        warm_share=options["warm_share"],
        drive_bytes=options["drive_tb"] * 1e12,
        write_amplification=options["write_amplification"],
    )


def _traces(options: dict[str, Any]) -> Iterator[Trace]:
    how = {"seed": options["seed"], "session_gap_s": options["session_gap_s"]}
    paths = options["paths"]
    if not paths and not options["agents"]:
        paths = [TRACES / name for name in TRACES_DEFAULT[: 1 if options["quick"] else None]]
    for path in paths:
        yield load_trace(path, limit=options["limit"], **how)
    if options["agents"]:
        yield agent_sessions(options["agents"], **how)


def carry_out(study: Study, console: Console, processes: int) -> Row:
    """Run all tasks of a study; what the JSON says of it, which is all that tables and plots are made from."""
    parts: dict[str, Sequence[Task]] = {
        "ceilings": list(study.ceilings()),
        "computed": list(study.baselines()) if study.setup.loads else [],
        "runs": list(study.replays()),
        "bounds": list(study.bounds()),
        "policy_cost": list(study.policy_costs()),
        "orphans": list(study.orphans()),
        "ttl": list(study.ttl_curve()),
    }
    rows = iter(run_all(study.traces, [task for tasks in parts.values() for task in tasks], console, processes))
    found = {name: [next(rows) for _ in tasks] for name, tasks in parts.items()}
    ceilings = found.pop("ceilings")
    for run in found["runs"]:
        run["regret"] = _regret_of(run, found["bounds"])
    return {
        "setup": _described_setup(study),
        "traces": [
            _described(trace, ceiling, groups)
            for trace, ceiling, groups in zip(study.traces, ceilings, study.gpu_groups, strict=True)
        ],
        **found,
        "break_even": break_even(study.rig.name, study.rig.costs),
    }


def _regret_of(run: Row, bounds: Sequence[Row]) -> tuple[float, float] | None:
    for bound in bounds:
        if (bound["trace"], bound["capacity_pages"]) == (run["trace"], run["total_pages"]):
            return regret(saved_share(run), bound)
    return None


def _described_setup(study: Study) -> Row:
    setup = study.setup
    return {
        "rig": study.rig.name,
        "source": study.rig.source,
        "token_bytes": setup.costs.token_bytes,
        "state_bytes": setup.costs.state_bytes,
        "tiers": [asdict(tier) for tier in setup.tiers],
        "loads": [load.name for load in setup.loads],
        "overlap": setup.queueing.overlap,
        "decode_token_s": setup.queueing.decode_token_s,
        "warm_share": setup.warm_share,
        "drive_bytes": setup.drive_bytes,
        "write_amplification": setup.write_amplification,
    }


def _described(trace: Trace, ceiling: Row, gpu_groups: int) -> Row:
    """A trace, with what a cache without bounds would find."""
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "references": trace.references,
        "blocks": trace.block_count,
        "block_tokens": trace.block_tokens,
        "span_s": ceiling["span_s"],
        "tenants": len(ceiling["by_tenant"]),
        "gpu_groups": gpu_groups,
        "input_tokens": ceiling["input_tokens"],
        "ceiling_tokens": ceiling["usable_tokens"],
        "ceiling_gpu_s": ceiling["gpu_s_saved"],
        "gpu_s_total": ceiling["gpu_s_total"],
    }


if __name__ == "__main__":
    main()
