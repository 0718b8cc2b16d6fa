"""`hicache verify`: reads and checks what is stored, in a running daemon or in a directory."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from hicache.admin.progress import verify_line
from hicache.admin.store_messages import VERIFY_BYTES_PER_S, VerifyLine, VerifyRequest, check_verify_rate
from hicache.admin.verbs import VERIFY
from hicache.cli.admin import SILENCE_S, admin_of, lines, tenant_names
from hicache.cli.amounts import parse_rate, size_text
from hicache.cli.options import EXIT_BAD, admin_options, encryption_keys_option, json_option, write_json
from hicache.errors import AdminRefused, ConfigError, DaemonUnreachable
from hicache.tenancy import tenant_digest

LINE_INTERVAL_S = 0.5


@click.command(
    epilog="\b\nExamples:\n  hicache verify --rate 100MiB/s\n  hicache verify --path /var/lib/hicached --json -"
)
@click.option(
    "--rate",
    default=f"{VERIFY_BYTES_PER_S >> 20}MiB/s",
    show_default=True,
    metavar="RATE",
    help="Payload to read a second.",
)
@click.option("--namespace", default="", metavar="DIGEST", help="Only this namespace; its first 8 digits are enough.")
@click.option("--tenant", metavar="NAME", help="Only what this tenant has.")
@click.option("--after", default="", metavar="KEY", help="Go on where an earlier verify said that it stopped.")
@click.option("--path", metavar="DIR", help="Directory of a store that no hicached has open, instead of asking one.")
@encryption_keys_option
@admin_options
@json_option
def verify(
    rate: str,
    namespace: str,
    tenant: str | None,
    after: str,
    path: str | None,
    encryption_keys: str,
    admin: str,
    token_file: str | None,
    json_path: str | None,
) -> None:
    """Read every object and check it; drop what is corrupt, so that it is a miss and not an error.

    A running hicached does it in the background, at a bounded rate, without changing what is evicted next. Ends with 1
    when something was corrupt or could not be read.
    """
    request = VerifyRequest(bytes_per_s=parse_rate("rate", rate), namespace=namespace, after=after)
    latest = VerifyLine(objects=0, payload_bytes=0, after=after)
    try:
        if path:
            found = _offline(Path(path), encryption_keys, request, tenant)
        else:
            found = _online(admin, token_file, request, tenant)
        for latest in found:
            _show(latest)
    except KeyboardInterrupt:
        _tell_where(latest)
        sys.exit(128 + signal.SIGINT)
    except (AdminRefused, DaemonUnreachable):
        if latest.objects:
            _tell_where(latest)
        raise
    _show(latest, end="\n")
    is_good = latest.corrupt == latest.unreadable == 0
    write_json(json_path, {"format": 1, "is_good": is_good} | _as_json(latest))
    if not is_good:
        sys.exit(EXIT_BAD)


def _tell_where(latest: VerifyLine) -> None:
    """It has ended early."""
    _show(latest, end="\n")
    where = f"--after {latest.after}" if latest.after else "no --after"
    click.echo(f"hicache: stopped; go on with {where}", err=True)


def _as_json(line: VerifyLine) -> dict[str, object]:
    names = ("objects", "payload_bytes", "corrupt", "unreadable", "gone", "after", "is_done")
    return {name: getattr(line, name) for name in names}


def _online(admin: str, token_file: str | None, request: VerifyRequest, tenant: str | None) -> Iterator[VerifyLine]:
    daemon = admin_of(admin, token_file)
    with daemon.open(VERIFY, request, names=tenant_names(tenant), silence_s=SILENCE_S) as parts:
        yield from lines(parts, VerifyLine)


def _offline(directory: Path, encryption_keys: str, request: VerifyRequest, tenant: str | None) -> Iterator[VerifyLine]:
    from hicache.backends.namespaces import parse_namespace
    from hicache.backends.offline import open_offline
    from hicache.backends.scrub import Part, ScrubProgress, scrub

    tag = parse_namespace(request.namespace) if request.namespace else None
    part = Part(b"" if tenant is None else tenant_digest(tenant), tag)
    try:
        after = bytes.fromhex(request.after)
    except ValueError as error:
        raise ConfigError("after", request.after, "a key in hexadecimal, as an earlier verify told it") from error
    store = open_offline(directory, encryption_keys=encryption_keys)
    try:
        usage = store.usage()
        check_verify_rate(request.bytes_per_s, payload_bytes=usage.payload_bytes)
        progress = ScrubProgress(after)
        started_s = told_s = time.monotonic()
        for progress in scrub(
            store,
            after=after,
            part=part,
        ):
            if time.monotonic() - told_s >= LINE_INTERVAL_S:
                told_s = time.monotonic()
                yield verify_line(progress, objects_stored=usage.objects, is_done=False)
            time.sleep(max(0.0, progress.payload_bytes / request.bytes_per_s - (time.monotonic() - started_s)))
        yield verify_line(progress, objects_stored=usage.objects, is_done=True)
    finally:
        store.close()


def _show(line: VerifyLine, *, end: str = "") -> None:
    """One line that is written over, on a terminal; only the last one elsewhere."""
    if not end and not sys.stderr.isatty():
        return
    of = f" of {line.objects_stored}" if line.objects_stored else ""
    text = (
        f"{line.objects}{of} objects, {size_text(line.payload_bytes)} verified, {line.corrupt} corrupt (dropped), "
        f"{line.unreadable} unreadable, {line.gone} gone meanwhile"
    )
    click.echo(f"\r{text}\x1b[K" if sys.stderr.isatty() else text, nl=False, err=True)
    click.echo(end, nl=False, err=True)
