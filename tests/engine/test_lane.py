"""Lanes: threads that outlive what goes wrong on them."""

from __future__ import annotations

import threading

import pytest

from hicache.lane import Lane
from tests.engine.fakes import WAIT_S


def test_a_task_that_raises_costs_the_lane_nothing(caplog: pytest.LogCaptureFixture) -> None:
    lane = Lane("test", thread_count=1)
    ran = threading.Event()
    assert lane.submit(lambda: 1 // 0)
    assert lane.submit(ran.set)
    assert ran.wait(WAIT_S)
    assert "a task of the test lane failed" in caplog.text
    lane.stop()
    assert lane.join(timeout_s=WAIT_S)


def test_what_is_queued_before_stop_runs_and_nothing_after() -> None:
    lane = Lane("test", thread_count=1)
    go_on, ran = threading.Event(), []
    lane.submit(lambda: ran.append(go_on.wait(WAIT_S)))
    lane.submit(lambda: ran.append(True))
    lane.stop()
    lane.stop()
    assert not lane.submit(lambda: ran.append(False))
    assert not lane.join(timeout_s=0.01)
    go_on.set()
    assert lane.join(timeout_s=WAIT_S)
    assert ran == [True, True]


def test_a_lane_can_be_joined_from_its_own_thread() -> None:
    lane = Lane("test", thread_count=1)
    joined: list[bool] = []

    def stop_and_join() -> None:
        lane.stop()
        joined.append(lane.join(timeout_s=WAIT_S))

    lane.submit(stop_and_join)
    assert lane.join(timeout_s=WAIT_S)
    assert joined == [False]  # the calling thread itself goes on
