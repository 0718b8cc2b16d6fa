"""`hicache export` and `hicache import`: a namespace out of one store and into another."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from hicache.admin.progress import import_answer
from hicache.admin.store_messages import ImportAnswer
from hicache.admin.verbs import EXPORT, IMPORT
from hicache.backends.archive import (
    ArchiveEnd,
    ArchiveError,
    ArchiveHeader,
    ArchiveReader,
    encode_end,
    encode_header,
    encode_object_head,
)
from hicache.backends.base import UNKNOWN_TAG
from hicache.backends.exports import export_namespace, import_namespace
from hicache.backends.namespaces import NamespaceNames, namespace_tag, parse_namespace
from hicache.cli.admin import SILENCE_S, WORK_S, admin_of, fail
from hicache.cli.amounts import parse_size, size_text
from hicache.cli.options import (
    EXIT_BAD,
    EXIT_USAGE,
    admin_options,
    encryption_keys_option,
    json_option,
    say,
    write_json,
)
from hicache.errors import ConfigError
from hicache.tenancy import DEFAULT_TENANT, tenant_digest

PART_BYTES = 1 << 20


@click.command(
    "export",
    epilog="\b\nExamples:\n  hicache export 3f2a9c01d4e5 --out llama.hicache\n"
    "  hicache export 3f2a9c01d4e5 --tenant alice --path /var/lib/hicached --out alice.hicache",
)
@click.argument("namespace")
@click.option("--out", required=True, metavar="FILE", help="Where to; FILE.part until it is whole, and then continued.")
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, metavar="NAME", help="Whose objects.")
@click.option("--path", metavar="DIR", help="Directory of a store that no hicached has open, instead of asking one.")
@encryption_keys_option
@admin_options
@json_option
def export_command(
    namespace: str,
    out: str,
    tenant: str,
    path: str | None,
    encryption_keys: str,
    admin: str,
    token_file: str | None,
    json_path: str | None,
) -> None:
    """Write the objects of NAMESPACE (the first 8 digits of its digest are enough) to a file, for another store.

    The file has the objects as engines put them, not encrypted, with checksums and without the tenant; only its owner
    may read it. What an interrupted export has left in FILE.part is checked and continued.
    """
    if out == "-":
        raise ConfigError("out", out, "the name of a file: an export that breaks off is continued from it")
    tag = parse_namespace(namespace)
    part = Path(f"{out}.part")
    with _part_file(part) as file:
        done = _Continued.read(file, part)
        after = done.after.hex()
        if path is not None:
            end = _write(file, _offline_parts(Path(path), encryption_keys, tenant, tag, done.after), done, part)
        else:
            names = {"namespace": namespace, "tenant": tenant} | ({"after": after} if after else {})
            with admin_of(admin, token_file).open(EXPORT, names=names, silence_s=SILENCE_S) as parts:
                end = _write(file, parts, done, part)
        file.flush()
        os.fsync(file.fileno())
    if not end.objects:
        part.unlink()
        fail(f"no object of namespace {namespace} is stored for tenant {tenant!r}", EXIT_BAD)
    os.replace(part, out)
    say(f"{end.objects} objects, {size_text(end.payload_bytes)}, in {out}", json_path=json_path)
    write_json(
        json_path,
        {
            "format": 1,
            "file": out,
            "objects": end.objects,
            "payload_bytes": end.payload_bytes,
            "continued": done.objects,
        },
    )


@contextmanager
def _part_file(part: Path) -> Iterator[BinaryIO]:
    try:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError("out", str(part), f"a file that can be written ({error.strerror})") from error
    try:
        with os.fdopen(fd, "r+b") as file:
            yield file
    finally:
        if part.exists() and not part.stat().st_size:  # nothing that could be continued
            part.unlink()


class _Continued:
    """What a file has of an export that broke off. Afterwards the file ends behind its last whole object."""

    def __init__(self) -> None:
        self.header: ArchiveHeader | None = None
        self.after = b""
        self.objects = 0
        self.payload_bytes = 0

    @classmethod
    def read(cls, file: BinaryIO, part: Path) -> _Continued:
        done = cls()
        end_at = 0
        try:
            reader = ArchiveReader(file)
            done.header, end_at = reader.header, reader.offset
            for found in reader:
                if found.payload is None:
                    break
                done.after, end_at = found.key, reader.offset
                done.objects += 1
                done.payload_bytes += found.size_bytes
        except ArchiveError as error:
            if done.header is None and os.fstat(file.fileno()).st_size and b"HICACHEX".find(_first(file)) != 0:
                expected = f"part of an export ({error}); remove it to begin anew"
                raise ConfigError("out", str(part), expected) from error
        file.truncate(end_at)
        file.seek(end_at)
        return done


def _first(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(8)


class _Parts:
    """Reads parts as a file."""

    def __init__(self, parts: Iterator[bytes | memoryview]) -> None:
        self._parts = parts
        self._left = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        while not self._left:
            part = next(self._parts, None)
            if part is None:
                return b""
            self._left = memoryview(part).cast("B")
        found = bytes(self._left[:size])
        self._left = self._left[len(found) :]
        return found


def _write(file: BinaryIO, parts: Iterator[bytes | memoryview], done: _Continued, part: Path) -> ArchiveEnd:
    """Checks what comes and appends it; whatever ends this leaves whole objects, and a tail to cut off."""
    reader = ArchiveReader(_Parts(parts))
    if done.header is None:
        file.write(encode_header(reader.header))
    elif (done.header.namespace, done.header.source) != (reader.header.namespace, reader.header.source):
        expected = (
            f"part of an export of this namespace from this store, not of {done.header.model or 'another'} from "
            f"{done.header.source!r}; remove it to begin anew"
        )
        raise ConfigError("out", str(part), expected)
    objects, payload_bytes = done.objects, done.payload_bytes
    for found in reader:
        if found.payload is None:
            fail(f"an object was damaged on the way; what is in {part} is whole: run it again", EXIT_BAD)
        file.write(encode_object_head(found.key, found.payload))
        file.write(found.payload)
        objects += 1
        payload_bytes += found.size_bytes
    end = ArchiveEnd(objects, payload_bytes)
    file.write(encode_end(end))
    return end


def _offline_parts(
    directory: Path, encryption_keys: str, tenant: str, tag: int, after: bytes
) -> Iterator[bytes | memoryview]:
    from hicache.backends.offline import open_offline

    store = open_offline(directory, encryption_keys=encryption_keys)
    try:
        owner = tenant_digest(tenant)
        name = NamespaceNames(directory).get(owner, tag)
        header = ArchiveHeader(
            namespace=name.digest if name is not None else tag.to_bytes(4, "big") if tag != UNKNOWN_TAG else b"",
            descriptor=b"" if name is None else name.descriptor,
            source=f"{store.backend_name} {store.store_id.hex()}",
        )
        for some in export_namespace(store, header, tenant=owner, tag=tag, after=after):
            yield from some
    finally:
        store.close()


@click.command(
    "import",
    epilog="\b\nExamples:\n  hicache import llama.hicache\n"
    "  hicache import llama.hicache --tenant alice --path /data/kv --backend file --capacity 200GiB",
)
@click.argument("file")
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, metavar="NAME", help="Who owns the objects then.")
@click.option("--path", metavar="DIR", help="Directory of a store that no hicached has open, instead of asking one.")
@click.option(
    "--backend",
    type=click.Choice(["lmdb", "file"]),
    default="lmdb",
    show_default=True,
    help="With --path, where there is no store yet.",
)
@click.option("--capacity", metavar="SIZE", help="With --path, where there is no store yet.")
@encryption_keys_option
@admin_options
@json_option
def import_command(
    file: str,
    tenant: str,
    path: str | None,
    backend: str,
    capacity: str | None,
    encryption_keys: str,
    admin: str,
    token_file: str | None,
    json_path: str | None,
) -> None:
    """Store the objects of an export, FILE, for a tenant.

    Engines find them when their namespace and salt are those of the engines that put them. What is there is passed
    over, so an import that broke off is run again. Ends with 1 where something of the file is not in the store then.
    """
    try:
        source = open(file, "rb")  # noqa: SIM115  # closed below
    except OSError as error:
        raise ConfigError("file", file, f"a readable file ({error.strerror})") from error
    with source:
        try:
            if path is not None:
                size = None if capacity is None else parse_size("capacity", capacity)
                answer = _import_offline(source, Path(path), encryption_keys, tenant, backend, size)
            else:
                ArchiveReader(source)  # what is no export is told before anybody is asked
                source.seek(0)
                daemon = admin_of(admin, token_file)
                with daemon.open(IMPORT, _file_parts(source), names={"tenant": tenant}, silence_s=WORK_S) as parts:
                    answer = msgspec.json.decode(b"".join(parts), type=ImportAnswer)
        except ArchiveError as error:
            fail(f"{file} is no export that can be read: {error}", EXIT_BAD)
    say(_import_text(answer), json_path=json_path)
    write_json(json_path, {"format": 1} | msgspec.to_builtins(answer))
    if answer.stored + answer.existing != answer.objects:
        sys.exit(EXIT_BAD)


def _file_parts(source: BinaryIO) -> Iterator[bytes]:
    while part := source.read(PART_BYTES):
        yield part


def _import_text(answer: ImportAnswer) -> str:
    wrong = {"damaged in the file": answer.damaged, "too large": answer.too_large} | answer.failed
    named = "".join(f", {count} {what}" for what, count in wrong.items() if count)
    return (
        f"{answer.objects} objects, {size_text(answer.payload_bytes)}: "
        f"{answer.stored} stored, {answer.existing} were there{named}"
    )


def _import_offline(
    source: BinaryIO, directory: Path, encryption_keys: str, tenant: str, backend: str, capacity_bytes: int | None
) -> ImportAnswer:
    from hicache.backends.marker import MARKER_NAME
    from hicache.backends.offline import OBJECT_BYTES_MAX, make_offline

    if capacity_bytes is None and not (directory / MARKER_NAME).exists():
        fail(f"there is no store in {directory}: give the new one a --capacity", EXIT_USAGE)
    reader = ArchiveReader(source)
    store = make_offline(directory, backend, capacity_bytes=capacity_bytes or 0, encryption_keys=encryption_keys)
    try:
        owner, header = tenant_digest(tenant), reader.header
        tag = namespace_tag(header.namespace)
        steps = import_namespace(store, reader, tenant=owner, tag=tag, object_bytes_max=OBJECT_BYTES_MAX)
        [progress] = deque(steps, maxlen=1)
        if header.descriptor:
            names = NamespaceNames(directory)
            names.meet(owner, header.namespace, header.descriptor, now_s=0.0)
            names.write()
    finally:
        store.close()
    return import_answer(progress)
