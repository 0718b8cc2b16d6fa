"""Small objects of our own in a Mooncake store: the one that names it, and one that tries what it takes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial

from hicache.backends.arena import Extent
from hicache.backends.mooncake_codes import INVALID_PARAMS, RPC_FAIL
from hicache.backends.mooncake_layout import HEADER_BYTES, decode_header, encode_header
from hicache.backends.mooncake_link import Link
from hicache.checksum import payload_checksum
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome

STORE_ID_NAME = "hicache.store-id.1"
STORE_ID_BYTES = 16
STORE_ID_STORED_BYTES = HEADER_BYTES + STORE_ID_BYTES
TRY_INTERVAL_S = 0.1


class StoreIdentity:
    """Agrees with all other daemons on the id of a store. A store that forgot its objects has another one."""

    def __init__(self, link: Link, *, deadline_s: Callable[[], float]) -> None:
        self._link = link
        self._deadline_s = deadline_s

    def agree(self, config: object, *, tries: int) -> bytes:
        """The id in the store. The first daemon puts it there; of several, the store takes the first one's for all.

        Raises BackendError when the store does not have it after so many tries, TRY_INTERVAL_S apart.
        """
        for attempt in range(tries):
            if attempt > 0:
                time.sleep(TRY_INTERVAL_S)  # another daemon is putting it, or the first node is about to join
            found = self._read(STORE_ID_NAME)
            if found is not None:
                return found
            self._write(STORE_ID_NAME, secrets.token_bytes(STORE_ID_BYTES), config)
        found = self._read(STORE_ID_NAME)
        if found is None:
            raise BackendError("the Mooncake store keeps nothing: it has no node with room, or they do not answer")
        return found

    def try_config(self, config: object, *, soft_pin_s: int) -> None:
        """Put an object as all will be put: what the master forbids stops the start, and not every put.

        Raises ConfigError.
        """
        name = f"hicache.probe.1.{secrets.token_hex(8)}"
        if self._write(name, secrets.token_bytes(STORE_ID_BYTES), config) == INVALID_PARAMS:
            expected = "at most the master's --max_kv_soft_pin_ttl"
            raise ConfigError("mooncake_soft_pin_s", soft_pin_s, expected)
        self._link.ask(lambda client: client.batch_remove([name], True), 1)

    def _read(self, name: str) -> bytes | None:
        sizes = [STORE_ID_STORED_BYTES]
        moved = self._link.move(
            [name],
            sizes,
            lambda client, addresses: client.batch_get_into([name], addresses, sizes),
            deadline_s=self._deadline_s(),
        )
        if isinstance(moved, Outcome):
            return None
        raw = bytes(moved.extent.views[0])
        moved.extent.release()
        key, content = name.encode(), raw[HEADER_BYTES:]
        is_whole = moved.codes[0] == len(raw)
        expected = (STORE_ID_BYTES, payload_checksum(key, content))
        return content if is_whole and decode_header(key, raw[:HEADER_BYTES]) == expected else None

    def _write(self, name: str, content: bytes, config: object) -> int:
        key = name.encode()
        value = encode_header(key, len(content), payload_checksum(key, content)) + content
        moved = self._link.move(
            [name],
            [len(value)],
            lambda client, addresses: client.batch_put_from([name], addresses, [len(value)], config),
            deadline_s=self._deadline_s(),
            fill=partial(_fill, value=value),
        )
        if isinstance(moved, Outcome):
            return RPC_FAIL
        moved.extent.release()
        return moved.codes[0]


def _fill(extent: Extent, *, value: bytes) -> None:
    extent.views[0][:] = value
