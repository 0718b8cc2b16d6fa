"""Who owns data: the tenant behind a token."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from hashlib import sha256

from hicache.daemon.refusals import Refusal
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


class Tenants:
    """All tenants of one daemon. Immutable: a change of the file takes effect at the next start."""

    def __init__(self, by_token_hash: dict[bytes, Tenant] | None) -> None:
        self._by_token_hash = by_token_hash
        tenants = {Tenant.named(DEFAULT_TENANT)} if by_token_hash is None else set(by_token_hash.values())
        self.count = len(tenants)

    @classmethod
    def load(cls, file: str) -> Tenants:
        """Tenants from ``file``; the one default tenant for an empty path. Raises ConfigError."""
        return cls(None if not file else _read_tokens(file))

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


def _read_tokens(file: str) -> dict[bytes, Tenant]:
    """Lines of ``tenant token`` or ``tenant sha256:HEX``; blank lines and lines that start with # mean nothing."""
    try:
        with open(file, encoding="utf-8") as source:
            lines = source.read(16 * 1024 * 1024).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("tenants_file", file, f"a readable text file ({error})") from error
    tokens: dict[bytes, Tenant] = {}
    for line_number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            token_hash, tenant = _parse_line(f"tenants_file {file} line {line_number}", line)
            if token_hash in tokens:
                raise ConfigError(f"tenants_file {file} line {line_number}", tenant.name, "a token used only once")
            tokens[token_hash] = tenant
    if not 1 <= len(tokens) <= TENANTS_MAX:
        raise ConfigError("tenants_file", file, f"1 to {TENANTS_MAX} lines of `tenant token`, not {len(tokens)}")
    return tokens


def _parse_line(where: str, line: str) -> tuple[bytes, Tenant]:
    """Token hash and tenant of one line. Errors never quote the token."""
    name, *rest = line.split()
    token = " ".join(rest)
    if not _NAME.fullmatch(name):
        raise ConfigError(where, "(not shown)", "`tenant token`, the tenant of letters, digits, '.', '_' and '-'")
    if _HASHED.fullmatch(token):
        return bytes.fromhex(token.removeprefix("sha256:")), Tenant.named(name)
    if token.startswith("sha256:") or not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX or " " in token:
        raise ConfigError(
            where,
            f"{name} (token not shown)",
            f"one token of {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} characters, or sha256: and 64 hex digits",
        )
    return sha256(token.encode()).digest(), Tenant.named(name)
