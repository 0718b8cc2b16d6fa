"""Encrypts stored objects, each tenant's under a key of its own: without that key, nobody reads them any more.

An object has a seal of SEAL_BYTES beside it, a random nonce and the tag of AES-256-GCM. Half of the nonce derives the
key of this one object from that of its tenant, the other half is the nonce of GCM: two objects never share both,
however many there are. The tag covers the physical key (and with it the tenant) and the size.
"""

from __future__ import annotations

import secrets
import struct
from hashlib import blake2b
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import (
    AEADDecryptionContext,
    AEADEncryptionContext,
    Cipher,
    algorithms,
    modes,
)

from hicache.tenancy import TENANT_BYTES

TAG_BYTES: Final = 16
NONCE_BYTES: Final = 24
SEAL_BYTES: Final = NONCE_BYTES + TAG_BYTES
DATA_KEY_BYTES: Final = 32

_DERIVED_BYTES = NONCE_BYTES // 2
_PERSON = b"hicache.object.1"


class DataKeys(Protocol):
    """The keys of tenants. Thread-safe."""

    def find(self, tenant: bytes) -> bytes | None:
        """The key of the tenant with this digest; None: it has none, or it was dropped."""
        ...

    def find_or_make(self, tenant: bytes) -> bytes:
        """The same, made durably where there is none. Raises OSError."""
        ...


class Sealer:
    """Encrypts one object, in order."""

    def __init__(self, context: AEADEncryptionContext, nonce: bytes) -> None:
        self._context = context
        self._nonce = nonce

    def encrypt_into(self, part: memoryview, target: memoryview) -> None:
        """The next part, to where it belongs; ``target`` has the size of ``part``, which is read once."""
        self._context.update_into(part, target)

    def seal(self) -> bytes:
        """Behind the last part."""
        self._context.finalize()
        return self._nonce + self._context.tag


class Opener:
    """Decrypts one object, in order. Nothing of it is true before ``is_genuine`` has said so."""

    def __init__(self, context: AEADDecryptionContext, tag: bytes) -> None:
        self._context = context
        self._tag = tag

    def decrypt_into(self, part: memoryview, target: memoryview) -> None:
        """``target`` has the size of ``part``, and may be the same memory."""
        self._context.update_into(part, target)

    def is_genuine(self) -> bool:
        """Whether just these bytes were stored under this key and size by whoever has the tenant's key."""
        try:
            self._context.finalize_with_tag(self._tag)
        except InvalidTag:
            return False
        return True


class Sealing:
    """Begins to encrypt and to decrypt objects. Thread-safe."""

    def __init__(self, keys: DataKeys) -> None:
        self._keys = keys

    def sealer(self, key: bytes, size_bytes: int) -> Sealer:
        """For a new object under a physical key. Raises OSError where its tenant's key cannot be made."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        context = _cipher(self._keys.find_or_make(key[:TENANT_BYTES]), nonce).encryptor()
        context.authenticate_additional_data(_bound_to(key, size_bytes))
        return Sealer(context, nonce)

    def opener(self, key: bytes, size_bytes: int, seal: bytes) -> Opener | None:
        """For a stored object; None where nobody can read it."""
        data_key = self._keys.find(key[:TENANT_BYTES])
        if data_key is None or len(seal) != SEAL_BYTES:
            return None
        context = _cipher(data_key, seal[:NONCE_BYTES]).decryptor()
        context.authenticate_additional_data(_bound_to(key, size_bytes))
        return Opener(context, seal[NONCE_BYTES:])


def _cipher(data_key: bytes, nonce: bytes) -> Cipher[modes.GCM]:
    object_key = blake2b(nonce[:_DERIVED_BYTES], key=data_key, person=_PERSON, digest_size=32).digest()
    return Cipher(algorithms.AES(object_key), modes.GCM(nonce[_DERIVED_BYTES:]))


def _bound_to(key: bytes, size_bytes: int) -> bytes:
    return struct.pack("<Q", size_bytes) + key
