"""`hicache tenants`: who may have what, with tokens that are shown once and kept nowhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from hicache.admin.client import Admin
from hicache.admin.store_messages import DropLine
from hicache.admin.tenant_messages import TenantAdd, TenantChange, TenantList
from hicache.admin.verbs import RELOAD, TENANT_ADD, TENANT_CHANGE, TENANT_ERASE, TENANTS
from hicache.cli.admin import SILENCE_S, admin_of, fail, lines
from hicache.cli.amounts import parse_age, size_text, time_text
from hicache.cli.options import EXIT_BAD, EXIT_USAGE, admin_options, json_option, say, write_json
from hicache.errors import AdminRefused, ConfigError, DaemonUnreachable

RELOAD_S = 60.0


def _file_option(command: Callable[..., Any]) -> Callable[..., Any]:  # Any: what click decorates
    return click.option(
        "--file",
        metavar="FILE",
        help="Change this tenants file here and reload hicached, where hicached itself may not write to it.",
    )(command)


def _limit_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--set",
        "limits",
        multiple=True,
        metavar="LIMIT=VALUE",
        help="A limit of its own, such as quota_bytes=200GiB; several times for several.",
    )(command)


@click.group()
def tenants() -> None:
    """List, add, limit and erase the tenants of hicached, and give them new tokens."""


@tenants.command("list", epilog="\b\nExamples:\n  hicache tenants list\n  hicache tenants list --json -")
@admin_options
@json_option
def list_tenants(admin: str, token_file: str | None, json_path: str | None) -> None:
    """Show who there is, what each has, and what limits it."""
    found = admin_of(admin, token_file).ask(TENANTS)
    write_json(json_path, msgspec.to_builtins(found))
    if json_path != "-":
        _table(found)


@tenants.command(
    epilog="\b\nExamples:\n  hicache tenants add alice --set quota_bytes=200GiB --set weight=2\n"
    "  hicache tenants add alice --token-out /etc/engine/token"
)
@click.argument("name")
@_limit_option
@click.option("--token-out", metavar="FILE", help="Write the token there, for its owner only, and do not print it.")
@_file_option
@admin_options
@json_option
def add(
    name: str,
    limits: tuple[str, ...],
    token_out: str | None,
    file: str | None,
    admin: str,
    token_file: str | None,
    json_path: str | None,
) -> None:
    """Make a tenant NAME, and print its token: once, since hicached keeps a hash of it only."""
    from hicache.daemon.tenants_file import add_tenant, check_settings, new_token

    given = _limits(limits)
    check_settings(given)
    token = new_token()
    daemon = admin_of(admin, token_file)
    if file is not None:
        _change_here(file, add_tenant(name, _hashed(token), given), daemon, is_new=True)
    else:
        daemon.ask(TENANT_ADD, TenantAdd(name=name, token_sha256=_hashed(token), limits=given), timeout_s=RELOAD_S)
    _hand_over(name, token, token_out, json_path)


@tenants.command(
    epilog="\b\nExamples:\n  hicache tenants rotate alice\n  hicache tenants rotate alice --keep-old 1h --token-out t"
)
@click.argument("name")
@click.option("--keep-old", metavar="AGE", help="Let the old tokens hold for so long yet, so that engines can change.")
@click.option("--token-out", metavar="FILE", help="Write the token there, for its owner only, and do not print it.")
@_file_option
@admin_options
@json_option
def rotate(
    name: str,
    keep_old: str | None,
    token_out: str | None,
    file: str | None,
    admin: str,
    token_file: str | None,
    json_path: str | None,
) -> None:
    """Give tenant NAME a new token, and print it once. Sessions with an old token end with it."""
    from hicache.daemon.tenants_file import new_token, rotate_token

    now_s = time.time()
    until = "" if keep_old is None else time_text(now_s + parse_age("keep-old", keep_old))
    token = new_token()
    daemon = admin_of(admin, token_file)
    if file is not None:
        _change_here(file, rotate_token(name, _hashed(token), keeps_old_until=until, now_s=now_s), daemon)
    else:
        change = TenantChange(token_sha256=_hashed(token), keeps_old_until=until)
        daemon.ask(TENANT_CHANGE, change, names={"tenant": name}, timeout_s=RELOAD_S)
    _hand_over(name, token, token_out, json_path)


@tenants.command(
    epilog="\b\nExamples:\n  hicache tenants quota alice quota_bytes=500GiB ttl_s=86400\n"
    "  hicache tenants quota alice quota_bytes="
)
@click.argument("name")
@click.argument("limits", nargs=-1, required=True, metavar="LIMIT=VALUE...")
@_file_option
@admin_options
@json_option
def quota(
    name: str, limits: tuple[str, ...], file: str | None, admin: str, token_file: str | None, json_path: str | None
) -> None:
    """Change limits of tenant NAME: weight, quota_bytes, ttl_s, ...; LIMIT= without a value gives the default back."""
    from hicache.daemon.tenants_file import change_settings, check_settings

    given = _limits(limits)
    check_settings(given)
    daemon = admin_of(admin, token_file)
    if file is not None:
        _change_here(file, change_settings(name, given), daemon)
    else:
        daemon.ask(TENANT_CHANGE, TenantChange(limits=given), names={"tenant": name}, timeout_s=RELOAD_S)
    say(f"{name}: {' '.join(limits)}", json_path=json_path)
    write_json(json_path, {"format": 1, "tenant": name, "limits": given})


@tenants.command(epilog="\b\nExamples:\n  hicache tenants erase alice\n  hicache tenants erase alice --remove --yes")
@click.argument("name")
@click.option("--remove", is_flag=True, help="Remove the tenant from the file first: its sessions end, none comes.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_file_option
@admin_options
@json_option
def erase(
    name: str, remove: bool, yes: bool, file: str | None, admin: str, token_file: str | None, json_path: str | None
) -> None:
    """Delete all that tenant NAME has stored; where objects are encrypted, its key is dropped first."""
    from hicache.daemon.tenants_file import remove_tenant

    if file is not None and not remove:
        raise ConfigError("file", file, "--remove beside it: nothing else of an erase changes the file")
    daemon = admin_of(admin, token_file)
    if not yes:
        click.confirm(f"Delete all objects of tenant {name!r}?", abort=True, err=True)
    if file is not None:
        _change_here(file, remove_tenant(name), daemon)
    names = {"tenant": name} | ({"remove": "1"} if remove and file is None else {})
    last = DropLine(objects=0, payload_bytes=0)
    try:
        with daemon.open(TENANT_ERASE, names=names, silence_s=SILENCE_S) as parts:
            [last] = deque(_shown(lines(parts, DropLine)), maxlen=1)
    except AdminRefused as refused:
        if file is None or refused.status != 404:  # the file had the tenant: it has stored nothing
            raise
    say(f"{name}: {last.objects} objects of {size_text(last.payload_bytes)} deleted", json_path=json_path)
    document = {"format": 1, "tenant": name, "objects": last.objects, "payload_bytes": last.payload_bytes}
    write_json(json_path, document | {"failed": last.failed, "removed": remove})
    if last.failed:
        fail(f"{last.failed} objects could not be deleted: see the log of hicached, and run this again", EXIT_BAD)


def _shown(found: Any) -> Any:  # Any: an iterator of DropLine in and out
    for line in found:
        if sys.stderr.isatty():
            click.echo(f"\r{line.objects} objects deleted\x1b[K", nl=line.is_done, err=True)
        yield line


def _limits(words: tuple[str, ...]) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name in given or len(value.split()) > 1:
            raise ConfigError("limit", word, "LIMIT=VALUE, each limit once, such as quota_bytes=200GiB")
        given[name] = value
    return given


def _hashed(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def _change_here(file: str, edit: Callable[[str], str], daemon: Admin, *, is_new: bool = False) -> None:
    """Changes the file as this user, and has a daemon that runs take it."""
    from hicache.daemon.tenants_file import change_file, write_file

    before = change_file(file, edit, is_new=is_new)
    try:
        daemon.ask(RELOAD, timeout_s=RELOAD_S)
    except DaemonUnreachable:
        click.echo(
            f"hicache: {file} is changed; no hicached runs at {daemon.address}: it holds from its start", err=True
        )
    except Exception:
        if before:
            write_file(file, before, check=False)
        raise


def _hand_over(name: str, token: str, token_out: str | None, json_path: str | None) -> None:
    """The token goes to one place."""
    if token_out is not None:
        _write_token(token_out, token)
        say(f"the token of {name} is in {token_out}", json_path=json_path)
        write_json(json_path, {"format": 1, "tenant": name, "token_out": token_out})
        return
    write_json(json_path, {"format": 1, "tenant": name, "token": token})
    if json_path is None:
        click.echo(token)
        click.echo(f"hicache: this is the token of {name}; it is shown once", err=True)


def _write_token(path: str, token: str) -> None:
    import os

    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as target:
            os.fchmod(target.fileno(), 0o600)
            target.write(token + "\n")
    except OSError as error:
        click.echo(token)
        fail(f"{path} cannot be written ({error.strerror}): the token is shown above, once", EXIT_USAGE)


def _table(found: TenantList) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("tenant")
    for column in ("objects", "space", "quota", "weight", "sessions"):
        table.add_column(column, justify="right")
    for row in found.tenants:
        quota_bytes = row.limits.get("quota_bytes", 0)
        table.add_row(
            row.name,
            str(row.objects),
            size_text(row.stored_bytes),
            size_text(quota_bytes) if quota_bytes else "-",
            f"{row.limits.get('weight', 1):g}",
            str(row.sessions),
        )
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)
