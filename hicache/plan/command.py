"""`hicache plan` on the command line: options, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hicache.costs.machine import GB, GIB, MACHINES, Machine, machine
from hicache.errors import ConfigError
from hicache.plan import dtypes
from hicache.plan.engine_flags import VERSIONS, engine_flags
from hicache.plan.lengths import LengthMix
from hicache.plan.plan import Plan, make_plan
from hicache.plan.presets import CONFIGS, model
from hicache.plan.report import show
from hicache.plan.reuse import ReuseCurve
from hicache.plan.settings import Settings
from hicache.plan.tiers import L2_STATE_SHARE, TTLS_S, TierRequest
from hicache.plan.workload import Workload, read_workload

EXIT_INFEASIBLE = 3
REPORT_COLUMNS = 132
AMOUNT_MAX = 1e9  # GiB, GB or TB
PARAMETERS_MAX = 1e15


@click.command(epilog=f"Built-in models: {', '.join(CONFIGS)}.")
@click.argument("model_name", metavar="MODEL")
@click.option(
    "--machine",
    "machine_name",
    default="b300-hgx",
    show_default=True,
    help=f"One of {', '.join(MACHINES)}, or a .json.",
)
@click.option("--gpu-gb", type=float, help="GPU memory to plan with in 10^9 bytes, in place of the machine's.")
@click.option("--engine", type=click.Choice(list(VERSIONS)), default="sglang", show_default=True)
@click.option("--tp", default=1, show_default=True, help="Ranks that share the heads of an attention layer.")
@click.option("--pp", default=1, show_default=True, help="Pipeline stages.")
@click.option("--dp", default=1, show_default=True, help="Attention groups with requests of their own.")
@click.option("--ep", type=int, help="GPUs that share a layer's experts; by default tp x dp.")
@click.option("--dcp", default=1, show_default=True, help="Of the tp ranks, those that share a sequence's tokens.")
@click.option("--kv-dtype", default="bfloat16", show_default=True, help=f"One of {', '.join(dtypes.KV_DTYPES)}.")
@click.option("--state-dtype", help=f"One of {', '.join(dtypes.STATE_DTYPES)}; by default the model's.")
@click.option("--conv-dtype", default="bfloat16", show_default=True)
@click.option(
    "--strategy",
    type=click.Choice(["no_buffer", "extra_buffer", "extra_buffer_lazy"]),
    default="extra_buffer",
    show_default=True,
    help="How SGLang keeps states for its radix cache.",
)
@click.option("--no-overlap", is_flag=True, help="Without overlap scheduling.")
@click.option("--no-radix-cache", is_flag=True, help="Without a prefix cache in GPU memory.")
@click.option("--skip-decode-lock", is_flag=True, help="SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.")
@click.option("--draft-tokens", default=0, show_default=True, help="Tokens that a step verifies, the anchor included.")
@click.option("--draft-layers", default=0, show_default=True, help="Attention layers of a draft like its target.")
@click.option("--replay-ring", is_flag=True, help="ReplaySSM rings in place of a state for each draft token.")
@click.option("--ring-depth", type=int, help="Tokens of a ring; by default from --draft-tokens.")
@click.option("--page-tokens", default=64, show_default=True)
@click.option(
    "--memory-fraction", type=float, help="Share of GPU memory; by default at most 0.85 (SGLang), 0.92 (vLLM)."
)
@click.option(
    "--fraction-of",
    type=click.Choice(["total", "free"]),
    default="total",
    show_default=True,
    help="What the share is of: SGLang and vLLM total, TensorRT-LLM free at start.",
)
@click.option("--reserved-gib", default=0.0, show_default=True, help="Activations and graphs within that share.")
@click.option("--rest-gib", type=float, help="What is left for KV and state, where it has been measured.")
@click.option("--max-running-requests", type=int, help="The engine's limit, over all dp ranks.")
@click.option("--state-slots", type=int, help="State slots over all dp ranks, in place of a ratio.")
@click.option("--ratio", default=0.9, show_default=True, help="State to KV; SGLang's --mamba-full-memory-ratio.")
@click.option("--solve-ratio", is_flag=True, help="The ratio at which most requests of the lengths run.")
@click.option("--window-ratio", default=0.8, show_default=True, help="Window tokens to full tokens, in SGLang.")
@click.option("--chunk-tokens", default=8192, show_default=True, help="Chunked prefill, before it is divided by dp.")
@click.option("--context-tokens", type=int, help="The longest sequence; by default the model's.")
@click.option("--input-tokens", default=8192, show_default=True)
@click.option("--output-tokens", default=1024, show_default=True)
@click.option("--lengths", help="A mix of prompts, TOKENS:SHARE,TOKENS:SHARE,..., in place of --input-tokens.")
@click.option("--trace", metavar="FILE", help="Lengths and reuse of a trace: Mooncake's form, sessions, or Azure's.")
@click.option("--concurrency", type=int, help="Requests that have to run beside each other; else one.")
@click.option("--l2-gib", default=0.0, show_default=True, help="Host memory of each rank.")
@click.option("--l2-state-share", default=L2_STATE_SHARE, show_default=True)
@click.option("--l3-tb", default=0.0, show_default=True, help="L3 in 10^12 bytes, over all drives.")
@click.option("--drive-tb", default=0.0, show_default=True, help="The drives of L3 in 10^12 bytes; by default --l3-tb.")
@click.option("--write-amplification", default=1.0, show_default=True, help="Bytes a drive writes for each one sent.")
@click.option("--ttl", "ttls", type=float, multiple=True, help="Seconds; several, by default 60 300 600 1800 3600.")
@click.option("--rate", default=1.0, show_default=True, help="Times the trace's requests a second.")
@click.option("--active-parameters", type=float, help="Of a token, without embeddings; by default from the config.")
@click.option("--explain", is_flag=True, help="Each figure with its formula, its numbers and its source.")
@click.option("--engine-flags", "flags_for", type=click.Choice(list(VERSIONS)), help="Print the engine's flags only.")
@click.option("--json", "json_path", metavar="FILE", help="Write the plan as JSON; - for stdout.")
def plan(**options: Any) -> None:  # Any: as click parsed them
    """Size MODEL's caches on a machine, before anything is deployed.

    MODEL is the path of a config.json, or a built-in name. The exit code is 3 where the request is infeasible.
    """
    if options["solve_ratio"] and options["state_slots"] is not None:
        raise ConfigError("state_slots", options["state_slots"], "none with --solve-ratio: it takes the slots' place")
    if options["flags_for"] and options["json_path"] == "-":
        raise ConfigError("json", "-", "a file with --engine-flags, which prints to stdout too")
    workload = None if options["trace"] is None else read_workload(options["trace"])
    settings = read_settings(options, workload)
    found = make_plan(settings, read_tiers(options, workload), solve_ratio=options["solve_ratio"])
    if options["flags_for"]:
        flags = engine_flags(options["flags_for"], found.settings, found.capacity, l2_bytes=found.l2_bytes)
        click.echo(str(flags))
    elif options["json_path"] == "-":
        click.echo(as_text(found))
    else:
        width = max(REPORT_COLUMNS, Console().width)
        show(found, Console(width=width, highlight=False), explain=options["explain"])
    if options["json_path"] not in (None, "-"):
        write_json(options["json_path"], found)
    if not found.is_feasible:
        raise SystemExit(EXIT_INFEASIBLE)


def write_json(path: str, found: Plan) -> None:
    """Raises ConfigError for a file that cannot be written."""
    try:
        Path(path).write_text(as_text(found))
    except OSError as error:
        raise ConfigError("json", path, f"a file that can be written, or - ({error})") from error


def as_text(found: Plan) -> str:
    """The plan as JSON text."""
    return json.dumps(found.as_json(), indent=2)


def read_settings(options: dict[str, Any], workload: Workload | None = None) -> Settings:
    """The settings that options stand for. Raises ConfigError."""
    place = machine(options["machine_name"])
    if options["gpu_gb"] is not None:
        place = _with_memory(place, options["gpu_gb"])
    return Settings(
        model=model(options["model_name"]),
        machine=place,
        overlap=not options["no_overlap"],
        radix_cache=not options["no_radix_cache"],
        reserved_bytes=_bytes(options, "reserved_gib", GIB),
        rest_bytes=None if options["rest_gib"] is None else _bytes(options, "rest_gib", GIB),
        lengths=_lengths(options, workload),
        **{name: options[name] for name in _SAME_NAMES},
    )


_SAME_NAMES = (
    "engine",
    "tp",
    "pp",
    "dp",
    "ep",
    "dcp",
    "kv_dtype",
    "state_dtype",
    "conv_dtype",
    "strategy",
    "skip_decode_lock",
    "draft_tokens",
    "draft_layers",
    "replay_ring",
    "ring_depth",
    "page_tokens",
    "memory_fraction",
    "fraction_of",
    "max_running_requests",
    "state_slots",
    "ratio",
    "window_ratio",
    "chunk_tokens",
    "context_tokens",
    "concurrency",
)


def read_tiers(options: dict[str, Any], workload: Workload | None) -> TierRequest:
    """What options ask about tiers. Raises ConfigError."""
    for name in ("rate", "write_amplification", "active_parameters"):
        if options[name] is not None:
            _check_above_zero(name, options[name])
    for ttl_s in options["ttls"]:
        _check_above_zero("ttl", ttl_s)
    traced = workload if workload is not None and workload.has_blocks else None
    return TierRequest(
        l2_bytes=_bytes(options, "l2_gib", GIB),
        l2_state_share=options["l2_state_share"],
        l3_bytes=_bytes(options, "l3_tb", 1000 * GB),
        drive_bytes=_bytes(options, "drive_tb", 1000 * GB),
        write_amplification=options["write_amplification"],
        curve=None if traced is None else ReuseCurve(traced),
        workload=traced,
        ttls_s=options["ttls"] or TTLS_S,
        rate=options["rate"],
        active_parameters=options["active_parameters"],
    )


def _lengths(options: dict[str, Any], workload: Workload | None) -> LengthMix:
    if options["lengths"] is not None:
        return LengthMix.parse(options["lengths"], output_tokens=options["output_tokens"])
    if workload is not None:
        return workload.lengths
    return LengthMix.single(input_tokens=options["input_tokens"], output_tokens=options["output_tokens"])


def _with_memory(place: Machine, gpu_gb: float) -> Machine:
    _check_above_zero("gpu_gb", gpu_gb)
    return replace(place, name=f"{place.name} with {gpu_gb:g} GB", gpu_gb=gpu_gb)


def _bytes(options: Mapping[str, Any], name: str, unit: int) -> int:
    """A size that was given in units of so many bytes. Raises ConfigError."""
    if not 0 <= options[name] <= AMOUNT_MAX:
        raise ConfigError(name, options[name], f"a number from 0 to {AMOUNT_MAX:g}")
    size: int = round(options[name] * unit)
    return size


def _check_above_zero(name: str, value: float) -> None:
    if not 0 < value <= PARAMETERS_MAX:
        raise ConfigError(name, value, f"a number above 0, at most {PARAMETERS_MAX:g}")
