"""Nothing that a daemon says, to anybody and through any fault, has a secret in it."""

from __future__ import annotations

import contextlib
import signal
import socket
import urllib.error
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hicache.admin.client import Admin
from hicache.admin.verbs import NAMESPACES, RELOAD, STATUS
from hicache.client import DaemonL3
from hicache.errors import HiCacheError
from hicache.keys import digest_fields
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire.bulk import BULK_HELLO, BULK_MAGIC
from hicache.wire.protocol import MEMORY_HELLO
from tests.client.support import get, key, put, wait_until
from tests.daemon.client import Client
from tests.daemon.rig import DaemonProcess, http_get

TOKEN = "marked-token-of-alice-0123"
OPERATOR = "marked-token-of-oncall-0123"
GUESS = "marked-guess-0123456789abc"
MASTER = "5ec2e7" + "0123456789abcdef" * 4
SALT = b"marked-salt-0123456789"
PAYLOAD = b"marked payload of a client. " * 200
NewL3 = Callable[..., DaemonL3]


@pytest.fixture
def daemon(start: Callable[..., DaemonProcess], folder: Path) -> DaemonProcess:
    """With everything that has a secret, as talkative as it can be."""
    for name, text in (
        ("tenants", f"alice {TOKEN}\nbob bob-token-0123456789ab\n"),
        ("operators", f"oncall {OPERATOR}\n"),
        ("masters", f"k1 {MASTER[:64]}\n"),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    return start(
        tenants_file=str(folder / "tenants"),
        operators_file=str(folder / "operators"),
        encryption_keys=str(folder / "masters"),
        trace_file=str(folder / "trace"),
        log_level="debug",
        log_format="json",
    )


def test_br_024_no_secret_comes_out_of_a_daemon_through_any_fault(
    daemon: DaemonProcess, folder: Path, new_l3: NewL3
) -> None:
    said: list[str] = []
    address = f"unix://{daemon.settings['socket']}"
    client = new_l3(address, token=TOKEN, deployment="chat", salt=SALT)
    assert client.wait_ready(timeout_s=20)
    memory = client.test_memory  # type: ignore[attr-defined]
    memory.buffer[: len(PAYLOAD)] = PAYLOAD
    items = [L3Item(key(number), 0, len(PAYLOAD)) for number in range(4)]
    assert put(client, items) == [Outcome.OK] * 4
    assert client.lookup([item.key for item in items], timeout_s=5) == [Outcome.OK] * 4
    with Client(daemon.target, token=TOKEN) as raw:
        secrets = [raw.secret, _attack(daemon, folder, raw.secret, said)]
        _damage(folder / "store")
        assert Outcome.CORRUPT in get(client, items)
        said += [repr(client.status()), repr(client.probe(timeout_s=5)), repr(raw.stats())]
    said.append(http_get(daemon.ready["http"], "/metrics")[1])
    for path in ("/v1/status", "/v1/history", "/v1/tenants", "/nothing", f"/v1/status?tenant={TOKEN}"):
        said.append(repr(http_get(daemon.ready["http"], path)) if TOKEN not in path else "")
    _ask_badly(daemon, folder, said)
    fingerprint = digest_fields([("salt", SALT)])
    said.append(Path(f"/proc/{daemon.process.pid}/coredump_filter").read_text())
    assert said[-1].strip() == "00000000", "a dump would have no memory"
    daemon.terminate()
    said += [daemon.log, (folder / "trace").read_bytes().decode("latin-1"), str(daemon.ready)]
    exposed = "\n".join(said)
    assert "alice" in exposed, "the log is the one of these sessions"
    assert "corrupt" in exposed.lower(), "and of these faults"
    for hidden in (TOKEN, OPERATOR, GUESS, MASTER[:64], SALT.decode(), PAYLOAD[:20].decode()):
        assert hidden not in exposed, hidden
    for raw_secret in (*secrets, fingerprint, SALT):
        for form in (raw_secret.hex(), repr(raw_secret), raw_secret.decode("latin-1")):
            assert form not in exposed


def _attack(daemon: DaemonProcess, folder: Path, secret: bytes, said: list[str]) -> bytes:
    """What is wrong in every way, with secrets that are right: whoever answers must not repeat them."""
    for token in (GUESS, TOKEN[:-1], TOKEN + "x"):
        with pytest.raises(grpc.RpcError) as caught:
            Client(daemon.target, token=token)
        said.append(str(caught.value.details()))  # type: ignore[attr-defined]  # every RpcError here is a Call
    sock = str(daemon.settings["socket"])
    for path, data in (
        (sock + ".bulk", BULK_HELLO.pack(BULK_MAGIC, secret) + b"\xff" * 40),
        (sock + ".bulk", BULK_HELLO.pack(BULK_MAGIC, secret[:-1] + b"?")),
        (sock + ".memory", MEMORY_HELLO.pack(secret, 1 << 62)),
        (sock, TOKEN.encode() * 10),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(path)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                said.append(connection.recv(65_536).decode("latin-1"))
    wrong = secret[:-1] + bytes([secret[-1] ^ 1])
    return wrong


def _ask_badly(daemon: DaemonProcess, folder: Path, said: list[str]) -> None:
    """Verbs that are refused, and a reload of files that are wrong just where the secret is."""
    admin = str(daemon.settings["socket"]) + ".admin"
    for token, verb in (
        (GUESS, STATUS),
        (TOKEN, NAMESPACES),
        (TOKEN, RELOAD),
        (OPERATOR, NAMESPACES),
        (OPERATOR, RELOAD),
    ):
        with contextlib.suppress(HiCacheError, urllib.error.URLError):
            said.append(repr(Admin(admin, token=token).ask(verb)))
    for name, text in (
        ("tenants", f"{TOKEN} alice\n"),
        ("tenants", f"alice {TOKEN} {TOKEN}\n"),
        ("tenants", f"alice{TOKEN}\n"),
        ("operators", f"{OPERATOR}\n"),
    ):
        before = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(HiCacheError) as caught:
            Admin(admin, token=OPERATOR).ask(RELOAD)
        said.append(str(caught.value))
        count = daemon.log.count("\n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda count=count: daemon.log.count("\n") > count, what="a line about it")  # type: ignore[misc]
        (folder / name).write_text(before)


def _damage(store: Path) -> None:
    """Some bytes of every chunk that is in use."""
    with (store / "chunks.slab").open("r+b") as slab:
        for chunk in range(8):
            slab.seek(chunk * 65_536 + 100)
            slab.write(b"damaged")
