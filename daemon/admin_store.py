"""The verbs about what is stored: namespaces, verify, export and import."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import structlog
from aiohttp import web

from hicache.admin.progress import drop_line, import_answer, verify_line
from hicache.admin.store_messages import (
    NamespaceRow,
    Namespaces,
    VerifyLine,
    VerifyRequest,
    check_verify_rate,
)
from hicache.admin.verbs import EXPORT, IMPORT, NAMESPACE_DROP, NAMESPACES, VERIFY, Stream
from hicache.backends.archive import ArchiveError, ArchiveHeader, ArchiveReader
from hicache.backends.exports import ImportProgress, export_namespace, import_namespace
from hicache.backends.namespaces import (
    DIGEST_BYTES,
    NamespaceName,
    NamespaceNames,
    namespace_tag,
    parse_namespace,
    tag_text,
)
from hicache.backends.scrub import Inventory, NamespaceUsage, Part, ScrubProgress, drop, scrub
from hicache.daemon.admin_api import AdminApi, AdminError, Call
from hicache.daemon.background import Background, write
from hicache.daemon.body_source import BodySource
from hicache.daemon.config import DaemonConfig
from hicache.daemon.namespaces import read_descriptor
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Sessions
from hicache.daemon.storage import Storage
from hicache.daemon.tenants import Tenant, Tenants
from hicache.daemon.version import daemon_version
from hicache.outcome import Outcome
from hicache.tenancy import TENANT_BYTES, tenant_digest

FIELD_CHARS_MAX = 200

log = structlog.get_logger("hicache.daemon.admin")


def serve_store_verbs(
    admin: AdminApi,
    config: DaemonConfig,
    storage: Storage,
    tenants: Tenants,
    sessions: Sessions,
    names: NamespaceNames,
    stages: AsyncExitStack,
) -> Background:
    """From now on what is stored can be asked about. Returns what runs long work on it, which ends with ``stages``."""
    background = Background()
    stages.callback(background.close)
    verbs = StoreVerbs(config, storage, tenants, sessions, names, background)
    admin.serve(NAMESPACES, verbs.namespaces)
    admin.serve_stream(NAMESPACE_DROP, verbs.drop_namespace)
    admin.serve_stream(VERIFY, verbs.verify)
    admin.serve_stream(EXPORT, verbs.export)
    admin.serve_stream(IMPORT, verbs.import_archive)
    return background


class StoreVerbs:
    """Event loop only; what blocks is done by ``background``."""

    def __init__(
        self,
        config: DaemonConfig,
        storage: Storage,
        tenants: Tenants,
        sessions: Sessions,
        names: NamespaceNames,
        background: Background,
    ) -> None:
        self._config = config
        self._storage = storage
        self._store = storage.store
        self._tenants = tenants
        self._sessions = sessions
        self._names = names
        self._background = background
        self._is_verifying = False

    async def namespaces(self, call: Call[None]) -> Namespaces:
        """What is stored by namespace; with ``tenant``, of that one only."""
        walk = self._store.walk(tenant=b"" if call.tenant is None else self._digest_of(call.tenant))
        inventory = Inventory()
        async with self._background.steps("namespaces", walk, caller=call.caller) as batches:
            async for batch in batches:
                inventory.add(batch, self._store.stored_bytes)
        rows = [self._row(tenant, tag, usage) for (tenant, tag), usage in inventory.usage.items()]
        rows.sort(key=lambda row: row.stored_bytes, reverse=True)
        return Namespaces(namespaces=rows, at_s=time.time())

    def _row(self, tenant: bytes, tag: int, usage: NamespaceUsage) -> NamespaceRow:
        name = self._names.get(tenant, tag)
        fields = {} if name is None else _fields(name)
        return NamespaceRow(
            tenant=self._name_of(tenant),
            namespace=tag_text(tag) if name is None else name.digest.hex(),
            model=fields.get("model", ""),
            fields=fields,
            objects=usage.objects,
            payload_bytes=usage.payload_bytes,
            stored_bytes=usage.stored_bytes,
            used_at_s=usage.used_at_s,
            session_at_s=None if name is None else name.session_at_s,
            sessions=self._sessions_of(tenant, tag),
        )

    def _sessions_of(self, tenant: bytes, tag: int) -> int:
        return sum(1 for one in self._sessions if (one.tenant.digest, one.namespace_tag) == (tenant, tag))

    async def drop_namespace(self, call: Call[None], request: web.Request) -> web.StreamResponse:
        """Deletes its objects. ``tenant`` names whose; ``idle``: only where no engine uses it now."""
        tenant, tag = self._digest_of(_required(call, "tenant")), parse_namespace(call.names["namespace"])
        engines = self._sessions_of(tenant, tag)
        if call.names.get("idle") and engines:
            raise AdminError(
                409,
                f"namespace {call.names['namespace']} of tenant {call.tenant} is used by {engines} sessions: "
                "it is not stale; drop it by name, or stop the engines first",
            )
        log.info("a namespace is dropped", tenant=call.tenant, namespace=tag_text(tag), by=call.caller.name)
        dropping = drop(self._store, part=Part(tenant, tag))
        return await self._background.stream(request, "namespaces drop", dropping, caller=call.caller, line=drop_line)

    async def verify(self, call: Call[VerifyRequest], request: web.Request) -> web.StreamResponse:
        """Reads and checks what is stored, at a bounded rate; one at a time."""
        part = self._part(call.tenant, call.body.namespace)
        rate, after = call.body.bytes_per_s, _key(call.body.after)
        usage = self._store.usage()
        check_verify_rate(rate, payload_bytes=usage.payload_bytes)
        if self._is_verifying:
            raise AdminError(409, "verify: another one is running, and one at a time may; wait for it or stop it")
        self._is_verifying = True

        def line(progress: ScrubProgress, is_done: bool) -> VerifyLine:
            return verify_line(progress, objects_stored=usage.objects, is_done=is_done)

        def delay_s(progress: ScrubProgress, elapsed_s: float) -> float:
            return progress.payload_bytes / rate - elapsed_s

        try:
            scrubbing = scrub(self._store, after=after, part=part)
            return await self._background.stream(
                request, "verify", scrubbing, caller=call.caller, line=line, delay_s=delay_s
            )
        finally:
            self._is_verifying = False

    async def export(self, call: Call[None], request: web.Request) -> web.StreamResponse:
        """The objects of a namespace of ``tenant`` as an archive; ``after``: behind this key, in hexadecimal."""
        tenant, tag = self._digest_of(_required(call, "tenant")), parse_namespace(call.names["namespace"])
        name = self._names.get(tenant, tag)
        header = ArchiveHeader(
            namespace=name.digest if name is not None else tag.to_bytes(4, "big") if tag else b"",
            descriptor=b"" if name is None else name.descriptor,
            model="" if name is None else _fields(name).get("model", ""),
            source=f"{self._config.backend} {self._store.store_id.hex()}",
            hicache_version=daemon_version(),
        )
        log.info("a namespace is exported", tenant=call.tenant, namespace=tag_text(tag), by=call.caller.name)
        parts = export_namespace(self._store, header, tenant=tenant, tag=tag, after=_key(call.names.get("after", "")))
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        async with self._background.steps("export", parts, caller=call.caller) as steps:
            await response.prepare(request)
            async for some in steps:
                for part in some:
                    await write(response, bytes(part))
        await response.write_eof()
        return response

    async def import_archive(self, call: Call[Stream], request: web.Request) -> web.StreamResponse:
        """Puts the objects of an archive, which is the body, under ``tenant``."""
        tenant = self._tenant_named(_required(call, "tenant"))
        source = BodySource(request.content, asyncio.get_running_loop())
        latest = ImportProgress()
        try:
            async with self._background.steps("import", self._importing(source, tenant), caller=call.caller) as steps:
                async for progress in steps:
                    latest = progress
        except ArchiveError as error:
            done = f"{latest.outcomes[Outcome.OK]} objects were stored before"
            raise AdminError(422, f"the archive cannot be read: {error}; {done}") from error
        finally:
            source.give_up()
        log.info("a namespace was imported", tenant=tenant.name, objects=latest.objects, by=call.caller.name)
        return web.Response(body=msgspec.json.encode(import_answer(latest)), content_type="application/json")

    def _importing(self, source: BodySource, tenant: Tenant) -> Iterator[ImportProgress]:
        """Reads the header in the thread of the first step."""
        reader = ArchiveReader(source, object_bytes_max=self._config.object_bytes_max)
        tag = self._meet(tenant, reader.header)
        yield from import_namespace(
            self._store, reader, tenant=tenant.digest, tag=tag, object_bytes_max=self._config.object_bytes_max
        )

    def _meet(self, tenant: Tenant, header: ArchiveHeader) -> int:
        """The tag of the namespace; its name is remembered where the archive has all of it."""
        if len(header.namespace) == DIGEST_BYTES and header.descriptor:
            try:
                read_descriptor(header.descriptor, header.namespace)
            except Refusal as refusal:
                raise ArchiveError(f"its namespace is malformed: {refusal}") from refusal
            if self._names.get(tenant.digest, namespace_tag(header.namespace)) is None:
                self._names.meet(tenant.digest, header.namespace, header.descriptor, now_s=time.time())
        return namespace_tag(header.namespace)

    def _part(self, tenant: str | None, namespace: str) -> Part:
        digest = b"" if tenant is None else self._digest_of(tenant)
        return Part(digest, parse_namespace(namespace) if namespace else None)

    def _tenant_named(self, name: str) -> Tenant:
        found = next((tenant for tenant in self._tenants.settings if tenant.name == name), None)
        if found is None:
            known = ", ".join(sorted(tenant.name for tenant in self._tenants.settings)[:10])
            raise AdminError(404, f"there is no tenant {name!r}; hicached knows {known}")
        return found

    def _digest_of(self, name: str) -> bytes:
        """Of a tenant that is known, or has something stored; a digest in hexadecimal that is nobody's name stands for
        itself.
        """
        is_name = any(tenant.name == name for tenant in self._tenants.settings)
        try:
            raw = b"" if is_name else bytes.fromhex(name)
        except ValueError:
            raw = b""
        if len(raw) == TENANT_BYTES:
            return raw
        digest = tenant_digest(name)
        if not is_name and self._store.is_indexed and not self._store.tenant_usage(digest).objects:
            raise AdminError(404, f"there is no tenant {name!r}, and nothing is stored for one of that name")
        return digest

    def _name_of(self, digest: bytes) -> str:
        names = (tenant.name for tenant in self._tenants.settings if tenant.digest == digest)
        return next(names, digest.hex())


def _fields(name: NamespaceName) -> dict[str, str]:
    """What engines say of a namespace, as text of bounded length."""
    try:
        descriptor = read_descriptor(name.descriptor, name.digest)
    except Refusal:
        return {}
    shown = {field: value.hex() if isinstance(value, bytes) else str(value) for field, value in descriptor.items()}
    return {field: value[:FIELD_CHARS_MAX] for field, value in shown.items()}


def _required(call: Call[Any], name: str) -> str:  # Any: whatever its body is
    if value := call.names.get(name):
        return value
    raise AdminError(400, f"{name} is missing: expected ?{name}=NAME")


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError as error:
        raise AdminError(
            400, f"after = {text[:80]!r}: expected a key in hexadecimal, as an earlier run told it"
        ) from error
    if len(key) > 128:
        raise AdminError(400, f"after has {len(key)} bytes: expected at most 128")
    return key
