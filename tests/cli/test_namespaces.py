"""`hicache namespaces`: what lies in the store for which model, and what a drop frees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.spec import namespace_digest
from tests.cli.conftest import model, run, store
from tests.daemon.client import DESCRIPTOR, Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import ALICE, BOB

OLD = namespace_digest(model("old")).hex()
NEW = namespace_digest(DESCRIPTOR).hex()


def listed(admin: str) -> dict[str, dict[str, object]]:
    ran = run("namespaces", "list", "--admin", admin, "--json", "-")
    assert ran.code == 0, ran.err
    return {row["namespace"]: row for row in ran.json["namespaces"]}


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_a_list_says_what_there_is_also_after_a_restart(
    backend: str, start_thread: Callable[..., ThreadedDaemon], admin: str
) -> None:
    daemon = start_thread(backend=backend)
    with Client(daemon.target, descriptor=model("old")) as client:
        store(client, range(3))
    with Client(daemon.target) as client:
        store(client, range(10, 15), 70_000)
        rows = listed(admin)
        assert rows.keys() == {OLD, NEW}
        assert [(rows[name]["objects"], rows[name]["sessions"]) for name in (OLD, NEW)] == [(3, 0), (5, 1)]
        assert rows[OLD]["model"] == "old"
        assert rows[OLD]["fields"] == {name: str(value) for name, value in model("old").items()}
        assert rows[NEW]["payload_bytes"] == 5 * 70_000
        assert sum(int(str(row["stored_bytes"])) for row in rows.values()) == daemon.store.usage().stored_bytes
    daemon.stop()
    start_thread(backend=backend)
    again = listed(admin)
    assert {name: row["objects"] for name, row in again.items()} == {OLD: 3, NEW: 5}
    assert again[OLD]["model"] == "old"
    assert "tiny" in run("namespaces", "list", "--admin", admin).out


def test_objects_keep_their_namespace_where_the_names_are_lost(
    start_thread: Callable[..., ThreadedDaemon], folder: Path, admin: str
) -> None:
    daemon = start_thread()
    with Client(daemon.target) as client:
        store(client, range(2))
    daemon.stop()
    names = folder / "store" / "hicache.namespaces"
    names.write_bytes(names.read_bytes()[:-3])
    start_thread()
    rows = listed(admin)
    assert {name: (row["objects"], row["model"]) for name, row in rows.items()} == {NEW[:8]: (2, "")}
    assert run("namespaces", "drop", NEW[:8], "--admin", admin, "--yes").code == 0
    assert listed(admin) == {}


def test_a_drop_frees_what_the_dry_run_said(daemon: ThreadedDaemon, admin: str) -> None:
    with Client(daemon.target, descriptor=model("old")) as client:
        store(client, range(600))
    with Client(daemon.target) as client:
        kept = store(client, range(1000, 1004))
        before = daemon.store.usage()
        dry = run("namespaces", "drop", OLD, "--dry-run", "--admin", admin, "--json", "-")
        assert (dry.code, daemon.store.usage()) == (0, before), dry
        assert "would be freed" in dry.err
        refused = run("namespaces", "drop", OLD, "--admin", admin, given="n\n")
        assert (refused.code, daemon.store.usage()) == (1, before)
        done = run("namespaces", "drop", OLD, "--admin", admin, "--yes", "--json", "-")
        assert (done.code, done.json["dropped"][0]["objects"], done.json["failed"]) == (0, 600, 0)
        freed_bytes = before.stored_bytes - daemon.store.usage().stored_bytes
        assert freed_bytes == dry.json["stored_bytes"] == done.json["stored_bytes"]
        assert client.present([*kept, object_key(0)]) == [True] * 4 + [False]
    assert run("namespaces", "drop", OLD, "--admin", admin, "--yes").code == 1, "there is none any more"


def test_stale_is_what_no_engine_uses_and_has_not_for_long(daemon: ThreadedDaemon, admin: str) -> None:
    with Client(daemon.target, descriptor=model("old")) as client:
        store(client, range(2))
    with Client(daemon.target) as client:
        store(client, range(10, 12))
        stale = run("namespaces", "drop", "--stale", "--older-than", "0s", "--dry-run", "--admin", admin, "--json", "-")
        assert [row["namespace"] for row in stale.json["chosen"]] == [OLD], "the other one is in use"
        young = run("namespaces", "drop", "--stale", "--older-than", "7d", "--admin", admin, "--json", "-")
        assert (young.code, young.json["chosen"]) == (0, []), "and this one was a moment ago"
        assert run("namespaces", "drop", "--stale", "--older-than", "0", "--admin", admin, "--yes").code == 0
        assert listed(admin).keys() == {NEW}


def test_an_engine_that_comes_in_between_keeps_what_was_stale(daemon: ThreadedDaemon, admin: str) -> None:
    from hicache.admin.client import Admin
    from hicache.admin.verbs import NAMESPACE_DROP
    from hicache.errors import AdminRefused

    with Client(daemon.target) as client:
        store(client, range(2))
        names = {"namespace": NEW, "tenant": "default", "idle": "1"}
        with pytest.raises(AdminRefused, match="is used by 1 sessions"), Admin(admin).open(NAMESPACE_DROP, names=names):
            pass
    assert listed(admin)[NEW]["objects"] == 2


def test_namespaces_of_tenants_are_kept_apart(
    start_thread: Callable[..., ThreadedDaemon], two_tenants: str, admin: str
) -> None:
    daemon = start_thread(tenants_file=two_tenants)
    for token in (ALICE, BOB):
        with Client(daemon.target, token=token) as client:
            store(client, range(3))
    ambiguous = run("namespaces", "drop", NEW, "--admin", admin, "--yes")
    assert (ambiguous.code, "alice, bob" in ambiguous.err or "bob, alice" in ambiguous.err) == (2, True)
    assert run("namespaces", "drop", NEW, "--tenant", "alice", "--admin", admin, "--yes").code == 0
    rows = run("namespaces", "list", "--admin", admin, "--json", "-").json["namespaces"]
    assert [(row["tenant"], row["objects"]) for row in rows] == [("bob", 3)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name one namespace, or give --stale"),
        (["--stale", "abcdef12"], "name one namespace, or give --stale"),
        (["zz"], "namespace = 'zz': expected the first 8"),
        (["--stale", "--older-than", "soon"], "older-than = 'soon': expected a number with s, m, h or d"),
    ],
)
def test_bad_input_is_named(arguments: list[str], says: str, daemon: ThreadedDaemon, admin: str) -> None:
    ran = run("namespaces", "drop", *arguments, "--admin", admin)
    assert (ran.code, says in ran.err) == (2, True), ran
