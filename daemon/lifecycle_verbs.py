"""The verbs that drain and reload a daemon."""

from __future__ import annotations

from collections.abc import Callable

from hicache.admin.lifecycle import DrainAnswer, DrainRequest, ReloadAnswer
from hicache.admin.verbs import DRAIN, RELOAD
from hicache.daemon.admin_api import AdminApi, Call
from hicache.daemon.drain import DRAIN_S_MAX, Drain
from hicache.daemon.reload import Reloader
from hicache.errors import ConfigError


def serve_lifecycle(admin: AdminApi, drain: Drain, reloader: Reloader, *, drain_s: Callable[[], float]) -> None:
    """``drain_s`` says how long a drain takes at most that names no time."""

    async def begin_drain(call: Call[DrainRequest]) -> DrainAnswer:
        within_s = drain_s() if call.body.within_s is None else call.body.within_s
        if not 0 <= within_s <= DRAIN_S_MAX:
            raise ConfigError("within_s", within_s, f"seconds from 0 to {DRAIN_S_MAX:g}")
        drain.begin(within_s=within_s)
        held = drain.held
        return DrainAnswer(calls=held.calls, leases=held.leases, sessions=held.sessions, within_s=within_s)

    async def reload(_: Call[None]) -> ReloadAnswer:
        return await reloader.reload()

    admin.serve(DRAIN, begin_drain)
    admin.serve(RELOAD, reload)
