"""What tenants may take of hicached, by its settings and theirs."""

from __future__ import annotations

import os

from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.budget import InflightBudgets
from hicache.daemon.config import DaemonConfig
from hicache.daemon.region_budget import RegionBudget
from hicache.daemon.tenants import Tenants
from hicache.errors import ConfigError


def share_of(whole: int, tenants: Tenants) -> int:
    """What one tenant may take of something, unless a setting says otherwise: where there are others, half."""
    return whole if tenants.count == 1 else max(1, whole // 2)


def inflight_budgets(config: DaemonConfig, tenants: Tenants) -> InflightBudgets:
    """Bytes in flight: of all, of a tenant, of a session."""
    return InflightBudgets(
        total_bytes=config.inflight_bytes_max,
        tenant_bytes=max(share_of(config.inflight_bytes_max, tenants), config.object_bytes_max),
        session_bytes=config.session_inflight_bytes_max,
    )


def chunk_bytes_ceiling(config: DaemonConfig) -> int:
    """What one chunk may have: so much fits into the budget of a tenant, and of a session, whoever is added later."""
    tenant_bytes = max(config.inflight_bytes_max // 2, config.object_bytes_max)
    return min(config.session_inflight_bytes_max, tenant_bytes)


def store_limits(config: DaemonConfig, tenants: Tenants) -> StoreLimits:
    """What each tenant may have of the store. Raises ConfigError for limits that the backend cannot see to."""
    for tenant, settings in tenants.settings.items():
        name = settings.first_that_needs_index
        if config.is_shared and name:
            shared = "file_shared = true" if config.file_shared else f"backend = {config.backend!r}"
            expected = f"0 for tenant {tenant.name} with {shared}, where others decide, too, what is kept"
            raise ConfigError(name, getattr(settings, name), expected)
    return StoreLimits(
        default=config.tenant_defaults.of_store,
        by_tenant={tenant.digest: settings.of_store for tenant, settings in tenants.settings.items()},
        pin_share=config.pin_share,
    )


def tenant_sessions_max(config: DaemonConfig, tenants: Tenants) -> int:
    """Sessions of one tenant."""
    return config.tenant_sessions_max or share_of(config.sessions_max, tenants)


def region_budget(config: DaemonConfig, tenants: Tenants) -> RegionBudget:
    """Memory of clients that may be mapped: of all, and of a tenant."""
    return RegionBudget(
        regions_bytes_max=_regions_bytes_max(config),
        tenant_regions_bytes_max=tenant_regions_bytes_max(config, tenants),
    )


def tenant_regions_bytes_max(config: DaemonConfig, tenants: Tenants) -> int:
    """Memory of one tenant's clients that may be mapped."""
    return config.tenant_regions_bytes_max or share_of(_regions_bytes_max(config), tenants)


def _regions_bytes_max(config: DaemonConfig) -> int:
    return config.regions_bytes_max or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
