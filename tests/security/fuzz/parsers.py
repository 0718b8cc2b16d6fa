"""What each parser may do with any bytes at all: return something right, or refuse in its own way. Nothing else."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from hicache.backends.archive import (
    ArchiveEnd,
    ArchiveError,
    ArchiveHeader,
    ArchiveReader,
    encode_end,
    encode_header,
    encode_object_head,
)
from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX
from hicache.backends.file_layout import HEADER_BYTES, ObjectHeader, decode_header, key_of_name, object_path
from hicache.backends.lmdb_layout import CHUNK_BYTES, IndexRecord, decode_record
from hicache.backends.marker import MARKER_NAME, new_marker, read_marker
from hicache.backends.sealing import SEAL_BYTES
from hicache.backends.tenant_keys import MasterKeys
from hicache.certificates import earliest_expiration_s
from hicache.client.address import parse_address
from hicache.daemon.batches import read_bulk, read_region
from hicache.daemon.bulk_calls import _read_header
from hicache.daemon.config import load_config
from hicache.daemon.deployments import read_membership
from hicache.daemon.http import is_own_host
from hicache.daemon.namespaces import read_descriptor
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session
from hicache.daemon.tenants import Tenant, Tenants
from hicache.errors import ConfigError
from hicache.spec import namespace_digest
from hicache.tenancy import tenant_digest
from hicache.traces import read_mooncake_trace
from hicache.tracing import OpenTelemetryTracer
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import BULK_CALLER, BULK_REQUEST, BulkKind, pack_numbers, pack_request, unpack_numbers
from hicache.wire.protocol import KEY_BYTES_MAX, pack_keys, split_keys

KEY = tenant_digest("alice") + b"k" * 36
SECRET = "secret-0123456789abcdef"
DESCRIPTOR = {"format_version": 1, "model": "tiny", "page_tokens": 64, "key_hash": "blake2b"}


@dataclass(frozen=True, slots=True)
class Target:
    """``run`` raises where a promise is broken."""

    name: str
    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


class _FileOf(contextlib.AbstractContextManager[str]):
    """A file in memory with these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> str:
        descriptor, self._path = tempfile.mkstemp(dir="/dev/shm", prefix="hicache-fuzz-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(self._data)
        return self._path

    def __exit__(self, *_: object) -> None:
        os.unlink(self._path)


def config_file(data: bytes) -> None:
    with _FileOf(data) as path, contextlib.suppress(ConfigError):
        load_config(path, {})


def tenants_file(data: bytes) -> None:
    with _FileOf(data) as path:
        try:
            tenants = Tenants.load(path)
        except ConfigError as error:
            _require_no(SECRET, error)
            return
        with contextlib.suppress(Refusal):
            assert tenants.authenticate(SECRET) in tenants.settings


def master_keys_file(data: bytes) -> None:
    with _FileOf(data) as path:
        try:
            MasterKeys.read(path)
        except ConfigError as error:
            _require_no(_MASTER, error)


def _require_no(secret: str, error: ConfigError) -> None:
    if secret in str(error):
        raise AssertionError("a secret is quoted")


_MASTER = "0123456789abcdef" * 4
_MASTERS = MasterKeys({"k1": bytes.fromhex(_MASTER)})
_TENANT = tenant_digest("alice")
_WRAPPED = _MASTERS.wrap(_TENANT, b"d" * 32)


def tenant_key_file(data: bytes) -> None:
    try:
        data_key, _ = _MASTERS.unwrap(_TENANT, data)
    except (KeyError, ValueError):
        return
    assert data_key == b"d" * 32, "whatever unwraps is the key that was wrapped"


def index_record(data: bytes) -> None:
    record = decode_record(KEY, data)
    if record is not None:
        assert record.encode(KEY) == data
        assert decode_record(KEY + b"!", data) is None


def file_header(data: bytes) -> None:
    raw = data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    header = decode_header(raw)
    decode_header(data)
    if header is not None:
        again = decode_header(header.encode())
        assert again == header
        assert len(header.key) <= PHYSICAL_KEY_BYTES_MAX


def file_name(data: bytes) -> None:
    name = data.decode("utf-8", "surrogateescape")
    key = key_of_name(name)
    if key is not None:
        assert object_path("", key).rpartition("/")[2] == name


def store_marker(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hicache-fuzz-") as folder:
        (Path(folder) / MARKER_NAME).write_bytes(data)
        with contextlib.suppress(ConfigError):
            read_marker(Path(folder), kind="lmdb", versions=(2, 3))


def descriptor(data: bytes) -> None:
    with contextlib.suppress(Refusal):
        read_descriptor(data, namespace_digest(DESCRIPTOR))
    with contextlib.suppress(Refusal):
        read_descriptor(data, data[:32])


def hello(data: bytes) -> None:
    try:
        message = pb.SessionRequest.FromString(data).hello
    except DecodeError:
        return
    with contextlib.suppress(Refusal):
        described = read_descriptor(message.namespace_descriptor, message.namespace_digest)
        read_membership(message.deployment, described, message.salt_fingerprint)


_CONFIG = load_config(None, {"socket": "/tmp/s.sock", "path": "/tmp", "http": ""})


def bulk_request(data: bytes) -> None:
    """As a connection reads it: the header bounds what is read behind it."""
    header = data[: BULK_REQUEST.size].ljust(BULK_REQUEST.size, b"\0")
    try:
        request = _read_header(header)
    except Refusal:
        return
    if request.key_count > _CONFIG.batch_keys_max:
        return
    assert request.body_bytes <= _CONFIG.batch_keys_max * (KEY_BYTES_MAX + 16) + 8, "memory that a header can ask for"
    behind = data[BULK_REQUEST.size :]
    if request.is_traced:
        traced_call(behind[: BULK_CALLER.size])
        behind = behind[BULK_CALLER.size :]
    body = behind.ljust(request.body_bytes, b"\0")[: request.body_bytes]
    keys = split_keys(body[: request.sizes_at], request.key_bytes)
    sizes = unpack_numbers(body[request.sizes_at : request.sizes_at + request.numbers_bytes])
    session = _session()
    with contextlib.suppress(Refusal):
        batch = read_bulk(keys, sizes, session, _CONFIG)
        assert len(batch.outcomes) == request.key_count
        assert all(0 < extent.size_bytes <= _CONFIG.object_bytes_max for extent in batch.extents)
    with contextlib.suppress(Refusal):
        batch = read_region(keys, sizes, sizes[::-1], session, 1 << 20, _CONFIG)
        assert all(it.offset >= 0 and it.offset + it.size_bytes <= 1 << 20 for it in batch.extents)
        assert all(it.key.startswith(tenant_digest("alice")) for it in batch.extents)


def traced_call(data: bytes) -> None:
    """Whatever a caller says it is, its call has a span, and what it says goes no further than its ids."""
    with OpenTelemetryTracer().span("x", caller=data.ljust(BULK_CALLER.size, b"\0")):
        pass


def certificate(data: bytes) -> None:
    """As the content of a PEM block, and as the file around it."""
    body = base64.encodebytes(data)
    for pem in (data, b"-----BEGIN CERTIFICATE-----\n" + body + b"-----END CERTIFICATE-----\n"):
        end_s = earliest_expiration_s(pem)
        assert end_s is None or datetime.fromtimestamp(end_s, UTC).year >= 1


def archive(data: bytes) -> None:
    with contextlib.suppress(ArchiveError):
        for stored in ArchiveReader(io.BytesIO(data), object_bytes_max=1 << 20):
            assert stored.payload is None or stored.payload.nbytes == stored.size_bytes <= 1 << 20


def trace_file(data: bytes) -> None:
    with _FileOf(data) as path, contextlib.suppress(ConfigError):
        for request in read_mooncake_trace(path):
            assert request is not None


def client_address(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        parse_address(data.decode("utf-8", "replace"))


def host_header(data: bytes) -> None:
    is_own_host(data.decode("latin-1"))


def _session() -> Session:
    return Session(1, Tenant.named("alice"), "", None)  # type: ignore[arg-type]  # no budget is asked for here


def _archive_seed() -> bytes:
    header = ArchiveHeader(namespace=b"n" * 32, descriptor=msgspec.msgpack.encode(DESCRIPTOR), model="tiny")
    made = encode_header(header)
    for number in range(3):
        payload = bytes([number]) * 100
        made += encode_object_head(b"k%d" % number, memoryview(payload)) + payload
    return made + encode_end(ArchiveEnd(3, 300))


def _record_seeds() -> Iterator[bytes]:
    for seal in (b"", b"s" * SEAL_BYTES):
        for tag in (0, 77):
            ids = np.arange(3, dtype=np.uint32)
            yield IndexRecord(2 * CHUNK_BYTES + 1, 5, 1.5, ids, tag, seal).encode(KEY)


def _request_seeds() -> Iterator[bytes]:
    keys, key_bytes = pack_keys([b"k" * 36, b"l" * 36])
    for kind in BulkKind:
        for caller in (b"", BULK_CALLER.pack(b"t" * 16, b"s" * 8, 1)):
            header = pack_request(kind, key_bytes, 2, timeout_ms=1000, caller=caller)
            yield header + keys + pack_numbers([100, 200]) * 2 + struct.pack("<Q", 1)


# Up to its end: SEQUENCE, SEQUENCE, version 3, a serial number, ecdsa-with-SHA256, CN=ca, from, until.
_CERTIFICATE = (
    "30453043" + "a003020102" + "020101" + "300a06082a8648ce3d040302" + "300d310b300906035504030c026361"
    "301e170d3236303130313030303030305a170d3237303130313030303030305a"
)
_HELLO = pb.SessionRequest(
    hello=pb.Hello(
        protocol_version=1,
        namespace_digest=namespace_digest(DESCRIPTOR),
        namespace_descriptor=msgspec.msgpack.encode(DESCRIPTOR),
        client_name="fuzz",
        deployment="chat",
        salt_fingerprint=b"f" * 32,
    )
).SerializeToString()

PARSERS = (
    Target(
        "config_file", config_file, (b'socket = "/tmp/s"\ncapacity_bytes = "1GiB"\nttl_s = 1.5\nfile_shared = true\n',)
    ),
    Target(
        "tenants_file",
        tenants_file,
        (f"# x\nalice {SECRET} weight=2 expires=2030-01-31T00:00:00Z\nbob uid:7\nbob gid:8 ttl_s=1\n".encode(),),
    ),
    Target("master_keys_file", master_keys_file, (f"k1 {_MASTER}\nk0 {_MASTER[::-1]}\n".encode(),)),
    Target("tenant_key_file", tenant_key_file, (_WRAPPED,)),
    Target("index_record", index_record, tuple(_record_seeds())),
    Target(
        "file_header",
        file_header,
        (ObjectHeader(KEY, 100, 5, 77).encode()[:600], ObjectHeader(KEY, 100, 0, 0, b"s" * SEAL_BYTES).encode()[:600]),
    ),
    Target("file_name", file_name, (KEY.hex().encode(), object_path("", b"k" * 128).rpartition("/")[2].encode())),
    Target("store_marker", store_marker, (msgspec.json.encode(new_marker("lmdb", 3)),)),
    Target("descriptor", descriptor, (msgspec.msgpack.encode(DESCRIPTOR),)),
    Target("hello", hello, (_HELLO,)),
    Target("bulk_request", bulk_request, tuple(_request_seeds())),
    Target("certificate", certificate, (bytes.fromhex(_CERTIFICATE),)),
    Target("archive", archive, (_archive_seed(),)),
    Target(
        "trace_file",
        trace_file,
        (b'{"timestamp": 1, "input_length": 1024, "output_length": 7, "hash_ids": [1, 2]}\n' * 2,),
    ),
    Target(
        "client_address", client_address, (b"tls://h:1?ca=/a&certificate=/b&name=c", b"unix:///run/s", b"tcp://[::1]:7")
    ),
    Target("host_header", host_header, (b"127.0.0.1:9470", b"[::1]:1", b"localhost")),
)
