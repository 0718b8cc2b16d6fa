"""What leases protect: in all, and of each tenant."""

from __future__ import annotations

from collections import Counter


class HeldBytes:
    """Bytes as stored. Not thread-safe."""

    def __init__(self) -> None:
        self._in_all = 0
        self._by_tenant: Counter[bytes] = Counter()  # no entry for a tenant of which nothing is held

    def change(self, tenant: bytes, change_bytes: int) -> None:
        """So much more of a tenant is held, or less."""
        self._in_all += change_bytes
        self._by_tenant[tenant] += change_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def left(self, tenant: bytes, *, bytes_max: int, tenant_bytes_max: int) -> int:
        """How much more of a tenant may be held within both bounds; not above 0 when none."""
        return min(bytes_max - self._in_all, tenant_bytes_max - self._by_tenant[tenant])
