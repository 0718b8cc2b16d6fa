"""`hicache trace`: what engines ask a running hicached for, written down for a replay."""

from __future__ import annotations

import os
from typing import BinaryIO

import click

from hicache.admin.store_messages import TraceRequest
from hicache.admin.verbs import TRACE
from hicache.cli.admin import admin_of, fail
from hicache.cli.amounts import parse_age, parse_size, size_text
from hicache.cli.options import EXIT_BAD, admin_options, json_option, say, write_json
from hicache.errors import ConfigError, DaemonUnreachable

SLACK_S = 60.0  # of the daemon, after the time that was asked for


@click.group()
def trace() -> None:
    """Record what engines ask hicached for: times, counts and hashed names, no keys and no tenants' names."""


@trace.command(
    epilog="\b\nExamples:\n  hicache trace record --out trace.jsonl --for 10m\n"
    "  python -m bench.admission --trace trace.jsonl"
)
@click.option("--out", required=True, metavar="FILE", help="Where to; one that is there is replaced.")
@click.option(
    "--for", "duration", default="10m", show_default=True, metavar="AGE", help="How long; Ctrl-C ends it, too."
)
@click.option("--max-bytes", default="256MiB", show_default=True, metavar="SIZE", help="Size at which the trace ends.")
@click.option("--block-tokens", default=64, show_default=True, help="Tokens of a page of the engines.")
@admin_options
@json_option
def record(
    out: str,
    duration: str,
    max_bytes: str,
    block_tokens: int,
    admin: str,
    token_file: str | None,
    json_path: str | None,
) -> None:
    """Record from now on, as `python -m bench.admission --trace FILE` replays it. hicached is not restarted."""
    seconds = parse_age("for", duration)
    request = TraceRequest(seconds=seconds, bytes_max=parse_size("max-bytes", max_bytes), block_tokens=block_tokens)
    daemon = admin_of(admin, token_file)
    written = requests = 0
    try:
        with daemon.open(TRACE, request, silence_s=seconds + SLACK_S) as parts, _created(out) as target:
            try:
                for part in parts:
                    written += target.write(part)
                    requests += part.count(b"\n")
            except DaemonUnreachable as error:
                fail(f"the trace broke off: {error}; {out} has {requests} requests", EXIT_BAD)
    except KeyboardInterrupt:
        say("stopped", json_path=json_path)
    say(f"{requests} requests, {size_text(written)}, in {out}", json_path=json_path)
    write_json(json_path, {"format": 1, "file": out, "requests": requests, "bytes": written})


def _created(out: str) -> BinaryIO:
    try:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError("out", out, f"a file that can be written ({error.strerror})") from error
    return os.fdopen(fd, "wb")
