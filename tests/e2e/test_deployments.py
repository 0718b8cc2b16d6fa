"""Engines that must share: what does not fit is refused at start-up, with what is wrong, and never a silent miss."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.demo.processes import Daemon
from hicache import CacheSpec, ConfigError, HiCache, PagedGroup, StateField, StateGroup
from hicache.client import ClientSettings, ClientState, DaemonL3
from tests.e2e.conftest import MIB, TENANTS, until

SPEC = CacheSpec(
    "m",
    "1",
    (
        PagedGroup("attn", (0, 2), heads=1, head_dim=8, dtype="float32"),
        StateGroup("gdn", (1, 3), (StateField("s", (4,), "float32"), StateField("ring", (2,), "float32", True))),
    ),
    page_tokens=16,
)
ATTENTION, STATE = SPEC.groups
CHANGES: dict[str, tuple[CacheSpec, str]] = {
    "page size": (dataclasses.replace(SPEC, page_tokens=32), "page_tokens: 16 != 32"),
    "revision": (dataclasses.replace(SPEC, revision="2"), "revision: '1' != '2'"),
    "dtype": (
        dataclasses.replace(SPEC, groups=(dataclasses.replace(ATTENTION, dtype="float16"), STATE)),
        "group.0.dtype: 'float32' != 'float16'",
    ),
    "one layer": (
        dataclasses.replace(SPEC, groups=(dataclasses.replace(ATTENTION, layers=(0, 2, 4)), STATE)),
        "group.0.layers: '0,2' != '0,2,4'",
    ),
    "a state field": (
        dataclasses.replace(SPEC, groups=(ATTENTION, StateGroup("gdn", (1, 3), (StateField("s", (5,), "float32"),)))),
        "group.1.field.0: 's 4 float32 persistent whole' != 's 5 float32 persistent whole'; "
        "group.1.field.1: 'ring 2 float32 transient whole' != None; group.1.fields: 2 != 1",
    ),
}

Open = Callable[..., HiCache]


@pytest.fixture
def opened() -> Iterator[Open]:
    caches: list[HiCache] = []

    def open_one(address: str, **changes: object) -> HiCache:
        settings = {
            "l1_pages": 4,
            "l1_state_slots": 2,
            "l2_bytes": MIB,
            "l3": address,
            "token": TENANTS[0].token,
            "deployment": "chat",
        }
        settings |= changes
        spec = settings.pop("spec", SPEC)
        caches.append(HiCache.open(spec, **settings))  # type: ignore[arg-type]  # by name
        return caches[-1]

    yield open_one
    for cache in caches:
        cache.close()


def client_of(cache: HiCache) -> DaemonL3:
    assert isinstance(cache.l3, DaemonL3)
    return cache.l3


def test_br_128_a_pair_that_cannot_share_is_told_so_at_start_up_with_the_fields_that_differ(
    daemon: Daemon, opened: Open
) -> None:
    opened(daemon.address)
    opened(daemon.address)
    for spec, fields in CHANGES.values():
        with pytest.raises(ConfigError) as caught:
            opened(daemon.address, spec=spec)
        assert (caught.value.setting, caught.value.value) == ("deployment", "chat")
        assert f"differ from this one in {fields} (theirs != this engine's)" in caught.value.expected
    with pytest.raises(ConfigError, match="differ from this one in salt: another one"):
        opened(daemon.address, salt=b"other")
    control = opened(daemon.address, spec=CHANGES["revision"][0], deployment="")
    assert client_of(control).wait_ready(timeout_s=10), "without a name nobody is compared"


def test_br_128_a_wrong_credential_and_a_wrong_endpoint_are_loud_at_start_up(daemon: Daemon, opened: Open) -> None:
    with pytest.raises(ConfigError, match=r"token = '...': expected one that hicached at .* knows") as caught:
        opened(daemon.address, token="nobody-has-this-token")
    assert "nobody-has-this-token" not in str(caught.value)
    away = opened("unix:///nowhere/hicached.sock")
    assert client_of(away).status().state is ClientState.UNAVAILABLE
    assert client_of(away).status().is_degraded
    assert client_of(opened(daemon.address)).status().state is ClientState.READY


@pytest.mark.parametrize("l3", [None, "lmdb:///{folder}/store", "file:///{folder}/store?shared=1"])
def test_a_deployment_that_nobody_would_compare_is_refused(l3: str | None, opened: Open, tmp_path: Path) -> None:
    address = None if l3 is None else l3.format(folder=tmp_path)
    with pytest.raises(ConfigError, match="deployment = 'chat'"):
        opened(address, token="")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x" * 129, "a\nb", 7])
def test_a_deployment_name_that_cannot_be_one_is_refused(name: object, daemon: Daemon, opened: Open) -> None:
    with pytest.raises(ConfigError, match="deployment = "):
        opened(daemon.address, deployment=name)


def test_an_engine_that_was_there_before_its_daemon_is_refused_later_and_loudly_and_then_let_in(
    daemon: Daemon, opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = ClientSettings(refused_retry_s=0.1, connect_timeout_s=0.3)
    monkeypatch.setattr("hicache.client.daemon_l3.ClientSettings", lambda: eager)
    first = opened(daemon.address)
    daemon.suspend()
    with caplog.at_level(logging.ERROR, logger="hicache.client.supervisor"):
        late = opened(daemon.address, spec=CHANGES["page size"][0])
        assert client_of(late).status().state is not ClientState.READY
        daemon.resume()
        until(lambda: client_of(late).status().state is ClientState.REFUSED)
        until(lambda: client_of(late).status().refusals.get("DEPLOYMENT_MISMATCH", 0) > 2)
    status = client_of(late).status()
    assert status.refusal == "DEPLOYMENT_MISMATCH"
    assert "page_tokens: 16 != 32" in status.reason
    assert sum("page_tokens: 16 != 32" in record.getMessage() for record in caplog.records) == 1
    assert client_of(first).status().state is ClientState.READY
    first.close()
    until(lambda: client_of(late).status().state is ClientState.READY)
