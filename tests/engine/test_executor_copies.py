"""Copies between L1 and L2 through the executor: the right bits, the right thread, the right outcome when they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hicache.copies import PoolCopies
from hicache.executor import ExecutorLimits
from hicache.jobs import CopyItem, CopyJob, CopyKind
from hicache.outcome import Outcome
from hicache.pools import L1Pool, L2Pool
from hicache.spec import StateGroup
from tests.engine.conftest import Rank
from tests.engine.fakes import WAIT_S, FaultyCopies
from tests.engine.specs import POISON, as_bytes, fill_with_noise, poison

OK = Outcome.OK
MARKER = b"\x13ring\xf7rows\x99must-not-leave-L1"


def copy_job(job_id: int, kind: CopyKind, *items: tuple[int, int, int]) -> CopyJob:
    return CopyJob(job_id, kind, tuple(CopyItem(*item) for item in items))


def fill_l1(rank: Rank) -> None:
    for seed, tensor in enumerate((*rank.l1.paged.values(), *rank.l1.state[2].values())):
        fill_with_noise(tensor, seed)


def state_bytes(rank: Rank, slot: int, *, transient: bool) -> bytes:
    return b"".join(
        as_bytes(rank.l1.state[2][field.name][:, slot])
        for field in rank.spec.groups[2].fields  # type: ignore[union-attr]  # group 2 is the state group
        if field.transient == transient
    )


def test_pages_and_states_go_down_and_come_back_bit_for_bit(rank: Rank) -> None:
    fill_l1(rank)
    executor = rank.executor()
    pages = {group: as_bytes(rank.l1.paged[group][:, 3]) for group in (0, 1)}
    state = state_bytes(rank, 3, transient=False)
    executor.submit(copy_job(1, CopyKind.BACKUP, (0, 3, 9), (2, 3, 1), (1, 3, 0), (0, 4, 8)))
    assert rank.completions.outcomes(1) == (OK,) * 4
    assert as_bytes(rank.l2.view(0)[9]) == pages[0]
    assert as_bytes(rank.l2.view(1)[0]) == pages[1]
    assert as_bytes(rank.l2.view(2)[1]) == state

    executor.submit(copy_job(2, CopyKind.LOAD, (0, 9, 11), (1, 0, 10), (2, 1, 5)))
    assert rank.completions.outcomes(2) == (OK,) * 3
    assert as_bytes(rank.l1.paged[0][:, 11]) == pages[0]
    assert as_bytes(rank.l1.paged[1][:, 10]) == pages[1]
    assert state_bytes(rank, 5, transient=False) == state
    assert not any(state_bytes(rank, 5, transient=True))


def test_an_adopted_pool_goes_down_and_comes_back_bit_for_bit(rank: Rank) -> None:
    def split(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [layer.clone() for layer in tensor]

    fill_l1(rank)
    tensors: dict[int, Any] = {
        0: [[layer[:, plane].clone() for plane in range(2)] for layer in rank.l1.paged[0]],
        1: split(rank.l1.paged[1]),
        2: {name: split(field) for name, field in rank.l1.state[2].items()},
    }
    expected = as_bytes(rank.l1.paged[0][:, 3]), state_bytes(rank, 3, transient=False)
    rank.l1 = L1Pool.adopt(rank.spec, tensors)
    executor = rank.executor()
    executor.submit(copy_job(1, CopyKind.BACKUP, (0, 3, 9), (1, 3, 0), (2, 3, 1)))
    assert rank.completions.outcomes(1) == (OK,) * 3
    assert (as_bytes(rank.l2.view(0)[9]), as_bytes(rank.l2.view(2)[1])) == expected
    executor.submit(copy_job(2, CopyKind.LOAD, (0, 9, 4), (2, 1, 5)))
    assert rank.completions.outcomes(2) == (OK,) * 2
    assert as_bytes(tensors[0][1][1][4]) == as_bytes(tensors[0][1][1][3])
    assert as_bytes(tensors[2]["temporal"][2][5]) == as_bytes(tensors[2]["temporal"][2][3])
    assert not any(as_bytes(tensors[2]["ring_d"][0][5]))


def test_snapshots_restores_and_resets_keep_transient_fields_where_they_belong(rank: Rank) -> None:
    fill_l1(rank)
    executor = rank.executor()
    live = state_bytes(rank, 0, transient=False)
    snapshot_ring = state_bytes(rank, 1, transient=True)
    executor.submit(copy_job(1, CopyKind.SNAPSHOT, (2, 0, 1)))
    assert (state_bytes(rank, 1, transient=False), state_bytes(rank, 1, transient=True)) == (live, snapshot_ring)
    executor.submit(copy_job(2, CopyKind.RESTORE, (2, 1, 3), (2, 1, 4)))  # two requests hit one snapshot
    for slot in (3, 4):
        assert state_bytes(rank, slot, transient=False) == live
        assert not any(state_bytes(rank, slot, transient=True))
    executor.submit(copy_job(3, CopyKind.RESET, (2, 0, 0)))
    assert not any(state_bytes(rank, 0, transient=False) + state_bytes(rank, 0, transient=True))
    assert [rank.completions.outcomes(job) for job in (1, 2, 3)] == [(OK,), (OK, OK), (OK,)]


def test_transient_fields_never_reach_l2(rank: Rank) -> None:
    """The marker is in every row of the rings; a persistent field with it shows that it would be found."""

    def mark(field: torch.Tensor) -> None:
        flat = field.view(torch.uint8).view(-1)
        flat.copy_(torch.frombuffer(bytearray(MARKER * (len(flat) // len(MARKER) + 1)), dtype=torch.uint8)[: len(flat)])

    group = rank.spec.groups[2]
    assert isinstance(group, StateGroup)
    for field in group.fields:
        if field.transient:
            mark(rank.l1.state[2][field.name])
    executor = rank.executor()
    executor.submit(copy_job(1, CopyKind.SNAPSHOT, (2, 0, 5)))
    executor.submit(copy_job(2, CopyKind.BACKUP, *((2, slot, slot) for slot in range(4))))
    assert rank.completions.outcomes(2) == (OK,) * 4
    pieces = [MARKER[start : start + 8] for start in range(len(MARKER) - 8)]
    assert not any(piece in bytes(rank.l2.buffer) for piece in pieces)

    mark(rank.l1.state[2]["temporal"])
    executor.submit(copy_job(3, CopyKind.BACKUP, (2, 0, 0)))
    assert rank.completions.outcomes(3) == (OK,)
    assert MARKER in bytes(rank.l2.buffer)


def test_br_001_a_load_that_fails_says_so_and_a_good_one_beside_it_arrives(rank: Rank) -> None:
    """The copy of page 4 of 8 fails: no page of its group is called good, whatever its bytes are."""

    def fail(leg: str, group: int, targets: Sequence[int]) -> None:
        if leg == "load" and group == 0 and 4 in targets:
            raise RuntimeError("injected")

    for group in range(3):
        poison(rank.l2.view(group).view(torch.uint8))
    copies = FaultyCopies(PoolCopies(rank.l1, rank.l2), before=fail)
    executor = rank.executor(copies=copies)
    executor.submit(copy_job(1, CopyKind.LOAD, *((0, slot, slot) for slot in range(8)), (1, 2, 2)))
    outcomes = rank.completions.outcomes(1)
    assert outcomes == (Outcome.IO_ERROR,) * 8 + (OK,)
    assert executor.faults() == {"copy.load": 1}
    assert not rank.l1.paged[0].view(torch.uint8).any()
    executor.submit(copy_job(2, CopyKind.LOAD, (0, 5, 5)))
    assert rank.completions.outcomes(2) == (OK,)
    assert bool((rank.l1.paged[0][:, 5].view(torch.uint8) == POISON).all())


@pytest.mark.parametrize("kind", [kind for kind in CopyKind if kind is not CopyKind.ARRIVE])
def test_br_001_every_kind_of_copy_that_fails_is_an_outcome(rank: Rank, kind: CopyKind) -> None:
    def fail(leg: str, group: int, targets: Sequence[int]) -> None:
        raise RuntimeError("injected")

    copies = FaultyCopies(PoolCopies(rank.l1, rank.l2), before=fail)
    executor = rank.executor(copies=copies)
    executor.submit(copy_job(1, kind, (2, 0, 1)))
    assert rank.completions.outcomes(1) == (Outcome.IO_ERROR,)
    assert executor.faults() == {f"copy.{kind}": 1}


@pytest.mark.parametrize("kind", [kind for kind in CopyKind if kind not in (CopyKind.BACKUP, CopyKind.ARRIVE)])
def test_an_engine_that_is_interrupted_in_a_copy_leaves_no_job_open(rank: Rank, kind: CopyKind) -> None:
    def interrupt(leg: str, group: int, targets: Sequence[int]) -> None:
        raise KeyboardInterrupt

    executor = rank.executor(copies=FaultyCopies(PoolCopies(rank.l1, rank.l2), before=interrupt))
    with pytest.raises(KeyboardInterrupt):
        executor.submit(copy_job(1, kind, (2, 0, 1)))
    assert rank.completions.outcomes(1) == (Outcome.IO_ERROR,)
    assert not any(executor.open_jobs().values())


@pytest.mark.parametrize(
    ("kind", "item"),
    [
        (CopyKind.BACKUP, (0, 12, 0)),
        (CopyKind.BACKUP, (0, 0, 10)),
        (CopyKind.BACKUP, (2, 6, 0)),
        (CopyKind.BACKUP, (3, 0, 0)),
        (CopyKind.LOAD, (0, 10, 0)),
        (CopyKind.LOAD, (2, 0, 6)),
        (CopyKind.LOAD, (2, 4, 0)),
        (CopyKind.SNAPSHOT, (0, 0, 1)),
        (CopyKind.SNAPSHOT, (2, 0, 0)),
        (CopyKind.RESTORE, (2, 0, -1)),
        (CopyKind.RESET, (2, 0, 6)),
        (CopyKind.RESET, (-1, 0, 0)),
    ],
)
def test_a_slot_or_group_that_does_not_exist_is_an_outcome_and_changes_nothing(
    rank: Rank, kind: CopyKind, item: tuple[int, int, int]
) -> None:
    fill_l1(rank)
    before = [as_bytes(tensor) for tensor in (*rank.l1.paged.values(), *rank.l1.state[2].values())]
    executor = rank.executor()
    executor.submit(copy_job(1, kind, item))
    assert rank.completions.outcomes(1) == (Outcome.IO_ERROR,)
    assert [as_bytes(tensor) for tensor in (*rank.l1.paged.values(), *rank.l1.state[2].values())] == before
    assert not any(bytes(rank.l2.buffer))


def test_copies_into_l1_are_done_when_submit_returns_and_backups_run_elsewhere(rank: Rank) -> None:
    executor = rank.executor()
    for job_id, kind in enumerate((CopyKind.LOAD, CopyKind.SNAPSHOT, CopyKind.RESTORE, CopyKind.RESET)):
        executor.submit(copy_job(job_id, kind, (2, 0, 1)))
        assert rank.completions.has(job_id)
    executor.submit(copy_job(9, CopyKind.BACKUP, (2, 0, 1)))
    assert rank.completions.outcomes(9) == (OK,)
    assert rank.completions.threads == [threading.current_thread().name] * 4 + ["hicache-backup-0"]


def test_br_002_a_backup_never_holds_up_the_engine_and_reads_its_source_once(rank: Rank) -> None:
    """The engine goes on, loads included, while a backup is slow; the page stays put until the completion."""
    entered, go_on = threading.Event(), threading.Event()

    def hold(leg: str, group: int, targets: Sequence[int]) -> None:
        if leg == "backup":
            entered.set()
            assert go_on.wait(WAIT_S)

    fill_l1(rank)
    copies = FaultyCopies(PoolCopies(rank.l1, rank.l2), before=hold)
    executor = rank.executor(copies=copies)
    expected = as_bytes(rank.l1.paged[0][:, 3])
    executor.submit(copy_job(1, CopyKind.BACKUP, (0, 3, 0)))
    assert entered.wait(WAIT_S)
    executor.submit(copy_job(2, CopyKind.LOAD, (0, 5, 5)))
    assert rank.completions.outcomes(2) == (OK,)
    assert executor.open_jobs()["backup"] == 1
    assert not rank.completions.has(1)
    go_on.set()
    assert rank.completions.outcomes(1) == (OK,)
    assert as_bytes(rank.l2.view(0)[0]) == expected
    assert copies.calls == ["backup", "load"]


def test_backups_beyond_the_bound_are_refused_at_once_and_loads_are_not(rank: Rank) -> None:
    go_on = threading.Event()

    def hold(leg: str, group: int, targets: Sequence[int]) -> None:
        if leg == "backup":
            assert go_on.wait(WAIT_S)

    copies = FaultyCopies(PoolCopies(rank.l1, rank.l2), before=hold)
    executor = rank.executor(copies=copies, limits=ExecutorLimits(open_jobs_max=2))
    for job_id in range(3):
        executor.submit(copy_job(job_id, CopyKind.BACKUP, (0, job_id, job_id)))
    assert rank.completions.outcomes(2) == (Outcome.REFUSED,)
    assert not rank.completions.has(0)
    executor.submit(copy_job(3, CopyKind.RESET, (2, 0, 0)))
    assert rank.completions.outcomes(3) == (OK,)
    go_on.set()
    assert [rank.completions.outcomes(job_id) for job_id in (0, 1)] == [(OK,), (OK,)]
    executor.submit(copy_job(4, CopyKind.BACKUP, (0, 0, 0)))
    assert rank.completions.outcomes(4) == (OK,)


def test_a_job_without_items_completes(rank: Rank) -> None:
    executor = rank.executor()
    for job_id, kind in enumerate(CopyKind):
        executor.submit(copy_job(job_id, kind))
        assert rank.completions.outcomes(job_id) == ()


def test_without_l2_only_copies_within_l1_are_done(rank: Rank) -> None:
    l2: L2Pool = rank.l2
    rank.l2 = None  # type: ignore[assignment]  # as an engine without L2 has it
    executor = rank.executor()
    rank.l2 = l2
    executor.submit(copy_job(1, CopyKind.SNAPSHOT, (2, 0, 1)))
    executor.submit(copy_job(2, CopyKind.BACKUP, (0, 0, 1)))
    assert (rank.completions.outcomes(1), rank.completions.outcomes(2)) == ((OK,), (Outcome.IO_ERROR,))


def test_seconds_are_those_of_the_work_by_the_given_clock(rank: Rank, clock: Callable[[], float]) -> None:
    executor = rank.executor(clock=clock)
    executor.submit(copy_job(1, CopyKind.RESET, (2, 0, 0)))
    executor.submit(copy_job(2, CopyKind.RESET))
    assert [completion.seconds for completion in rank.completions.all] == [1.0, 0.0]


def test_br_050_a_line_at_start_names_the_paths_taken(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        executor = rank.executor(copies="direct")
    assert executor.description == "copies: direct on cpu; no L3"
    line = caplog.messages[-1]
    assert line == f"{rank.l2.description}; {executor.description}"
    assert "memfd of" in line
