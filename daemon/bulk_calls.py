"""The calls on a connection of the bulk socket: reads each request, has it done, and counts it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Never

import structlog

from hicache.daemon.batches import Batch, check_key_count, read_bulk, read_region
from hicache.daemon.bulk_connection import BulkConnection, ConnectionOver
from hicache.daemon.call_tally import Items
from hicache.daemon.calls import deadline_after
from hicache.daemon.config import DaemonConfig
from hicache.daemon.metrics import Metrics
from hicache.daemon.refusals import Refusal
from hicache.daemon.region_transfer import RegionTransfer
from hicache.daemon.sessions import Session, Sessions
from hicache.daemon.staging import Staging
from hicache.daemon.streams import StreamReceiver, StreamSender
from hicache.daemon.transfers import Transfers
from hicache.outcome import Outcome
from hicache.tracing import tracer
from hicache.wire.bulk import (
    BULK_ACCEPTED,
    BULK_CALLER,
    BULK_NUMBER_BYTES,
    BULK_REASON,
    BULK_REFUSED,
    BULK_REGION,
    BULK_REQUEST,
    BULK_TRACED,
    BulkKind,
    unpack_numbers,
)
from hicache.wire.protocol import KEY_BYTES_MAX, RefusalCode, split_keys
from hicache.workers import QueueFull

IDLE_STAGING_SHARE = 8  # one part in so many of inflight_bytes_max is kept as staging memory while nobody uses it
METHODS = {
    BulkKind.GET: "GetStream",
    BulkKind.PUT: "PutStream",
    BulkKind.LOAD: "Get",
    BulkKind.STORE: "Put",
}

log = structlog.get_logger("hicache.daemon.bulk")


@dataclass(frozen=True, slots=True)
class _Request:
    kind: BulkKind
    key_bytes: int
    key_count: int
    timeout_ms: int
    is_traced: bool = False  # a BULK_CALLER comes before the keys

    @property
    def is_about_region(self) -> bool:
        """Whether it names registered memory."""
        return self.kind in (BulkKind.LOAD, BulkKind.STORE)

    @property
    def sizes_at(self) -> int:
        """Where the sizes begin behind the header: [keys, sizes) and then, about a region, [offsets, its id)."""
        return self.key_count * self.key_bytes

    @property
    def numbers_bytes(self) -> int:
        """What the sizes take, and the offsets."""
        return self.key_count * BULK_NUMBER_BYTES

    @property
    def body_bytes(self) -> int:
        """What comes behind the header, and the caller."""
        region_bytes = self.numbers_bytes + BULK_REGION.size if self.is_about_region else 0
        return self.sizes_at + self.numbers_bytes + region_bytes


class BulkCalls:
    """What the threads of all connections share. Thread-safe."""

    def __init__(self, config: DaemonConfig, *, sessions: Sessions, transfers: Transfers, metrics: Metrics) -> None:
        self._config = config
        self._sessions = sessions
        self._transfers = transfers
        self._metrics = metrics
        self._tracer = tracer()
        self._staging = Staging(idle_bytes_max=config.inflight_bytes_max // IDLE_STAGING_SHARE)

    def serve(self, connection: BulkConnection, session: Session) -> None:
        """Welcomes ``connection``, serves it until it is over, and closes it. Blocking."""
        try:
            connection.send([BULK_ACCEPTED])
            while True:
                self._serve_call(connection, session)
        except ConnectionOver:
            pass
        except Exception:
            log.exception("bulk connection failed", session=session.session_id)
        finally:
            connection.close()

    def _serve_call(self, connection: BulkConnection, session: Session) -> None:
        """One call. Raises ConnectionOver when it was the last one."""
        header = memoryview(bytearray(BULK_REQUEST.size))
        received_bytes = connection.await_first_bytes(header)
        deadline_s = time.monotonic() + self._config.call_timeout_s_max
        with connection.call(deadline_s=deadline_s):
            try:
                connection.receive(header[received_bytes:])
                request = _read_header(bytes(header))
                caller = connection.receive_bytes(BULK_CALLER.size) if request.is_traced else b""
            except Refusal as refusal:
                self._refuse(connection, refusal)
            method = METHODS[request.kind]
            with (
                self._tracer.span(f"hicached.{method}", is_server=True, caller=caller) as span,
                self._metrics.tally.call(method) as result,
            ):
                try:
                    self._answer(request, connection, session)
                except Refusal as refusal:
                    result.name = refusal.code
                    self._refuse(connection, refusal)
                except ConnectionOver as over:
                    result.name = over.result
                    raise
                except Exception:
                    result.name = "error"
                    raise
                finally:
                    span.set_attributes({"hicached.result": result.name, "hicached.keys": request.key_count})

    def _answer(self, request: _Request, connection: BulkConnection, session: Session) -> None:
        check_key_count(request.key_count, self._config)
        deadline_s = deadline_after(request.timeout_ms / 1000 or None, self._config.call_timeout_s_max)
        connection.set_deadline(deadline_s)
        packed = connection.receive_bytes(request.body_bytes)
        keys = split_keys(packed[: request.sizes_at], request.key_bytes)
        sizes = unpack_numbers(packed[request.sizes_at : request.sizes_at + request.numbers_bytes])
        self._sessions.check_open()
        if request.kind in (BulkKind.PUT, BulkKind.STORE):
            self._sessions.check_takes_work()
        session.rates.admit_call()
        with self._metrics.tally.keys(METHODS[request.kind], len(keys)) as items:
            items.sizes_bytes = sizes
            if request.is_about_region:
                where = packed[request.sizes_at + request.numbers_bytes :]
                batch = self._move(request, keys, where, items, connection, session, deadline_s=deadline_s)
            else:
                batch = read_bulk(keys, sizes, session, self._config)
                move = self._get if request.kind is BulkKind.GET else self._put
                move(batch, items, connection, session, deadline_s=deadline_s)
            session.rates.give_back_bytes(batch.total_bytes - items.moved_bytes)  # what did not move costs nothing
        if request.kind is not BulkKind.GET:
            connection.send([BULK_ACCEPTED + bytes(batch.outcomes)])

    def _move(
        self,
        request: _Request,
        keys: Sequence[bytes],
        where: bytes,
        items: Items,
        connection: BulkConnection,
        session: Session,
        *,
        deadline_s: float,
    ) -> Batch:
        """Registered memory: DEADLINE for an item means that its bytes may still be touched.

        ``where``: the offsets and the region, packed.
        """
        offsets = unpack_numbers(where[: request.numbers_bytes])
        [region_id] = BULK_REGION.unpack(where[request.numbers_bytes :])
        region = session.region(region_id)
        batch = read_region(keys, offsets, items.sizes_bytes, session, region.size_bytes, self._config)
        items.outcomes = batch.outcomes
        transfer = RegionTransfer(self._transfers, session, region, connection, deadline_s=deadline_s)
        if request.kind is BulkKind.LOAD:
            transfer.load(batch)
        else:
            transfer.store(batch)
        return batch

    def _get(
        self, batch: Batch, items: Items, connection: BulkConnection, session: Session, *, deadline_s: float
    ) -> None:
        connection.send([BULK_ACCEPTED])
        sender = StreamSender(self._transfers, self._staging, session, connection, deadline_s=deadline_s)
        items.outcomes = batch.outcomes
        sender.send_all(batch)

    def _put(
        self, batch: Batch, items: Items, connection: BulkConnection, session: Session, *, deadline_s: float
    ) -> None:
        self._look_up(batch, connection, deadline_s=deadline_s)
        wanted = [extent for extent in batch.extents if batch.outcomes[extent.index] is Outcome.OK]
        connection.send([BULK_ACCEPTED + bytes(batch.outcomes)])
        receiver = StreamReceiver(
            self._transfers, self._staging, session, connection, self._config, deadline_s=deadline_s
        )
        items.outcomes = batch.outcomes
        receiver.receive_all(wanted, batch.outcomes)

    def _look_up(self, batch: Batch, connection: BulkConnection, *, deadline_s: float) -> None:
        """EXISTS for what the store has: it costs a key, and not its bytes. What cannot tell has nothing."""
        keys = [extent.key for extent in batch.extents]
        try:
            job = self._transfers.ask(lambda: self._transfers.store.lookup(keys)[0], len(keys))
            found = connection.wait(job.future, deadline_s=deadline_s)
        except (QueueFull, CancelledError, TimeoutError):
            return
        for extent, outcome in zip(batch.extents, found, strict=True):
            if outcome is Outcome.OK:
                batch.outcomes[extent.index] = Outcome.EXISTS

    def _refuse(self, connection: BulkConnection, refusal: Refusal) -> Never:
        """Says why, and ends the connection: what the client goes on to send would be read as something else."""
        log.debug("bulk call refused", reason=str(refusal))
        connection.send([refused(refusal)])
        connection.discard_input()
        raise ConnectionOver(refusal.code)


def refused(refusal: Refusal) -> bytes:
    """The status that says so, with its reason."""
    text = str(refusal).encode()[:65_535]
    return BULK_REFUSED + BULK_REASON.pack(len(text)) + text


def _read_header(header: bytes) -> _Request:
    kind, coded_bytes, key_count, timeout_ms = BULK_REQUEST.unpack(header)
    key_bytes = coded_bytes & ~BULK_TRACED
    if kind not in BulkKind._value2member_map_:
        raise Refusal(RefusalCode.BAD_STREAM, f"expected a request, not {header.hex()}")
    if key_count and not 1 <= key_bytes <= KEY_BYTES_MAX:
        raise Refusal(RefusalCode.MALFORMED, f"key_bytes is {key_bytes}: expected 1 to {KEY_BYTES_MAX}")
    return _Request(BulkKind(kind), key_bytes, key_count, timeout_ms, is_traced=bool(coded_bytes & BULK_TRACED))
