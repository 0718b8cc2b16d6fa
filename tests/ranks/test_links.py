"""The leader's links: who is taken, who is refused, and what a rank can say that makes it lost."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError, StorageInUse
from hicache.jobs import Completion, CopyItem, CopyJob, CopyKind, FetchJob, TransferItem
from hicache.outcome import Outcome
from hicache.ranks import gathering as gathering_module
from hicache.ranks import link as link_module
from hicache.ranks.gathering import gather
from hicache.ranks.link import Link
from hicache.ranks.messages import (
    Done,
    Farewell,
    FrameReader,
    Garbage,
    Hello,
    Pulse,
    Refused,
    frame,
)
from hicache.ranks.settings import Ranks, listen, stop_listening
from tests.ranks.far import WAIT_S, Far, Leader, hello


def nested(message: Hello | Done) -> bytes:
    """A message with a field that nobody knows, of a hundred thousand arrays one in the other."""
    payload = frame(message)[4:]
    assert payload[0] & 0xF0 == 0x80, "a map of fewer than 16 fields"
    payload = bytes([payload[0] + 1]) + payload[1:] + b"\xa4deep" + b"\x91" * 100_000 + b"\xc0"
    return len(payload).to_bytes(4, "little") + payload


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(f"unix://{tmp_path}/ranks.sock", token="secret", start_timeout_s=WAIT_S, silence_timeout_s=WAIT_S)


@pytest.fixture
def connect() -> Iterator[Callable[[Ranks], Far]]:
    """Connects to a leader; hung up at the end."""
    made: list[Far] = []

    def far(ranks: Ranks) -> Far:
        made.append(Far(str(ranks.endpoint)))
        return made[-1]

    yield far
    for end in made:
        end.socket.close()


@pytest.fixture
def leader(ranks: Ranks) -> Iterator[Leader]:
    leader = Leader(ranks)
    yield leader
    assert leader.links.close()
    leader.far.socket.close()


def copy_job(number: int, *, items: int = 2) -> CopyJob:
    return CopyJob(number, CopyKind.LOAD, tuple(CopyItem(0, item, item + 1) for item in range(items)))


@given(payloads=st.lists(st.binary(min_size=1, max_size=40)), cuts=st.lists(st.integers(1, 60)))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(payload).to_bytes(4, "little") + payload for payload in payloads)
    reader = FrameReader(bytes_max=64)
    found: list[bytes] = []
    for cut in [*cuts, len(stream)]:
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert found == payloads


@pytest.mark.parametrize("length", [0, 65, 0xFFFFFFFF])
def test_a_length_that_no_frame_has_is_garbage(length: int) -> None:
    with pytest.raises(Garbage, match=f"a frame of {length} bytes"):
        list(FrameReader(bytes_max=64).feed(length.to_bytes(4, "little")))


def test_a_worker_is_told_what_differs_and_may_come_again(ranks: Ranks, connect: Callable[[Ranks], Far]) -> None:
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(gather, ranks, hello(0), missing={1, 2})
        refusals = {
            "page_tokens: 4 != 8; window: None != 0": hello(
                descriptor={"model": "m", "page_tokens": 8, "window": 0, "salt": b"x"}
            ),
            "protocol version: 1 != 9": hello(version=9),
            "token: it is not that of the leader": hello(token="guess", descriptor={"model": "other"}),
            "l1_slots: (8, 0) != (9, 0)": hello(l1_slots=(9, 0)),
            "l2_slots: (4, 0) != (0, 0); has_l3: True != False": hello(l2_slots=(0, 0), has_l3=False),
            "l1_slots: (8, 0) != (8, 0, 8)": hello(l1_slots=(8, 0, 8)),
            "l1_bytes: 0 != 4096": hello(l1_bytes=4096),
            "rank 3: this leader waits for ranks [1, 2]": hello(3),
            "rank 0: this leader waits for ranks [1, 2]": hello(0),
        }
        for reason, said in refusals.items():
            far = connect(ranks)
            far.say(said)
            assert far.hear() == Refused(reason)
            assert far.hear() is None
        connect(ranks).say(hello(1, l1_slots=(8, 5)))
        twice = connect(ranks)
        twice.say(hello(1, l1_slots=(8, 5)))
        assert twice.hear() == Refused("rank 1: this leader waits for ranks [2]")
        connect(ranks).say(hello(2, l1_slots=(0, 5)))  # another stage: it lacks a group that the leader has
        links, common = gathered.result(WAIT_S)
    assert sorted(links) == [1, 2]
    assert common.l1_slots == (8, 5)
    for link in links.values():
        link.close()
    assert not os.path.exists(str(ranks.endpoint)), "whoever comes later finds nobody"


def test_a_leader_without_a_rank_takes_what_its_first_rank_has(ranks: Ranks, connect: Callable[[Ranks], Far]) -> None:
    own = hello(0, l1_slots=(), l2_slots=(0, 0), has_l3=False)
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(gather, ranks, own, missing={0, 1})
        far = connect(ranks)
        far.say(hello(0, token="guess"))
        assert far.hear() == Refused("token: it is not that of the leader")
        mistaken = connect(ranks)
        mistaken.say(hello(1, l1_slots=(9, 0)))
        far = connect(ranks)
        far.say(hello(0))
        assert far.hear() == Refused("l1_slots: (9, 0) != (8, 0)")
        mistaken.socket.close()  # to be started again with what is right
        stranger = connect(ranks)
        stranger.say(Pulse())
        assert stranger.hear() is None, "by then the leader has seen who has gone"
        for rank in (0, 1):
            connect(ranks).say(hello(rank))
        links, common = gathered.result(WAIT_S)
    assert sorted(links) == [0, 1]
    assert (common.l1_slots, common.l2_slots, common.has_l3) == ((8, 0), (4, 0), True)
    for link in links.values():
        link.close()


def test_strangers_garbage_and_the_dying_disturb_nobody(ranks: Ranks, connect: Callable[[Ranks], Far]) -> None:
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(gather, ranks, hello(0), missing={1, 2})
        silent = [connect(ranks) for _ in range(3)]
        dying = connect(ranks)
        dying.say(hello(1))
        dying.socket.close()
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 64,
            b"\x00\x00\x00\x00",
            frame(Pulse()),
            frame(Done(Completion(1, ()))),
            frame(hello(descriptor={"model": [1, 2]})),
            nested(hello()),
            frame(hello())[:-1] + b"\xc1",
            frame(hello(2)) + frame(Pulse()),  # nothing is said before the greeting
        ):
            far = connect(ranks)
            far.say(garbage)
            assert far.hear() is None
        for rank in (1, 2):
            connect(ranks).say(hello(rank))
        links, _ = gathered.result(WAIT_S)
    assert sorted(links) == [1, 2]
    for far in silent:
        assert far.hear() is None
    for link in links.values():
        link.close()


def test_ranks_that_do_not_come_are_named_with_those_that_were_refused(tmp_path: Path) -> None:
    ranks = Ranks(f"unix://{tmp_path}/r.sock", token="secret", start_timeout_s=0.5)
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(gather, ranks, hello(0), missing={1, 2})
        far = Far(ranks.endpoint)
        far.say(hello(1, token="guess"))
        assert isinstance(far.hear(), Refused)
        far.socket.close()
        with pytest.raises(ConfigError, match=r"ranks \[1, 2\] to have come .*; rank 1 was refused: token"):
            gathered.result(WAIT_S)
    assert not os.path.exists(str(ranks.endpoint))


def test_the_socket_is_for_its_user_alone_and_replaces_only_a_dead_one(ranks: Ranks, tmp_path: Path) -> None:
    path = str(ranks.endpoint)
    before = os.umask(0)
    try:
        listener = listen(ranks, backlog=1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(StorageInUse, match="another leader"):
        listen(ranks, backlog=1)
    listener.close()  # as a leader that was killed leaves it
    stop_listening(ranks, listen(ranks, backlog=1))
    (tmp_path / "ranks.sock").write_text("precious")
    with pytest.raises(ConfigError, match="a file of another kind"):
        listen(ranks, backlog=1)
    assert (tmp_path / "ranks.sock").read_text() == "precious"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"address": "/run/x.sock"}, "ranks.address"),
        ({"address": "unix://relative"}, "ranks.address"),
        ({"address": "unix:///" + "x" * 200}, "at most 107 bytes"),
        ({"address": "tcp://host:0", "token": "x"}, "ranks.address"),
        ({"address": "tcp://host:70000", "token": "x"}, "ranks.address"),
        ({"address": "tcp://host:7000"}, "ranks.token"),
        ({"address": 7}, "ranks.address"),
        ({"address": "unix:///x", "silence_timeout_s": 0}, "ranks.silence_timeout_s"),
        ({"address": "unix:///x", "copy_timeout_s": "1"}, "ranks.copy_timeout_s"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Ranks(**settings)


def test_jobs_go_out_in_order_and_each_answer_comes_back_once(leader: Leader) -> None:
    jobs = [copy_job(1), FetchJob(2, (TransferItem(0, b"k" * 32, 3),)), copy_job(5, items=1)]
    for job in jobs:
        leader.links.submit(job)
    assert [leader.far.hear() for _ in jobs] == jobs
    leader.far.say(
        Done(Completion(5, (Outcome.IO_ERROR,), 0.5)), Pulse(), Done(Completion(1, (Outcome.OK, Outcome.ABSENT)))
    )
    with leader.changed:
        assert leader.changed.wait_for(lambda: len(leader.completions) == 2, WAIT_S)
    assert [(rank, completion.job_id) for rank, completion in leader.completions] == [(1, 5), (1, 1)]
    assert not leader.lost


def test_a_rank_that_had_to_wait_for_the_others_is_not_thought_silent(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago_s = time.monotonic() - 1000 * WAIT_S
    monkeypatch.setattr(gathering_module, "time", SimpleNamespace(monotonic=lambda: long_ago_s))
    leader = Leader(ranks)
    assert leader.far.socket.recv(65536), "a pulse: the leader has looked for who is silent"
    assert not leader.lost
    assert leader.links.close()
    leader.far.socket.close()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([b"\x00\x00\x00\x00"], "no message"),
        ([frame(Pulse())[:4] + b"\xc1" * (len(frame(Pulse())) - 4)], "no message"),
        ([Done(Completion(9, (Outcome.OK,)))], "job 9"),
        ([Done(Completion(1, (Outcome.OK,)))], "job 1 with 1 items"),
        ([Done(Completion(1, (Outcome.OK,) * 2)), Done(Completion(1, (Outcome.OK,) * 2))], "job 1"),
        ([nested(Done(Completion(1, (Outcome.OK,) * 2)))], "no message"),
        ([hello()], "Hello out of turn"),
        ([Farewell("enough")], "enough"),
    ],
)
def test_a_rank_that_says_what_it_cannot_know_is_lost_once_and_not_heard_again(
    said: list[object], reason: str, leader: Leader
) -> None:
    leader.links.submit(copy_job(1))
    leader.links.submit(copy_job(2))
    leader.far.say(*said)
    assert reason in leader.why_lost()
    heard = len(leader.completions)
    leader.links.submit(copy_job(3))  # goes nowhere
    while leader.far.hear() is not None:
        pass
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        leader.far.say(Done(Completion(2, (Outcome.OK,) * 2)))
    assert len(leader.completions) == heard
    assert len(leader.lost) == 1


def test_a_rank_that_hangs_up_is_lost(leader: Leader) -> None:
    leader.far.socket.close()
    assert "ended" in leader.why_lost() or "reset" in leader.why_lost()


def test_a_rank_that_reads_nothing_is_lost_before_it_takes_all_memory(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "UNSENT_BYTES_MAX", 1 << 20)
    link = leader.links._ranks[1].peer._link
    number = waiting_bytes_max = 0
    while not leader.lost:
        number += 1
        leader.links.submit(copy_job(number, items=10_000))
        waiting_bytes_max = max(waiting_bytes_max, len(link._unsent))
    assert "unread" in leader.why_lost()
    assert 0 < waiting_bytes_max <= 1 << 20


def test_what_a_slow_reader_leaves_waiting_arrives_whole(leader: Leader) -> None:
    jobs = [copy_job(number, items=20_000) for number in range(1, 12)]
    for job in jobs:
        leader.links.submit(job)
    assert [leader.far.hear() for _ in jobs] == jobs


def test_a_link_that_was_closed_says_so() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, FrameReader(bytes_max=64))
    link.close()
    link.close()
    with pytest.raises(link_module.LinkBroken, match="closed"):
        link.send(b"x")
    theirs.close()
