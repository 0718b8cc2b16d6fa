"""`hicache namespaces`: what lies in the store for which model, and dropping what no engine uses any more."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from hicache.admin.client import Admin
from hicache.admin.store_messages import DropLine, NamespaceRow, Namespaces
from hicache.admin.verbs import NAMESPACE_DROP, NAMESPACES
from hicache.backends.namespaces import parse_namespace
from hicache.cli.admin import SILENCE_S, WORK_S, admin_of, fail, lines, tenant_names
from hicache.cli.amounts import age_text, parse_age, size_text
from hicache.cli.options import EXIT_BAD, EXIT_USAGE, admin_options, json_option, say, write_json

DIGITS = 12  # of a digest, in a table


@click.group()
def namespaces() -> None:
    """List the namespaces in the store, and drop those that no engine uses any more.

    A namespace is all that engines must have equal to share bytes: model, revision, page size, dtypes, layout. An
    engine with another one finds nothing of it, and its objects stay until they are evicted or dropped.
    """


@namespaces.command(
    "list", epilog="\b\nExamples:\n  hicache namespaces list\n  hicache namespaces list --tenant alice --json -"
)
@click.option("--tenant", metavar="NAME", help="Only those of this tenant.")
@admin_options
@json_option
def list_namespaces(tenant: str | None, admin: str, token_file: str | None, json_path: str | None) -> None:
    """Show what is stored, by namespace: objects, space, last use, sessions of engines that use it now."""
    found = _ask(admin_of(admin, token_file), tenant)
    write_json(json_path, msgspec.to_builtins(found))
    if json_path != "-":
        _table(found)


@namespaces.command(
    epilog="\b\nExamples:\n  hicache namespaces drop --stale --older-than 7d --dry-run\n"
    "  hicache namespaces drop 3f2a9c01d4e5 --tenant alice --yes"
)
@click.argument("digest", required=False)
@click.option("--tenant", metavar="NAME", help="Whose; needed where several tenants have it.")
@click.option("--stale", is_flag=True, help="All that no engine uses now, and none has for --older-than.")
@click.option("--older-than", default="7d", show_default=True, metavar="AGE", help="With --stale: unused for so long.")
@click.option("--dry-run", is_flag=True, help="Only say what would be dropped, and the bytes that would be free.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@admin_options
@json_option
def drop(
    digest: str | None,
    tenant: str | None,
    stale: bool,
    older_than: str,
    dry_run: bool,
    yes: bool,
    admin: str,
    token_file: str | None,
    json_path: str | None,
) -> None:
    """Delete the objects of the namespace DIGEST, whose first 8 digits are enough, or of all that are stale."""
    if stale == (digest is not None):
        fail("name one namespace, or give --stale: `hicache namespaces list` shows what there is", EXIT_USAGE)
    tag = None if digest is None else parse_namespace(digest)
    age_s = parse_age("older-than", older_than)
    daemon = admin_of(admin, token_file)
    found = _ask(daemon, tenant)
    chosen = [row for row in found.namespaces if (_is_stale(row, found.at_s, age_s) if tag is None else _is(row, tag))]
    if not stale and not chosen:
        fail(f"no object of namespace {digest} is stored; `hicache namespaces list` shows what there is", EXIT_BAD)
    if not stale and len(chosen) > 1:
        owners = ", ".join(row.tenant for row in chosen)
        fail(f"namespace {digest} is stored for several tenants ({owners}): name one with --tenant", EXIT_USAGE)
    for row in chosen:
        say(_what(row, found.at_s), json_path=json_path)
    total_bytes = sum(row.stored_bytes for row in chosen)
    say(
        f"{len(chosen)} namespaces, {size_text(total_bytes)} {'would be' if dry_run else 'to be'} freed",
        json_path=json_path,
    )
    failed = 0
    dropped: list[dict[str, Any]] = []  # Any: what JSON takes
    if chosen and not dry_run:
        if not yes:
            click.confirm("Drop them?", abort=True, err=True)
        for row in chosen:
            line = _drop(daemon, row, only_idle=stale)
            failed += line.failed
            dropped.append({"tenant": row.tenant, "namespace": row.namespace, "objects": line.objects})
            say(f"dropped {line.objects} objects of {row.namespace[:DIGITS]} ({row.tenant})", json_path=json_path)
    write_json(
        json_path,
        {
            "format": 1,
            "dry_run": dry_run,
            "chosen": msgspec.to_builtins(chosen),
            "stored_bytes": total_bytes,
            "dropped": dropped,
            "failed": failed,
        },
    )
    if failed:
        fail(f"{failed} objects could not be deleted: see the log of hicached", EXIT_BAD)


def _ask(daemon: Admin, tenant: str | None) -> Namespaces:
    return daemon.ask(NAMESPACES, names=tenant_names(tenant), timeout_s=WORK_S)


def _drop(daemon: Admin, row: NamespaceRow, *, only_idle: bool) -> DropLine:
    names = {"namespace": row.namespace, "tenant": row.tenant} | ({"idle": "1"} if only_idle else {})
    with daemon.open(NAMESPACE_DROP, names=names, silence_s=SILENCE_S) as parts:
        [last] = deque(lines(parts, DropLine), maxlen=1)
    return last


def _is(row: NamespaceRow, tag: int) -> bool:
    """A tag is what objects keep of a namespace."""
    return parse_namespace(row.namespace) == tag


def _is_stale(row: NamespaceRow, now_s: float, age_s: float) -> bool:
    return not row.sessions and now_s - max(row.used_at_s, row.session_at_s or 0.0) >= age_s


def _what(row: NamespaceRow, now_s: float) -> str:
    return (
        f"{row.namespace[:DIGITS]} {row.model or '(model unknown)'} of {row.tenant}: {row.objects} objects, "
        f"{size_text(row.stored_bytes)}, last used {age_text(row.used_at_s, now_s)}"
    )


def _table(found: Namespaces) -> None:
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("namespace", "left"),
        ("model", "left"),
        ("tenant", "left"),
        ("objects", "right"),
        ("space", "right"),
        ("last used", "right"),
        ("sessions", "right"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]  # two words that it takes
    for row in found.namespaces:
        table.add_row(
            row.namespace[:DIGITS],
            row.model or "-",
            row.tenant,
            str(row.objects),
            size_text(row.stored_bytes),
            age_text(row.used_at_s, found.at_s),
            str(row.sessions),
        )
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)
