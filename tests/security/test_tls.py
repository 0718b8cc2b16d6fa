"""TLS on both TCP sockets: who is let in, who is told why not, and certificates that are renewed while it runs."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from bench.certificates import Authority
from hicache import CacheSpec, HiCache, PagedGroup, PrefetchPolicy
from hicache.client import DaemonL3
from hicache.client.address import parse_address
from hicache.client.tls import TlsFiles
from hicache.daemon.config import load_config
from hicache.daemon.tls import ServerTls, certified_tenant
from hicache.errors import ConfigError
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire.bulk import BULK_HELLO, BULK_MAGIC, BULK_REFUSED
from tests.client.support import get, key, open_descriptors, payload, put, wait_until
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import ALICE, BOB, DaemonProcess, http_get, settings_in
from tests.observability.conservation import read_scrape
from tests.security.conftest import TlsRig

ENGINE = CacheSpec("m", "r", (PagedGroup("attention", (0,), heads=1, head_dim=8, dtype="float32"),), page_tokens=64)
SIZE = 300_000  # many records of TLS, and a part of one
NewL3 = Callable[..., DaemonL3]


def round_trip(client: DaemonL3, *, number: int = 1) -> None:
    """An object goes there and comes back."""
    memory = client.test_memory  # type: ignore[attr-defined]
    assert client.wait_ready(timeout_s=10), client.status()
    memory.buffer[:SIZE] = payload(number, SIZE)
    assert put(client, [L3Item(key(number), 0, SIZE)]) == [Outcome.OK]
    memory.buffer[:SIZE] = bytes(SIZE)
    assert get(client, [L3Item(key(number), 0, SIZE)]) == [Outcome.OK]
    assert memory.buffer[:SIZE] == payload(number, SIZE)


def secure_socket(host_and_port: str, files: TlsFiles) -> ssl.SSLSocket:
    host, _, port = host_and_port.rpartition(":")
    return files.wrap(socket.create_connection((host, int(port)), timeout=10), host, timeout_s=10)


class TestWhoIsLetIn:
    """Every refusal has its reason, and the right client beside it is served."""

    def test_objects_go_and_come_over_tls(self, secure: ThreadedDaemon, rig: TlsRig, new_l3: NewL3) -> None:
        round_trip(new_l3(rig.address(secure.ready.listen, certificate=rig.client), token=ALICE))

    def test_engines_find_each_others_pages_over_tls(
        self, start_thread: Callable[..., ThreadedDaemon], rig: TlsRig, two_tenants: str
    ) -> None:
        """Through the settings that an engine has, and with what only hicached can promise."""
        daemon = start_thread(tenants_file=two_tenants, **rig.settings())
        address = rig.address(daemon.ready.listen, certificate=rig.client)
        with pytest.raises(ConfigError, match="one that hicached at tls://"):
            HiCache.open(ENGINE, l1_pages=8, l2_bytes=1 << 20, l3=address, token="a-token-of-nobody", deployment="chat")
        tokens, restored = list(range(300)), []
        for _ in range(2):
            with HiCache.open(
                ENGINE,
                l1_pages=8,
                l2_bytes=1 << 20,
                l3=address,
                token=ALICE,
                deployment="chat",
                prefetch=PrefetchPolicy("wait_complete", threshold_tokens=0),
            ) as cache:
                request = cache.match(tokens)
                cache.prefetch(request)
                cache.wait(request)
                loaded = cache.load(request)
                assert loaded is not None
                assert cache.extend(request, tokens=300)
                cache.store(request, computed=256)
                cache.release(request)
                assert cache.flush(timeout_s=20)
                restored.append(loaded.by_source.get("l3", 0))
        assert restored == [0, 256]

    def test_a_token_is_enough_where_the_settings_say_so(
        self, start_thread: Callable[..., ThreadedDaemon], rig: TlsRig, two_tenants: str, new_l3: NewL3
    ) -> None:
        daemon = start_thread(tenants_file=two_tenants, **rig.settings(clients="token"))
        round_trip(new_l3(rig.address(daemon.ready.listen), token=ALICE))
        assert new_l3(rig.address(daemon.ready.listen), token="not-a-token-at-all").probe().code == "BAD_TOKEN"

    @pytest.mark.parametrize(
        ("case", "code", "text"),
        [
            ("another ca", "TLS_SERVER", "certificate of hicached at 127.0.0.1"),
            ("another name", "TLS_SERVER", "Hostname mismatch"),
            ("no certificate", "TLS_CLIENT", "the address names none"),
            ("a foreign certificate", "TLS_CLIENT", "must be valid and from tls_client_ca"),
            ("an expired certificate", "TLS_CLIENT", "must be valid and from tls_client_ca"),
            ("plaintext", "TLS_EXPECTED", "use tls://127.0.0.1"),
            ("no ca file", "TLS_FILES", "missing.pem"),
        ],
    )
    def test_who_is_not_let_in_is_told_why(
        self, secure: ThreadedDaemon, rig: TlsRig, new_l3: NewL3, folder: Path, case: str, code: str, text: str
    ) -> None:
        listen = secure.ready.listen
        other = Authority(folder, "other")
        address = {
            "another ca": lambda: rig.address(listen, ca=other.file, certificate=rig.client),
            "another name": lambda: rig.address(listen, certificate=rig.client, name="elsewhere"),
            "no certificate": lambda: rig.address(listen),
            "a foreign certificate": lambda: rig.address(listen, certificate=other.issue("stranger")),
            "an expired certificate": lambda: rig.address(
                listen, certificate=rig.ca.issue("late", ends=timedelta(days=-1))
            ),
            "plaintext": lambda: f"tcp://{listen}",
            "no ca file": lambda: rig.address(listen, ca=folder / "missing.pem"),
        }[case]()
        report = new_l3(address, token=ALICE).probe(timeout_s=10)
        assert (report.is_ok, report.code, report.is_lasting) == (False, code, True), report
        assert text in report.detail
        assert ALICE not in report.detail
        assert new_l3(rig.address(listen, certificate=rig.client), token=ALICE).probe(timeout_s=10).is_ok

    def test_an_expired_server_is_told_as_such(
        self, start_thread: Callable[..., ThreadedDaemon], rig: TlsRig, two_tenants: str, new_l3: NewL3
    ) -> None:
        rig.ca.issue("server", ends=timedelta(days=-1))
        daemon = start_thread(tenants_file=two_tenants, **rig.settings())
        report = new_l3(rig.address(daemon.ready.listen, certificate=rig.client), token=ALICE).probe(timeout_s=10)
        assert (report.code, report.detail.partition("accepted: ")[2]) == ("TLS_SERVER", "certificate has expired")

    def test_tls_to_a_plaintext_port_is_told_as_such(
        self, start_thread: Callable[..., ThreadedDaemon], rig: TlsRig, two_tenants: str, new_l3: NewL3
    ) -> None:
        daemon = start_thread(tenants_file=two_tenants, listen="127.0.0.1:0")
        report = new_l3(rig.address(daemon.ready.listen, certificate=rig.client), token=ALICE).probe(timeout_s=10)
        assert (report.code, report.is_lasting) == ("TLS_NOT_SPOKEN", True)
        assert new_l3(f"tcp://{daemon.ready.listen}", token=ALICE).probe(timeout_s=10).is_ok

    def test_only_tls_1_3_is_spoken_on_both_sockets(
        self, start: Callable[..., DaemonProcess], rig: TlsRig, two_tenants: str, new_l3: NewL3
    ) -> None:
        daemon = start(tenants_file=two_tenants, **rig.settings())
        files = TlsFiles(str(rig.ca.file), str(rig.client), str(rig.client))
        for address in (daemon.ready["listen"], daemon.ready["bulk_listen"]):
            old = ssl.create_default_context(cafile=rig.ca.file)
            old.load_cert_chain(rig.client)
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            host, _, port = address.rpartition(":")
            with (
                socket.create_connection((host, int(port)), timeout=10) as plain,
                pytest.raises(OSError, match=r"EOF|ALERT|alert|reset"),
                old.wrap_socket(plain, server_hostname=host),
            ):
                pass
            with secure_socket(address, files) as connection:
                assert connection.version() == "TLSv1.3"
        round_trip(new_l3(rig.address(daemon.ready["listen"], certificate=rig.client), token=ALICE))


def test_grpc_is_imported_after_the_command_has_told_it_what_it_may_speak() -> None:
    code = "import sys, hicache.daemon.cli; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class TestTenantsOfCertificates:
    """A certificate that names a tenant is that tenant's, and nobody else's."""

    def test_a_certificate_that_names_a_tenant_needs_no_token(
        self, secure: ThreadedDaemon, rig: TlsRig, new_l3: NewL3
    ) -> None:
        named = rig.ca.issue("alice", uris=["hicache:tenant/alice"])
        report = new_l3(rig.address(secure.ready.listen, certificate=named)).probe(timeout_s=10)
        assert (report.is_ok, report.tenant) == (True, "alice")

    @pytest.mark.parametrize(
        ("uris", "token"),
        [
            (["hicache:tenant/alice"], BOB),
            (["hicache:tenant/nobody"], ""),
            (["hicache:tenant/alice", "hicache:tenant/bob"], ""),
            (["hicache:tenant/alice", "hicache:tenant/bob"], ALICE),
            ([], ""),
        ],
    )
    def test_what_it_does_not_name_is_refused(
        self, secure: ThreadedDaemon, rig: TlsRig, new_l3: NewL3, uris: list[str], token: str
    ) -> None:
        certificate = rig.ca.issue("someone", uris=uris)
        report = new_l3(rig.address(secure.ready.listen, certificate=certificate), token=token).probe(timeout_s=10)
        assert (report.is_ok, report.code) == (False, "BAD_TOKEN")
        right = rig.ca.issue("right", uris=["hicache:tenant/bob"])
        assert new_l3(rig.address(secure.ready.listen, certificate=right), token=BOB).probe(timeout_s=10).is_ok

    def test_names_of_tenants(self) -> None:
        assert certified_tenant(["spiffe://x/y", "hicache:tenant/a"]) == "a"
        assert certified_tenant(["spiffe://x/y"]) == ""


class TestStrangers:
    """Nobody without a certificate holds anything up."""

    def test_silent_and_babbling_strangers_leave_room_for_clients(
        self, secure: ThreadedDaemon, rig: TlsRig, new_l3: NewL3
    ) -> None:
        host, _, port = secure.ready.bulk_listen.rpartition(":")
        with contextlib.ExitStack() as stack:
            for number in range(150):
                stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
                if number % 3:
                    stranger.sendall(b"\x16\x03\x01\x02\x00\x01" if number % 2 else bytes(range(200)))
            round_trip(new_l3(rig.address(secure.ready.listen, certificate=rig.client), token=ALICE))

    def test_a_stranger_in_the_middle_of_a_handshake_is_gone_in_time_and_leaves_no_descriptor(
        self, secure: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.daemon.bulk_socket.HELLO_TIMEOUT_S", 0.2)
        host, _, port = secure.ready.bulk_listen.rpartition(":")
        before = open_descriptors()["socket:"]
        with socket.create_connection((host, int(port)), timeout=20) as stranger:
            stranger.sendall(b"\x16\x03\x01\x02\x00\x01")
            assert stranger.recv(1) == b"", "closed after HELLO_TIMEOUT_S"
        wait_until(lambda: open_descriptors()["socket:"] <= before, what="the end of its descriptor")

    def test_a_wrong_secret_over_tls_gets_a_refusal(self, secure: ThreadedDaemon, rig: TlsRig) -> None:
        files = TlsFiles(str(rig.ca.file), str(rig.client), str(rig.client))
        with secure_socket(secure.ready.bulk_listen, files) as connection:
            connection.sendall(BULK_HELLO.pack(BULK_MAGIC, b"w" * 32))
            assert connection.recv(1) == BULK_REFUSED

    def test_a_client_that_reads_nothing_is_ended_and_its_thread_with_it(
        self, secure: ThreadedDaemon, rig: TlsRig, new_l3: NewL3
    ) -> None:
        client = new_l3(rig.address(secure.ready.listen, certificate=rig.client), token=ALICE)
        round_trip(client)
        client.close()
        wait_until(
            lambda: not [thread for thread in threading.enumerate() if thread.name == "hicached-bulk"],
            what="the end of its threads",
        )


class TestRotation:
    """New connections get the new certificate, and those that are open go on."""

    def test_a_renewed_certificate_is_served_and_sessions_go_on(
        self, secure: ThreadedDaemon, rig: TlsRig, new_l3: NewL3
    ) -> None:
        old = new_l3(rig.address(secure.ready.listen, certificate=rig.client), token=ALICE)
        round_trip(old)
        rig.ca.issue("server", hosts=["renewed.example"])
        named = rig.address(secure.ready.listen, certificate=rig.client, name="renewed.example")
        round_trip(new_l3(named, token=ALICE), number=2)
        assert (
            new_l3(rig.address(secure.ready.listen, certificate=rig.client), token=ALICE).probe().code == "TLS_SERVER"
        )
        assert old.status().sessions_opened == 1
        assert old.lookup([key(1)], timeout_s=5) == [Outcome.OK]

    def test_a_renewed_certificate_moves_the_metrics_of_its_end(
        self, secure: ThreadedDaemon, rig: TlsRig, new_l3: NewL3
    ) -> None:
        name = "hicache_tls_certificate_expiration_timestamp_seconds"

        def days_left() -> dict[str, int]:
            scrape = read_scrape(http_get(secure.ready.http, "/metrics")[1])
            return {
                dict(labels)["certificate"]: round((end_s - time.time()) / 86400)
                for labels, end_s in scrape[name].items()
            }

        assert days_left() == {"server": 1, "client_ca": 1}
        rig.ca.issue("server", ends=timedelta(days=90))
        assert days_left() == {"server": 90, "client_ca": 1}
        rig.server.write_bytes(b"half a file")
        assert days_left() == {"server": 90, "client_ca": 1}, "what is served, not what lies there"
        engine = new_l3(rig.address(secure.ready.listen, certificate=rig.client), token=ALICE)
        before = engine.certificate_expirations_s()
        rig.ca.issue("client", ends=timedelta(days=30))
        after = engine.certificate_expirations_s()
        assert set(before) == {"ca", "client"}
        assert (after["ca"] - before["ca"], round((after["client"] - before["client"]) / 86400)) == (0, 29)

    def test_another_client_ca_is_used_at_once(
        self, secure: ThreadedDaemon, rig: TlsRig, new_l3: NewL3, folder: Path
    ) -> None:
        other = Authority(folder, "other")
        stranger = rig.address(secure.ready.listen, certificate=other.issue("stranger"))
        assert new_l3(stranger, token=ALICE).probe(timeout_s=10).code == "TLS_CLIENT"
        rig.ca.file.write_bytes(rig.ca.file.read_bytes() + other.file.read_bytes())
        assert new_l3(stranger, token=ALICE).probe(timeout_s=10).is_ok

    def test_files_that_do_not_fit_are_passed_over_until_they_do(self, rig: TlsRig, folder: Path) -> None:
        tls = ServerTls(str(rig.server), str(rig.server), str(rig.ca.file))
        before = tls.context()
        whole = rig.server.read_bytes()
        rig.server.write_bytes(whole[: len(whole) // 2])
        assert tls.context() is before
        settings = settings_in(folder, tenants_file="/t", **rig.settings())
        with pytest.raises(ConfigError, match="tls_certificate"):
            tls.prepare(load_config(None, settings))
        rig.server.unlink()
        assert tls.context() is before
        rig.ca.issue("server")
        assert (renewed := tls.context()) is not before
        tls.prepare(load_config(None, settings))()
        assert tls.context() is not renewed
        with pytest.raises(ConfigError, match="as at the start"):
            tls.prepare(load_config(None, settings | {"tls_client_ca": "", "tls_clients": "token"}))


class TestSettings:
    """What contradicts itself stops the start."""

    @pytest.mark.parametrize(
        ("changes", "setting"),
        [
            ({"listen": "0.0.0.0:0"}, "listen"),
            ({"bulk_listen": "0.0.0.0:0"}, "bulk_listen"),
            ({"tls_key": "/k"}, "tls_key"),
            ({"tls_client_ca": "/c"}, "tls_client_ca"),
            ({"tls_certificate": "/c"}, "tls_key"),
            ({"tls_certificate": "/c", "tls_key": "/k"}, "tls_client_ca"),
            (
                {"tls_certificate": "/c", "tls_key": "/k", "tls_client_ca": "/a", "tls_clients": "token"},
                "tls_client_ca",
            ),
            ({"tls_certificate": "/c", "tls_key": "/k", "tls_clients": "token", "listen": ""}, "tls_certificate"),
            (
                {"tls_certificate": "/c", "tls_key": "/k", "tls_clients": "token", "listen_plaintext": True},
                "listen_plaintext",
            ),
        ],
    )
    def test_contradictions(self, folder: Path, changes: dict[str, object], setting: str) -> None:
        given: dict[str, object] = settings_in(folder, listen="127.0.0.1:0", tenants_file="/t")
        with pytest.raises(ConfigError) as caught:
            load_config(None, given | changes)
        assert caught.value.setting == setting
        load_config(None, given)

    def test_plaintext_beyond_this_machine_is_a_decision(self, folder: Path) -> None:
        settings = settings_in(folder, listen="0.0.0.0:1", tenants_file="/t", listen_plaintext=True)
        assert load_config(None, settings).listen_plaintext

    def test_an_encrypted_key_is_refused_and_asks_nobody(self, rig: TlsRig, folder: Path) -> None:
        encrypted = folder / "key.pem"
        encrypted.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
        with pytest.raises(ConfigError, match="unencrypted private key"):
            ServerTls(str(rig.server), str(encrypted), "")

    @pytest.mark.parametrize(
        "text",
        ["tls://h:1", "tls://h:1?", "tls://h:1?ca=", "tls://h:1?ca=a&ca=b", "tls://h:1?ca=a&key=k", "tls://h:1?x=1"],
    )
    def test_addresses_that_are_none(self, text: str) -> None:
        with pytest.raises(ConfigError):
            parse_address(text)

    def test_an_address(self) -> None:
        address = parse_address("tls://[::1]:7?ca=/a%20b&certificate=/c&name=n")
        assert address.tls == TlsFiles("/a b", "/c", "/c", "n")
        assert address.host_and_port == ("::1", 7)
