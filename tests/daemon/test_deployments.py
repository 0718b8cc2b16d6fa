"""Deployments: engines that must share are compared while they are connected, within their tenant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hicache.daemon.deployments import FIELD_CHARS_MAX, Deployments, Membership
from hicache.daemon.namespaces import Descriptor
from hicache.daemon.refusals import Refusal
from hicache.daemon.tenants import Tenant
from hicache.wire.protocol import DEPLOYMENT_CHARS_MAX, DIFFERING_FIELDS_MAX
from tests.daemon.client import DESCRIPTOR, Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import wait_until

ALICE, BOB = Tenant.named("alice"), Tenant.named("bob")
TOKENS = {"alice": "token-of-alice-1234", "bob": "token-of-bob-123456"}
OTHER = DESCRIPTOR | {"page_tokens": 32, "group.0.dtype": "float16"}
REFUSED = "DEPLOYMENT_MISMATCH: the engines of deployment 'chat' differ from this one in "


def member(descriptor: Descriptor, *, name: str = "chat", salt: bytes = b"a") -> Membership:
    return Membership(name, descriptor, salt)


def refusal(target: str, **hello: object) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        Client(target, **hello)  # type: ignore[arg-type]  # a hello of many options
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return str(caught.value.details())


def test_another_salt_in_a_deployment_is_refused_and_not_told(daemon: ThreadedDaemon) -> None:
    with Client(daemon.target, deployment="chat", salt_fingerprint=b"a" * 32):
        said = refusal(daemon.target, deployment="chat", salt_fingerprint=b"b" * 32)
    assert said == REFUSED + "salt: another one"


def test_a_deployment_is_forgotten_with_its_last_session_and_not_before(daemon: ThreadedDaemon) -> None:
    first = Client(daemon.target, deployment="chat")
    second = Client(daemon.target, deployment="chat")
    opened = daemon.metric("hicache_sessions")
    first.close()
    wait_until(lambda: daemon.metric("hicache_sessions") == opened - 1, what="the first session is over")
    refusal(daemon.target, deployment="chat", descriptor=OTHER)
    second.close()
    wait_until(lambda: daemon.metric("hicache_sessions") == opened - 2, what="the second one, too")
    with Client(daemon.target, deployment="chat", descriptor=OTHER):
        assert "page_tokens: 32 != 64" in refusal(daemon.target, deployment="chat")


def test_br_017_a_deployment_of_one_tenant_is_nothing_to_another(
    start_thread: Callable[..., ThreadedDaemon], folder: Path
) -> None:
    (folder / "tenants").write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
    daemon = start_thread(tenants_file=str(folder / "tenants"))
    with (
        Client(daemon.target, token=TOKENS["alice"], deployment="chat"),
        Client(daemon.target, token=TOKENS["bob"], deployment="chat", descriptor=OTHER) as bob,
    ):
        assert bob.welcome.tenant == "bob"
        assert "page_tokens" in refusal(daemon.target, token=TOKENS["alice"], deployment="chat", descriptor=OTHER)


@pytest.mark.parametrize(
    ("hello", "named"),
    [
        ({"deployment": "x" * (DEPLOYMENT_CHARS_MAX + 1)}, f"deployment has {DEPLOYMENT_CHARS_MAX + 1} characters"),
        ({"deployment": "a\nb"}, "expected up to 128 printable ones"),
        ({"deployment": "chat", "salt_fingerprint": b"short"}, "salt_fingerprint has 5 bytes: expected 32"),
    ],
)
def test_a_malformed_membership_is_refused(daemon: ThreadedDaemon, hello: dict[str, object], named: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        Client(daemon.target, **hello)  # type: ignore[arg-type]  # by name
    assert refusal_code(caught.value) == "BAD_NAMESPACE"
    assert named in caught.value.details()


def test_who_does_not_get_in_leaves_no_deployment_behind(start_thread: Callable[..., ThreadedDaemon]) -> None:
    daemon = start_thread(sessions_max=1)
    with Client(daemon.target), pytest.raises(grpc.RpcError, match="TOO_MANY_SESSIONS"):
        Client(daemon.target, deployment="chat", descriptor=OTHER)
    wait_until(lambda: daemon.metric("hicache_sessions") == 0, what="the one session is over")
    with Client(daemon.target, deployment="chat") as client:
        assert client.welcome.session_id


def test_a_refusal_stays_short_whatever_differs() -> None:
    deployments = Deployments()
    first = {f"field{number:02}": "x" * 1000 for number in range(DIFFERING_FIELDS_MAX + 9)}
    with deployments.joined(ALICE, member(first)):
        with pytest.raises(Refusal) as caught, deployments.joined(ALICE, member({})):
            pass
        text = str(caught.value)
        assert text.endswith("; and 9 more")
        assert len(text) < (FIELD_CHARS_MAX + 2) * DIFFERING_FIELDS_MAX + 200
        with deployments.joined(BOB, member({})), deployments.joined(ALICE, member({}, name="")):
            assert len(deployments) == 2
    assert len(deployments) == 0
