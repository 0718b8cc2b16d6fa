"""Tenants: the daemon derives them from the token alone, and what one has is nothing to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX
from hicache.daemon.refusals import Refusal
from hicache.daemon.tenants import Tenants
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from hicache.tenancy import TENANT_BYTES, tenant_digest
from hicache.wire.protocol import KEY_BYTES_MAX
from tests.daemon.client import DESCRIPTOR, Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import DaemonProcess, http_get

TOKENS = {"alice": "token-of-alice-1234", "bob": "token-of-bob-123456"}
SECRET = "secret-0123456789"
KEYS = [object_key(number) for number in range(4)]
PAYLOADS = [payload_of(number, 5000) for number in range(4)]


def write_tenants(folder: Path) -> str:
    path = folder / "tenants"
    path.write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
    return str(path)


@pytest.fixture
def shared(start_thread: Callable[..., ThreadedDaemon], folder: Path) -> ThreadedDaemon:
    return start_thread(tenants_file=write_tenants(folder))


@pytest.fixture
def alice(shared: ThreadedDaemon) -> Iterator[Client]:
    with Client(shared.target, token=TOKENS["alice"]) as client:
        assert client.put_stream(KEYS, PAYLOADS) == [Outcome.OK] * 4
        yield client


@pytest.fixture
def bob(shared: ThreadedDaemon) -> Iterator[Client]:
    with Client(shared.target, token=TOKENS["bob"]) as client:
        yield client


def test_br_024_another_tenants_objects_are_absent_by_every_way_and_present_for_their_owner(
    shared: ThreadedDaemon, alice: Client, bob: Client, memory: Memory
) -> None:
    region = bob.attach(memory).region_id
    sizes = [len(payload) for payload in PAYLOADS]

    assert bob.lookup(KEYS, lease_ms=60_000) == ([Outcome.ABSENT] * 4, 0)
    assert bob.get(region, KEYS, [n * 5000 for n in range(4)], sizes) == [Outcome.ABSENT] * 4
    assert bob.get_stream(KEYS, sizes) == [Outcome.ABSENT] * 4
    assert bob.delete(KEYS) == [Outcome.ABSENT] * 4
    assert memory.bytes[:] == bytes(memory.size_bytes)
    assert (bob.stats().tenant_objects, bob.stats().tenant_used_bytes) == (0, 0)

    with Client(shared.target, token=TOKENS["alice"]) as control:
        assert control.present(KEYS) == [True] * 4
        assert control.get_stream(KEYS, sizes) == PAYLOADS


def test_br_024_a_key_forged_with_the_owners_digest_in_it_reads_nothing(alice: Client, bob: Client) -> None:
    physical = tenant_digest("alice") + KEYS[0]
    for forged in (physical, tenant_digest("alice"), tenant_digest("alice") + b"k"):
        assert bob.present([forged]) == [False]
    assert alice.present([KEYS[0]]) == [True]


def test_br_024_the_same_key_of_two_tenants_names_two_objects(alice: Client, bob: Client) -> None:
    assert bob.put_stream(KEYS[:1], [b"mine"]) == [Outcome.OK], "EXISTS would tell that alice has it"
    assert bob.get_stream(KEYS[:1], [4]) == [b"mine"]
    assert alice.get_stream(KEYS[:1], [5000]) == PAYLOADS[:1]
    assert bob.delete(KEYS[:1]) == [Outcome.OK]
    assert alice.present(KEYS[:1]) == [True]


def test_another_tenants_namespaces_are_not_told(alice: Client, shared: ThreadedDaemon) -> None:
    other = DESCRIPTOR | {"page_tokens": 32}
    with (
        Client(shared.target, token=TOKENS["bob"], descriptor=other) as foreign,
        Client(shared.target, token=TOKENS["alice"], descriptor=other) as own,
    ):
        assert list(foreign.welcome.namespace_differs) == []
        assert list(own.welcome.namespace_differs) == ["page_tokens: 64 != 32"]


def test_secrets_never_appear_in_logs_or_metrics(start: Callable[..., DaemonProcess], folder: Path) -> None:
    daemon = start(tenants_file=write_tenants(folder), log_level="debug", log_format="json")
    wrong = "guessed-token-0123456"
    with Client(daemon.target, token=TOKENS["alice"], name="a\nb\x1b[2J") as client, Memory(4096) as memory:
        client.attach(memory)
        secret = client.secret
        with pytest.raises(Exception, match="BAD_TOKEN"):
            Client(daemon.target, token=wrong)
        exposed = daemon.log + http_get(daemon.ready["http"], "/metrics")[1]
    daemon.terminate()
    exposed += daemon.log
    assert '"alice"' in exposed, "the log is the one of this session"
    assert '"a?b?[2J"' in exposed, "a client's name cannot forge lines or move the cursor"
    for hidden in (*TOKENS.values(), wrong, secret.hex(), repr(secret)):
        assert hidden not in exposed


class TestTenantsFile:
    """What the file may hold."""

    def load(self, folder: Path, text: str) -> Tenants:
        path = folder / "tenants"
        path.write_text(text)
        return Tenants.load(str(path))

    def test_comments_blank_lines_hashed_and_several_tokens(self, folder: Path) -> None:
        hashed = "sha256:4d36ddf6fbaa6e6b4b0a5b6f9e5d5a0d4f5e8e9e6b8b6e5b1b6e5a4c3b2a1908"
        tenants = self.load(folder, f"# who\n\n alice  {TOKENS['alice']}\nalice\t{TOKENS['bob']}\nbob {hashed}\n")
        assert tenants.count == 2
        assert {tenants.authenticate(token).name for token in TOKENS.values()} == {"alice"}

    def test_a_token_that_is_stored_as_its_hash_authenticates(self, folder: Path) -> None:
        token = "some-secret-token-1"
        tenants = self.load(folder, f"bob sha256:{sha256(token.encode()).hexdigest()}\n")
        assert tenants.authenticate(token).name == "bob"
        with pytest.raises(Refusal, match="BAD_TOKEN"):
            tenants.authenticate(sha256(token.encode()).hexdigest())

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "# nothing\n",
            "alice\n",
            "alice short\n",
            f"alice {SECRET} {SECRET}\n",
            f"al/ice {SECRET}\n",
            f"alice {SECRET}\nbob {SECRET}\n",
            "alice aaaaaaaaaaaaaaaaaaaaaaaa\n",
            f"alice {SECRET} expires=tomorrow\n",
            f"alice {SECRET} expires=2030-01-31T00:00:00\n",
            f"alice {SECRET} expires=2030-01-31T00:00:00Z expires=2030-01-31T00:00:00Z\n",
            "alice uid:x\n",
            "alice uid:1\nbob uid:1\n",
            "alice uid:1 expires=2030-01-31T00:00:00Z\n",
            "alice sha256:abc\n",
            f"alice {'a' * 2000}\n",
        ],
    )
    def test_a_wrong_line_stops_start_up_without_quoting_the_token(self, folder: Path, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            self.load(folder, text)
        assert "a" * 16 not in str(caught.value)
        assert SECRET not in str(caught.value)
        assert "sha256:abc" not in str(caught.value)

    def test_a_missing_or_binary_file_stops_start_up(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="tenants_file"):
            Tenants.load(str(folder / "missing"))
        (folder / "binary").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="tenants_file"):
            Tenants.load(str(folder / "binary"))


def test_a_tenant_and_the_longest_key_fit_into_a_physical_key() -> None:
    assert len(tenant_digest("x")) + KEY_BYTES_MAX == TENANT_BYTES + KEY_BYTES_MAX == PHYSICAL_KEY_BYTES_MAX


def test_tenant_digests_never_change() -> None:
    assert tenant_digest("default").hex() == "5195d45d74cb61e3b6395dd6e3f683c3"
    assert len({tenant_digest(name) for name in ("a", "b", "ab", "A")}) == 4
