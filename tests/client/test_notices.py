"""Log lines come once per kind and interval, and nothing is lost in silence."""

from __future__ import annotations

import logging

import pytest

from hicache.client import supervisor
from hicache.client.memory_link import NotRegistered
from hicache.notices import NOTICE_KINDS_MAX, Notices
from tests.client.conftest import ClientFactory
from tests.client.small_daemon import SmallDaemon
from tests.client.support import wait_until


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_kind_is_said_once_per_interval_and_tells_how_often_it_was_held_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    notices = Notices(logging.getLogger("hicache.test"), interval_s=60, clock=clock)
    for number in range(5):
        notices.warning("slow", "it took %d s", number)
    notices.error("broken", "it broke")
    clock.now_s = 60
    notices.warning("slow", "it took %d s", 5)
    assert [record.getMessage() for record in caplog.records] == [
        "it took 0 s",
        "it broke",
        "it took 5 s (and 4 more like this since the last such line)",
    ]


def test_kinds_without_end_do_not_grow_without_end(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices(logging.getLogger("hicache.test"), clock=Clock())
    for number in range(10 * NOTICE_KINDS_MAX):
        notices.warning(f"kind {number}", "something")
    assert len(caplog.records) == NOTICE_KINDS_MAX + 1


@pytest.mark.parametrize("is_dying", [True, False])
def test_memory_that_a_dying_hicached_refuses_is_not_called_a_stream(
    is_dying: bool,
    daemon: SmallDaemon,
    new_client: ClientFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(*_: object, **__: object) -> NotRegistered:
        if is_dying:
            daemon.stop()
        return NotRegistered("Connection refused", is_lasting=False)

    monkeypatch.setattr(supervisor, "register", refused)
    caplog.set_level(logging.INFO)
    new_client(daemon.address)
    said = "is gone" if is_dying else "goes through streams: Connection refused"
    wait_until(lambda: said in caplog.text)
    assert ("goes through streams" in caplog.text) != is_dying
