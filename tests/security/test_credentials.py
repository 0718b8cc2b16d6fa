"""By what tenants and operators are known: tokens that end, users of this machine, and what each of them may do."""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from hicache.admin.client import Admin
from hicache.admin.verbs import NAMESPACES, RELOAD, VERBS
from hicache.client import DaemonL3
from hicache.daemon.authority import VERBS_OF_TENANTS, Caller
from hicache.daemon.peers import TICKET_S, TICKETS_MAX, Peer, PeerTickets
from hicache.daemon.refusals import Refusal
from hicache.daemon.tenants import Tenants
from hicache.errors import AdminRefused
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import ALICE, BOB

OLD, NEW = "old-token-0123456789", "new-token-0123456789"
UID, GID = os.geteuid(), os.getegid()
NewL3 = Callable[..., DaemonL3]


def load(folder: Path, *lines: str) -> Tenants:
    file = folder / "tenants"
    file.write_text("".join(f"{line}\n" for line in lines))
    return Tenants.load(str(file))


class TestTokens:
    def test_two_tokens_are_good_at_a_time_and_the_old_one_ends(self, folder: Path) -> None:
        tenants = load(folder, f"alice {OLD} expires=2030-01-31T00:00:00Z", f"alice {NEW}")
        ends_at_s = 1_896_048_000.0
        for token in (OLD, NEW):
            assert tenants.authenticate(token, now_s=ends_at_s - 1).name == "alice"
        with pytest.raises(Refusal, match="BAD_TOKEN: this token has expired"):
            tenants.authenticate(OLD, now_s=ends_at_s)
        assert tenants.authenticate(NEW, now_s=ends_at_s).name == "alice"

    def test_a_hashed_token_can_end_too(self, folder: Path) -> None:
        tenants = load(folder, f"alice sha256:{sha256(OLD.encode()).hexdigest()} expires=2020-01-31T00:00:00+01:00")
        with pytest.raises(Refusal, match="expired"):
            tenants.authenticate(OLD)
        assert tenants.authenticate(OLD, now_s=0).name == "alice"

    def test_no_token_is_kept(self, folder: Path) -> None:
        assert OLD not in repr(vars(load(folder, f"alice {OLD}")))


class TestUsers:
    """Over the Unix socket, the kernel says whose process a client is."""

    def test_a_user_goes_before_groups_and_two_groups_of_different_tenants_are_refused(self, folder: Path) -> None:
        tenants = load(folder, "alice uid:7", "bob gid:8", "carol gid:9", f"dave {OLD}", "bob gid:10")
        assert tenants.authenticate("", peer=Peer(7, frozenset({8, 9}))).name == "alice"
        assert tenants.authenticate("", peer=Peer(1, frozenset({8, 10, 77}))).name == "bob"
        for peer in (Peer(1, frozenset({8, 9})), Peer(1, frozenset()), Peer(8, frozenset({7}))):
            with pytest.raises(Refusal, match="BAD_TOKEN"):
                tenants.authenticate("", peer=peer)
        assert tenants.authenticate(OLD, peer=Peer(7, frozenset())).name == "dave", (
            "who brings a token wants to be dave"
        )

    @pytest.mark.parametrize(("line", "is_in"), [("me uid:{0}", True), ("me gid:{1}", True), ("me uid:{2}", False)])
    def test_a_process_is_let_in_as_whoever_its_user_is(
        self, start_thread: Callable[..., ThreadedDaemon], folder: Path, new_l3: NewL3, line: str, is_in: bool
    ) -> None:
        file = folder / "tenants"
        file.write_text(f"other {OLD}\n{line.format(UID, GID, UID + 1)}\n")
        daemon = start_thread(tenants_file=str(file))
        report = new_l3(f"unix://{daemon.config.socket}").probe(timeout_s=10)
        assert (report.is_ok, report.code) == ((True, "OK") if is_in else (False, "BAD_TOKEN"))
        assert report.tenant == ("me" if is_in else "")
        assert new_l3(f"unix://{daemon.config.socket}", token=OLD).probe(timeout_s=10).tenant == "other"

    def test_a_ticket_is_good_once_and_not_for_long_and_few_are_kept(self) -> None:
        now = [0.0]
        tickets = PeerTickets(clock=lambda: now[0])
        here, there = socket.socketpair(socket.AF_UNIX)
        with here, there:
            ticket = tickets.issue(here)
            peer = tickets.redeem(ticket)
            assert peer is not None
            assert (peer.uid, GID in peer.gids) == (UID, True)
            assert tickets.redeem(ticket) is None
            late = tickets.issue(here)
            now[0] = TICKET_S
            assert tickets.redeem(late) is None
            oldest = tickets.issue(here)
            newer = [tickets.issue(here) for _ in range(TICKETS_MAX)]
            assert tickets.redeem(oldest) is None
            assert tickets.redeem(newer[0]) == peer
            assert tickets.redeem(bytes(32)) is None
        with socket.socket() as tcp, pytest.raises(Refusal, match="only the Unix socket"):
            tickets.issue(tcp)

    def test_a_user_who_floods_tickets_takes_nobody_elses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tickets = PeerTickets()
        here, there = socket.socketpair(socket.AF_UNIX)
        with here, there:
            monkeypatch.setattr("hicache.daemon.peers.peer_of", lambda _: Peer(1, frozenset()))
            quiet = tickets.issue(here)
            monkeypatch.setattr("hicache.daemon.peers.peer_of", lambda _: Peer(2, frozenset()))
            flood = [tickets.issue(here) for _ in range(2 * TICKETS_MAX)]
        assert tickets.redeem(quiet) == Peer(1, frozenset())
        assert [tickets.redeem(ticket) is None for ticket in (flood[0], flood[-1])] == [True, False]


class TestAuthority:
    """Who may do what over the admin API, each refusal beside somebody who may."""

    def test_what_a_tenant_may_is_a_verb_or_will_be(self) -> None:
        assert {"namespaces", "namespace_drop", "export"} <= VERBS_OF_TENANTS & {verb.name for verb in VERBS}

    @pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
    def test_nobody_but_operators_may_anything_about_others(self, verb: str) -> None:
        operator, alice, nobody = Caller("root", is_operator=True), Caller("tenant alice", tenant="alice"), Caller("x")
        assert operator.may(verb, None)
        assert operator.may(verb, "alice")
        assert alice.may(verb, "alice") == (verb in VERBS_OF_TENANTS)
        for tenant in (None, "bob", "", "Alice", "alice "):
            assert not alice.may(verb, tenant)
        for tenant in (None, "alice", ""):
            assert not nobody.may(verb, tenant)

    @pytest.fixture
    def daemon(self, start_thread: Callable[..., ThreadedDaemon], folder: Path, two_tenants: str) -> ThreadedDaemon:
        (folder / "operators").write_text(f"oncall {OLD}\nlate {NEW} expires=2020-01-01T00:00:00Z\n")
        return start_thread(tenants_file=two_tenants, operators_file=str(folder / "operators"))

    def test_a_tenants_token_reaches_its_own_and_nothing_else(self, daemon: ThreadedDaemon) -> None:
        for address in (daemon.config.admin_socket, daemon.ready.http):
            alice = Admin(address, token=ALICE)
            alice.ask(NAMESPACES, names={"tenant": "alice"})
            for names in ({"tenant": "bob"}, {}):
                with pytest.raises(AdminRefused, match="not for tenant alice"):
                    alice.ask(NAMESPACES, names=names)
            with pytest.raises(AdminRefused, match="not for tenant alice"):
                alice.ask(RELOAD, names={"tenant": "alice"})
            Admin(address, token=BOB).ask(NAMESPACES, names={"tenant": "bob"})

    def test_operators_are_known_by_the_kernel_or_by_their_token(self, daemon: ThreadedDaemon) -> None:
        for admin in (
            Admin(daemon.config.admin_socket),
            Admin(daemon.config.admin_socket, token=OLD),
            Admin(daemon.ready.http, token=OLD),
        ):
            admin.ask(NAMESPACES)
        for admin in (
            Admin(daemon.ready.http),
            Admin(daemon.ready.http, token=NEW),
            Admin(daemon.ready.http, token="guessed-0123456789"),
            Admin(daemon.config.admin_socket, token="guessed-0123456789"),
        ):
            with pytest.raises(AdminRefused) as caught:
                admin.ask(NAMESPACES)
            assert "guessed" not in str(caught.value)

    def test_a_token_of_an_operator_opens_no_session(self, daemon: ThreadedDaemon, new_l3: NewL3) -> None:
        assert new_l3(f"unix://{daemon.config.socket}", token=OLD).probe(timeout_s=10).code == "BAD_TOKEN"
        assert new_l3(f"unix://{daemon.config.socket}", token=ALICE).probe(timeout_s=10).is_ok


SECRET_NAMES = ("secret", "token", "ticket", "digest", "presented", "password", "data_key", "salt_fingerprint")
NO_SECRETS = {
    ("namespaces.py", "described"),  # the digest of a description that the client sends beside it
    ("admin_store.py", "tenant.digest"),  # of the name of a tenant
}


def test_no_secret_is_compared_byte_by_byte() -> None:
    """Equality stops at the first byte that differs, and how long that takes can be measured."""
    root = Path(__file__).resolve().parents[2]
    found = []
    for file in sorted((root / "daemon").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                words = ast.unparse(node)
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                names = [side for side in sides if side.rpartition(".")[2] in SECRET_NAMES]
                if names and not any(side.startswith("len(") or side == "b''" for side in sides):
                    found.append((file.name, words))
    assert [(name, words) for name, words in found if not any(name == n and w in words for n, w in NO_SECRETS)] == []
    assert ("namespaces.py", "described != digest") in found, "the control: what is compared is seen"
