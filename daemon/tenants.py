"""Who owns data, and what he may have: the tenant behind a token."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256

from hicache.backends.tenant_limits import PINNED_OBJECTS_MAX, TenantLimits
from hicache.daemon.refusals import Refusal
from hicache.daemon.settings import Parser, count, number, size
from hicache.errors import ConfigError
from hicache.tenancy import DEFAULT_TENANT, tenant_digest
from hicache.wire.protocol import RefusalCode

TENANTS_MAX = 4096
TOKEN_CHARS_MIN = 16
TOKEN_CHARS_MAX = 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASHED = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """An owner of data. ``digest`` starts every physical key of its objects."""

    name: str
    digest: bytes

    @classmethod
    def named(cls, name: str) -> Tenant:
        """The tenant of that name."""
        return cls(name, tenant_digest(name))


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """What one tenant may have. 0: no limit, except for pins."""

    weight: float = 1.0
    quota_bytes: int = 0
    quota_objects: int = 0
    ttl_s: float = 0.0
    pinned_objects_max: int = PINNED_OBJECTS_MAX
    calls_per_s_max: float = 0.0
    bytes_per_s_max: int = 0

    @property
    def of_store(self) -> TenantLimits:
        """The part that the store sees to."""
        return TenantLimits(self.weight, self.quota_bytes, self.quota_objects, self.ttl_s, self.pinned_objects_max)

    @property
    def first_that_needs_index(self) -> str:
        """A setting that only a store that knows what it has can see to; empty: none."""
        return next((name for name in ("quota_bytes", "quota_objects", "ttl_s") if getattr(self, name)), "")


TTL_S_MAX = 10 * 365 * 86_400
PARSERS: dict[str, Parser] = {
    "weight": number(0.001, 1000),
    "quota_bytes": size(0),
    "quota_objects": count(0, 10**12),
    "ttl_s": number(0, TTL_S_MAX),
    "pinned_objects_max": count(0, 10**9),
    "calls_per_s_max": number(0, 1e9),
    "bytes_per_s_max": size(0),
}
assert list(PARSERS) == [setting.name for setting in fields(TenantSettings)]


class Tenants:
    """All tenants of one daemon, as its file has them. Event loop only."""

    def __init__(self, by_token_hash: dict[bytes, Tenant] | None, settings: Mapping[Tenant, TenantSettings]) -> None:
        """``by_token_hash`` is None for a daemon that asks for no token. ``settings`` has every tenant."""
        self._by_token_hash = by_token_hash
        self.settings = settings
        self.count = len(settings)

    @classmethod
    def load(cls, file: str, *, defaults: TenantSettings | None = None) -> Tenants:
        """Tenants from ``file``; the one default tenant for an empty path. Raises ConfigError."""
        defaults = defaults or TenantSettings()
        if not file:
            return cls(None, {Tenant.named(DEFAULT_TENANT): defaults})
        return cls(*_read_tenants(file, defaults))

    def become(self, other: Tenants) -> None:
        """Has what ``other`` has from now on. Sessions stay: see TenantReload."""
        self._by_token_hash, self.settings, self.count = other._by_token_hash, other.settings, other.count

    @property
    def named(self) -> list[Tenant]:
        """The tenants of the file, in its order; none without one."""
        return [] if self._by_token_hash is None else list(self.settings)

    @property
    def fast_keys_allowed(self) -> bool:
        """Whether keys may come from a hash that is not collision resistant: only where there is nobody to attack."""
        return self.count == 1

    def authenticate(self, token: str) -> Tenant:
        """The tenant that ``token`` belongs to, in a time that does not depend on it. Raises Refusal(BAD_TOKEN)."""
        if self._by_token_hash is None:
            if token:
                raise Refusal(RefusalCode.BAD_TOKEN, "this daemon has no tenants_file; connect without a token")
            return Tenant.named(DEFAULT_TENANT)
        presented = sha256(token.encode("utf-8", "surrogatepass")).digest()
        found: Tenant | None = None
        for known, tenant in self._by_token_hash.items():
            if hmac.compare_digest(known, presented):
                found = tenant
        if found is None:
            raise Refusal(RefusalCode.BAD_TOKEN, "no tenant has this token")
        return found


def _read_tenants(file: str, defaults: TenantSettings) -> tuple[dict[bytes, Tenant], dict[Tenant, TenantSettings]]:
    """Lines of ``tenant token`` or ``tenant sha256:HEX``, and then ``setting=value`` as often as needed.

    A tenant may have several lines; each setting stands on one of them. Blank lines and lines that start with # mean
    nothing.
    """
    try:
        with open(file, encoding="utf-8") as source:
            lines = source.read(16 * 1024 * 1024).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("tenants_file", file, f"a readable text file ({error})") from error
    tokens: dict[bytes, Tenant] = {}
    given: dict[Tenant, dict[str, object]] = {}
    for line_number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            where = f"tenants_file {file} line {line_number}"
            token_hash, tenant, words = _parse_line(where, line)
            if token_hash in tokens:
                raise ConfigError(where, tenant.name, "a token used only once")
            tokens[token_hash] = tenant
            _parse_settings(where, tenant, words, given.setdefault(tenant, {}))
    if not 1 <= len(tokens) <= TENANTS_MAX:
        raise ConfigError("tenants_file", file, f"1 to {TENANTS_MAX} lines of `tenant token`, not {len(tokens)}")
    # Any: each parser returns the type of its own field
    return tokens, {tenant: replace(defaults, **values) for tenant, values in given.items()}  # type: ignore[arg-type]


def _parse_line(where: str, line: str) -> tuple[bytes, Tenant, list[str]]:
    """Token hash, tenant and the words after them. Errors never quote the token, nor what might be one."""
    name, *rest = line.split()
    token, words = (rest[0], rest[1:]) if rest else ("", [])
    if not _NAME.fullmatch(name):
        raise ConfigError(where, "(not shown)", "`tenant token`, the tenant of letters, digits, '.', '_' and '-'")
    if any(word.partition("=")[0] not in PARSERS for word in words):
        expected = f"one token, and then setting=value, the settings being {', '.join(PARSERS)}"
        raise ConfigError(where, f"{name} (rest not shown)", expected)
    if _HASHED.fullmatch(token):
        return bytes.fromhex(token.removeprefix("sha256:")), Tenant.named(name), words
    if token.startswith("sha256:") or not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
        raise ConfigError(
            where,
            f"{name} (token not shown)",
            f"one token of {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} characters, or sha256: and 64 hex digits",
        )
    return sha256(token.encode()).digest(), Tenant.named(name), words


def _parse_settings(where: str, tenant: Tenant, words: list[str], given: dict[str, object]) -> None:
    """Adds what ``words`` set to ``given``, what earlier lines have set for the tenant."""
    for word in words:
        name, _, value = word.partition("=")
        if name in given:
            raise ConfigError(where, f"{tenant.name} {word}", f"{name} only once for a tenant")
        try:
            given[name] = PARSERS[name](name, value)
        except ConfigError as error:
            raise ConfigError(where, f"{tenant.name} {word}", error.expected) from error
