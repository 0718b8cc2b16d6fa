"""Who owns data, and what he may have: the tenant behind a token."""

from __future__ import annotations

import hmac
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from hashlib import sha256

from hicache.backends.tenant_limits import PINNED_OBJECTS_MAX, TenantLimits
from hicache.daemon.peers import Peer
from hicache.daemon.refusals import Refusal
from hicache.daemon.settings import Parser, count, number, size
from hicache.errors import ConfigError
from hicache.tenancy import DEFAULT_TENANT, tenant_digest
from hicache.wire.protocol import RefusalCode

TENANTS_MAX = 4096
TOKEN_CHARS_MIN = 16
TOKEN_CHARS_MAX = 1024
TOKEN_DISTINCT_MIN = 8
TENANTS_FILE_CHARS_MAX = 16 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASHED = re.compile(r"sha256:[0-9a-f]{64}")
_OWNER = re.compile(r"(uid|gid):([0-9]{1,10})")
_EXPIRES = "expires"


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


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token: never itself."""

    digest: bytes  # SHA-256: tokens are made by machines, so that nobody can try all of them (decision 45)
    tenant: Tenant
    ends_at_s: float = math.inf  # since the epoch


@dataclass(frozen=True, slots=True)
class Credentials:
    """By what tenants are known."""

    tokens: tuple[Token, ...]
    of_uid: Mapping[int, Tenant]
    of_gid: Mapping[int, Tenant]


class Tenants:
    """All tenants of one daemon, as its file has them, and by what they are known. Event loop only."""

    def __init__(self, credentials: Credentials | None, settings: Mapping[Tenant, TenantSettings]) -> None:
        """``credentials`` are None for a daemon that asks for none. ``settings`` has every tenant."""
        self._credentials = credentials
        self.settings = settings
        self.count = len(settings)

    @classmethod
    def load(cls, file: str, *, defaults: TenantSettings | None = None, setting: str = "tenants_file") -> Tenants:
        """Tenants from the ``file`` of a setting; the one default tenant for an empty path. Raises ConfigError."""
        defaults = defaults or TenantSettings()
        if not file:
            return cls(None, {Tenant.named(DEFAULT_TENANT): defaults})
        return cls(*_read_tenants(file, defaults, setting))

    def become(self, other: Tenants) -> None:
        """Has what ``other`` has from now on. Sessions stay: see TenantReload."""
        self._credentials, self.settings, self.count = other._credentials, other.settings, other.count

    @property
    def named(self) -> list[Tenant]:
        """The tenants of the file, in its order; none without one."""
        return [] if self._credentials is None else list(self.settings)

    @property
    def fast_keys_allowed(self) -> bool:
        """Whether keys may come from a hash that is not collision resistant: only where there is nobody to attack."""
        return self.count == 1

    def authenticate(
        self, token: str, *, peer: Peer | None = None, certified: str = "", now_s: float | None = None
    ) -> Tenant:
        """The tenant of a token, in a time that does not depend on it; without one, of whom the certificate names, or
        of the user that ``peer`` is. A certificate that names a tenant bounds a token to that one.

        Raises Refusal(BAD_TOKEN).
        """
        if self._credentials is None:
            if token:
                raise Refusal(RefusalCode.BAD_TOKEN, "this daemon has no tenants_file; connect without a token")
            return Tenant.named(DEFAULT_TENANT)
        if not token and certified:
            found = next((tenant for tenant in self.settings if tenant.name == certified), None)
            if found is None:
                raise Refusal(RefusalCode.BAD_TOKEN, "there is no tenant of the name that the certificate has")
            return found
        if not token and peer is not None:
            return self._of_peer(self._credentials, peer)
        tenant = self._of_token(self._credentials, token, time.time() if now_s is None else now_s)
        if certified and tenant.name != certified:
            raise Refusal(RefusalCode.BAD_TOKEN, "the certificate names another tenant than the one of the token")
        return tenant

    def _of_token(self, credentials: Credentials, token: str, now_s: float) -> Tenant:
        presented = sha256(token.encode("utf-8", "surrogatepass")).digest()
        found: Token | None = None
        for known in credentials.tokens:
            if hmac.compare_digest(known.digest, presented):
                found = known
        if found is None:
            raise Refusal(RefusalCode.BAD_TOKEN, "no tenant has this token")
        if now_s >= found.ends_at_s:
            raise Refusal(RefusalCode.BAD_TOKEN, "this token has expired")
        return found.tenant

    def _of_peer(self, credentials: Credentials, peer: Peer) -> Tenant:
        """The user goes before groups, of which no two may lead to different tenants."""
        if (tenant := credentials.of_uid.get(peer.uid)) is not None:
            return tenant
        tenants = {credentials.of_gid[gid] for gid in peer.gids if gid in credentials.of_gid}
        if len(tenants) == 1:
            return tenants.pop()
        why = "no tenant" if not tenants else "more than one tenant, of which a token would name one,"
        raise Refusal(RefusalCode.BAD_TOKEN, f"{why} belongs to uid {peer.uid} and its groups, and no token came")


def _read_tenants(
    file: str, defaults: TenantSettings, setting: str
) -> tuple[Credentials, dict[Tenant, TenantSettings]]:
    """Lines of a tenant, one of ``token``, ``sha256:HEX``, ``uid:NUMBER`` and ``gid:NUMBER``, and then
    ``setting=value`` as often as needed.

    A tenant may have several lines; each setting stands on one of them. Blank lines and lines that start with # mean
    nothing.
    """
    try:
        with open(file, encoding="utf-8-sig") as source:
            lines = source.read(TENANTS_FILE_CHARS_MAX + 1).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        is_new = setting == "tenants_file" and isinstance(error, FileNotFoundError)
        advice = f"; `hicache tenants add NAME --file {file}` makes one" if is_new else ""
        raise ConfigError(setting, file, f"a readable text file ({error}){advice}") from error
    if sum(len(line) for line in lines) > TENANTS_FILE_CHARS_MAX - len(lines):
        raise ConfigError(setting, file, f"a file of at most {TENANTS_FILE_CHARS_MAX} characters")
    tokens: dict[bytes, Token] = {}
    owners: dict[str, dict[int, Tenant]] = {"uid": {}, "gid": {}}
    given: dict[Tenant, dict[str, object]] = {}
    line_count = 0
    for line_number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        line_count += 1
        where = f"{setting} {file} line {line_number}"
        tenant, credential, words = _parse_line(where, line)
        if (owner := _OWNER.fullmatch(credential)) is not None:
            if owners[owner[1]].setdefault(int(owner[2]), tenant) != tenant:
                raise ConfigError(where, credential, f"a {owner[1]} that no other tenant has")
        else:
            token = _parse_token(where, tenant, credential, words)
            if token.digest in tokens:
                raise ConfigError(where, "(not shown)", "a token used only once")
            tokens[token.digest] = token
        _parse_settings(where, tenant, words, given.setdefault(tenant, {}))
    if not 1 <= line_count <= TENANTS_MAX:
        raise ConfigError(setting, file, f"1 to {TENANTS_MAX} lines of `tenant token`, not {line_count}")
    credentials = Credentials(tuple(tokens.values()), owners["uid"], owners["gid"])
    # Any: each parser returns the type of its own field
    return credentials, {tenant: replace(defaults, **values) for tenant, values in given.items()}  # type: ignore[arg-type]


def _parse_line(where: str, line: str) -> tuple[Tenant, str, list[str]]:
    """Tenant, credential, and the words after them.

    Errors never quote the token, nor what might be one: words may have changed places, or a space may be missing.
    """
    name, *rest = line.split()
    credential, words = (rest[0], rest[1:]) if rest else ("", [])
    if not _NAME.fullmatch(name):
        raise ConfigError(where, "(not shown)", "`tenant token`, the tenant of letters, digits, '.', '_' and '-'")
    if any(word.partition("=")[0] not in (*PARSERS, _EXPIRES) for word in words):
        expected = f"one token, and then setting=value, the settings being {', '.join((*PARSERS, _EXPIRES))}"
        raise ConfigError(where, "(not shown)", expected)
    return Tenant.named(name), credential, words


def _parse_token(where: str, tenant: Tenant, credential: str, words: list[str]) -> Token:
    """Takes the end of the token out of ``words``."""
    ends_at_s = math.inf
    for word in [word for word in words if word.startswith(f"{_EXPIRES}=")]:
        words.remove(word)
        if ends_at_s != math.inf:
            raise ConfigError(where, _EXPIRES, f"{_EXPIRES} only once for a token")
        ends_at_s = parse_expiry(where, word)
    if _HASHED.fullmatch(credential):
        return Token(bytes.fromhex(credential.removeprefix("sha256:")), tenant, ends_at_s)
    is_long_enough = TOKEN_CHARS_MIN <= len(credential) <= TOKEN_CHARS_MAX
    if credential.startswith(("sha256:", "uid:", "gid:")) or not is_long_enough:
        expected = (
            f"one token of {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} characters, sha256: and 64 hex digits, "
            "or uid: or gid: and a number"
        )
        raise ConfigError(where, "(not shown)", expected)
    if len(set(credential)) < TOKEN_DISTINCT_MIN:
        expected = f"{TOKEN_DISTINCT_MIN} or more different characters, as `openssl rand -hex 32` makes them"
        raise ConfigError(where, "(not shown)", expected)
    return Token(sha256(credential.encode()).digest(), tenant, ends_at_s)


def parse_expiry(where: str, word: str) -> float:
    """Seconds since the epoch of ``expires=TIME``. Raises ConfigError."""
    try:
        time_of_day = datetime.fromisoformat(word.partition("=")[2])
    except ValueError:
        time_of_day = None
    if time_of_day is None or time_of_day.tzinfo is None:
        expected = f"{_EXPIRES}= and a time with its zone, as in {_EXPIRES}=2030-01-31T00:00:00Z"
        raise ConfigError(where, _EXPIRES, expected)
    return time_of_day.timestamp()


def _parse_settings(where: str, tenant: Tenant, words: list[str], given: dict[str, object]) -> None:
    """Adds what ``words`` set to ``given``, what earlier lines have set for the tenant."""
    for word in words:
        name, _, value = word.partition("=")
        if name == _EXPIRES:
            raise ConfigError(where, name, f"{_EXPIRES} behind a token: users and groups do not end")
        if name in given:
            raise ConfigError(where, name, f"{name} only once for a tenant")
        try:
            given[name] = PARSERS[name](name, value)
        except ConfigError as error:
            raise ConfigError(where, name, error.expected) from error
