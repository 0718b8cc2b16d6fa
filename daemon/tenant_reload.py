"""Takes a changed tenants file: who came, who went, whose token or limit is another one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.config import DaemonConfig
from hicache.daemon.rates import TenantRates
from hicache.daemon.refusals import Refusal
from hicache.daemon.reload import Commit
from hicache.daemon.sessions import Session, Sessions
from hicache.daemon.storage import Store
from hicache.daemon.tenant_bounds import (
    inflight_budgets,
    store_limits,
    tenant_regions_bytes_max,
    tenant_sessions_max,
)
from hicache.daemon.tenants import PARSERS, Tenants
from hicache.errors import ConfigError
from hicache.wire.protocol import RefusalCode


class TenantReload:
    """Part of a reload. Objects of a tenant who went stay until they are evicted, and are his if he comes back."""

    settings: Sequence[str] = [*(name for name in PARSERS if name != "weight"), "pin_share"]  # defaults of tenants

    def __init__(self, tenants: Tenants, sessions: Sessions, store: Store) -> None:
        """``tenants`` becomes what the file says."""
        self._tenants = tenants
        self._sessions = sessions
        self._store = store

    def prepare(self, config: DaemonConfig) -> Commit:
        """See ``Reloadable.prepare``. With tenants or without is decided at the start."""
        if bool(config.tenants_file) != bool(self._tenants.named):
            expected = "as at the start, with a file or without; restart hicached to change that"
            raise ConfigError("tenants_file", config.tenants_file, expected)
        loaded = Tenants.load(config.tenants_file, defaults=config.tenant_defaults)
        return partial(self._commit, config, loaded, store_limits(config, loaded))

    def _commit(self, config: DaemonConfig, loaded: Tenants, limits: StoreLimits) -> None:
        had_one = self._tenants.count == 1
        self._tenants.become(loaded)
        self._set_rates()
        self._store.set_limits(limits)
        if had_one != (loaded.count == 1):
            self._share_anew(config)
        for session in self._sessions:
            if not _may_stay(session):
                session.revoke(Refusal(RefusalCode.BAD_TOKEN, "this token, or its tenant, was removed"))

    def _set_rates(self) -> None:
        rates = self._sessions.rates
        for tenant, settings in self._tenants.settings.items():
            rate = rates.setdefault(tenant, TenantRates())
            rate.set_limits(calls_per_s_max=settings.calls_per_s_max, bytes_per_s_max=settings.bytes_per_s_max)
        for tenant in [tenant for tenant in rates if tenant not in self._tenants.settings]:
            del rates[tenant]

    def _share_anew(self, config: DaemonConfig) -> None:
        """One tenant may have everything, one of several half; and block keys that can be forged are for one alone.

        So every session says hello again: what it was granted may be too much, or too little.
        """
        sessions, tenants = self._sessions, self._tenants
        sessions.budgets.become(inflight_budgets(config, tenants))
        sessions.set_tenant_sessions_max(tenant_sessions_max(config, tenants))
        sessions.region_budget.set_tenant_bytes_max(tenant_regions_bytes_max(config, tenants))
        for session in sessions:
            text = "the tenants of this hicached have changed: say hello again"
            session.revoke(Refusal(RefusalCode.UNKNOWN_SESSION, text))


def _may_stay(session: Session) -> bool:
    try:
        return session.authenticate() == session.tenant
    except Refusal:
        return False
