"""The verbs about tenants: the file is changed, the daemon takes it at once, or both stay as they were."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import asdict

import structlog
from aiohttp import web

from hicache.admin.progress import drop_line
from hicache.admin.tenant_messages import TenantAdd, TenantChange, TenantChanged, TenantList, TenantRow
from hicache.admin.verbs import TENANT_ADD, TENANT_CHANGE, TENANT_ERASE, TENANTS
from hicache.backends.namespaces import NamespaceNames
from hicache.backends.scrub import DropProgress, Part, drop
from hicache.daemon.admin_api import AdminApi, AdminError, Call
from hicache.daemon.background import Background
from hicache.daemon.reload import Reloader
from hicache.daemon.sessions import Sessions
from hicache.daemon.storage import Storage
from hicache.daemon.tenants import Tenants
from hicache.daemon.tenants_file import (
    Edit,
    NotWritable,
    add_tenant,
    change_file,
    change_settings,
    check_settings,
    read_file,
    remove_tenant,
    rotate_token,
    token_counts,
    write_file,
)
from hicache.errors import BackendError, ConfigError
from hicache.tenancy import tenant_digest

PASSES_MAX = 8  # of an erase, each over all of the store: what is put meanwhile is found by the next
STATS_TIMEOUT_S = 5.0
_HASH = re.compile(r"[0-9a-f]{64}")

log = structlog.get_logger("hicache.daemon.admin")


class TenantVerbs:
    """Event loop only; the file is read and written in threads, one change at a time."""

    def __init__(
        self,
        reloader: Reloader,
        storage: Storage,
        tenants: Tenants,
        sessions: Sessions,
        names: NamespaceNames,
        background: Background,
    ) -> None:
        self._reloader = reloader
        self._storage = storage
        self._tenants = tenants
        self._sessions = sessions
        self._names = names
        self._background = background
        self._turn = asyncio.Lock()

    def serve(self, admin: AdminApi) -> None:
        """From now on tenants can be asked about, and changed."""
        admin.serve(TENANTS, self.list_all)
        admin.serve(TENANT_ADD, self.add)
        admin.serve(TENANT_CHANGE, self.change)
        admin.serve_stream(TENANT_ERASE, self.erase)

    async def list_all(self, call: Call[None]) -> TenantList:
        """All tenants; with ``tenant``, that one."""
        file = self._reloader.config.tenants_file
        lines = token_counts(await asyncio.to_thread(read_file, file)) if file else {}
        shown = [tenant for tenant in self._tenants.settings if call.tenant in (None, tenant.name)]
        store = self._storage.store
        stats = await self._storage.ask(
            lambda: store.tenant_stats([tenant.digest for tenant in shown]), timeout_s=STATS_TIMEOUT_S
        )
        rows = [
            TenantRow(
                name=tenant.name,
                lines=lines.get(tenant.name, 0),
                limits={name: float(value) for name, value in asdict(self._tenants.settings[tenant]).items()},
                objects=has.objects,
                payload_bytes=has.payload_bytes,
                stored_bytes=has.stored_bytes,
                sessions=sum(1 for session in self._sessions if session.tenant == tenant),
            )
            for tenant, has in zip(shown, stats, strict=True)
        ]
        return TenantList(tenants=rows, file=file)

    async def add(self, call: Call[TenantAdd]) -> TenantChanged:
        """A new tenant, who may say hello at once."""
        body = call.body
        check_settings(body.limits)
        return await self._change(
            body.name, add_tenant(body.name, _hash(body.token_sha256), body.limits), by=call.caller.name
        )

    async def change(self, call: Call[TenantChange]) -> TenantChanged:
        """Another token, other limits, or both."""
        name, body = call.names["tenant"], call.body
        check_settings(body.limits)
        edits: list[Edit] = []
        if body.token_sha256:
            digest, until = _hash(body.token_sha256), body.keeps_old_until
            edits.append(rotate_token(name, digest, keeps_old_until=until, now_s=time.time()))
        if body.limits:
            edits.append(change_settings(name, body.limits))
        if not edits:
            raise AdminError(400, "nothing is to be changed: expected token_sha256, limits, or both")

        def edit(text: str) -> str:
            for one in edits:
                text = one(text)
            return text

        return await self._change(name, edit, by=call.caller.name)

    async def _change(self, name: str, edit: Edit, *, by: str) -> TenantChanged:
        file = self._reloader.config.tenants_file
        if not file:
            raise AdminError(
                409, "this hicached has no tenants_file: set it to a file with a line for each tenant, and restart"
            )
        async with self._turn:
            try:
                before = await asyncio.to_thread(change_file, file, edit)
            except NotWritable as error:
                text = (
                    f"{error}: change it as its owner with `hicache tenants ... --file {file}`, which reloads then; a "
                    "credential of systemd is changed where LoadCredential= has it, and taken at a restart"
                )
                raise AdminError(409, text) from error
            try:
                await self._reloader.reload()
            except (ConfigError, BackendError, OSError) as error:
                await asyncio.to_thread(write_file, file, before, check=False)
                raise AdminError(409, f"nothing was changed, since hicached cannot take it: {error}") from error
        log.info("the tenants file was changed", tenant=name, by=by)
        return TenantChanged(name=name, file=file)

    async def erase(self, call: Call[None], request: web.Request) -> web.StreamResponse:
        """Deletes all objects of a tenant; ``remove``: after the tenant itself, so that nothing new comes."""
        name = call.names["tenant"]
        digest = tenant_digest(name)
        if call.names.get("remove") and not call.caller.is_operator:
            raise AdminError(403, f"whether tenant {name!r} goes on is not for {call.caller.name}: ask as an operator")
        if self._reloader.config.backend == "mooncake":
            raise AdminError(409, "a Mooncake store does not tell whose its objects are: they go as it evicts them")
        is_known = any(tenant.name == name for tenant in self._tenants.settings)
        if not is_known and not self._storage.store.tenant_usage(digest).objects:
            raise AdminError(404, f"there is no tenant {name!r}, and nothing is stored for one of that name")
        if call.names.get("remove"):
            await self._change(name, remove_tenant(name), by=call.caller.name)
        log.info("a tenant is erased", tenant=name, by=call.caller.name)
        erasing = self._erasing(digest)
        return await self._background.stream(request, "tenants erase", erasing, caller=call.caller, line=drop_line)

    def _erasing(self, tenant: bytes) -> Iterator[DropProgress]:
        """The key first, where objects are encrypted: whatever happens from there on, nobody reads what was stored.
        Then passes over the store until one finds nothing, and what is known of the tenant beside its objects.

        Raises BackendError where it cannot be written down that the key is gone.
        """
        store = self._storage.store
        total = DropProgress()
        yield total
        try:
            store.forget_tenant(tenant)
        except OSError as error:
            raise BackendError(f"the key of the tenant cannot be dropped ({error}): erase it again") from error
        for _ in range(PASSES_MAX):
            found = 0
            before = DropProgress(total.objects, total.payload_bytes, total.outcomes.copy())
            for progress in drop(store, part=Part(tenant)):
                found = progress.objects
                total.objects = before.objects + progress.objects
                total.payload_bytes = before.payload_bytes + progress.payload_bytes
                total.outcomes = before.outcomes + progress.outcomes
                yield total
            if not found:
                break
        self._names.forget(tenant)
        self._names.write()
        yield total


def _hash(token_sha256: str) -> str:
    if _HASH.fullmatch(token_sha256):
        return token_sha256
    raise AdminError(400, "token_sha256 is not what it should be: expected 64 hexadecimal digits in lower case")
