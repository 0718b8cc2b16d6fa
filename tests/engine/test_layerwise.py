"""Loads by layer: compute reads no layer that has not arrived, and nobody reuses what is in flight."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache import HiCache
from hicache.copies import PoolCopies
from hicache.copy_order import CopyOrder, CudaOrder, LayerCopy, Wait
from hicache.errors import ConfigError, UsageError
from hicache.executor import Executor, ExecutorLimits
from hicache.jobs import CopyItem, CopyJob, CopyKind
from hicache.layer_runs import LayerRun, layer_runs
from hicache.outcome import Outcome
from hicache.pending import PendingJob
from hicache.pools import L1Pool
from hicache.spec import CacheSpec, PagedGroup, StateField, StateGroup
from tests.engine.conftest import Rank
from tests.engine.fakes import FaultyCopies
from tests.engine.layer_lives import LayerLife, lived
from tests.engine.lazy_cuda import EnqueuedCopies, LazyCuda
from tests.engine.specs import as_bytes, fill_with_noise
from tests.engine.test_copy_order import CudaDouble

LOADS, STEPS_MAX = 40, 2000
CUDA = torch.device("cuda", 0)


# -- what is copied together -------------------------------------------------------------------------------------------


def hybrid(*groups: Any) -> Any:
    return CacheSpec("m", "1", groups, page_tokens=4).rank(0)


ATTENTION = PagedGroup("attention", (1, 3), heads=1, head_dim=8, dtype="uint8")  # 64 bytes of a page in a layer
STATE = StateGroup("state", (0, 2), (StateField("s", (32,), "uint8"),))


@pytest.mark.parametrize(
    ("run_bytes_min", "expected"),
    [
        (
            1,
            [((0,), {1: (0, 1)}), ((1,), {0: (0, 1)}), ((2,), {1: (1, 2)}), ((3,), {0: (1, 2)})],
        ),
        (150, [((0, 1), {1: (0, 1), 0: (0, 1)}), ((2, 3), {1: (1, 2), 0: (1, 2)})]),
        (10_000, [((0, 1, 2, 3), {1: (0, 2), 0: (0, 2)})]),
    ],
)
def test_layers_of_all_groups_are_copied_in_their_order_in_runs_of_enough_bytes(
    run_bytes_min: int, expected: list[LayerRun]
) -> None:
    assert layer_runs(hybrid(ATTENTION, STATE), {0: 2, 1: 1}, run_bytes_min=run_bytes_min) == expected


def test_a_group_whose_layers_are_in_no_order_comes_whole_with_the_first_of_them() -> None:
    group = PagedGroup("attention", (5, 3, 9), heads=1, head_dim=8, dtype="uint8")
    runs = layer_runs(hybrid(group, STATE), {0: 1, 1: 1}, run_bytes_min=1)
    assert runs == [((0,), {1: (0, 1)}), ((2,), {1: (1, 2)}), ((3,), {0: (0, 3)}), ((5, 9), {})]


@pytest.mark.parametrize("setting", ["reference", "direct"])
@pytest.mark.parametrize("as_list", [False, True], ids=["one tensor", "by layer"])
def test_layers_one_by_one_bring_what_a_whole_load_brings(rank: Rank, setting: str, as_list: bool) -> None:
    if as_list:
        rank.l1 = adopted_by_layer(rank.l1)
    layers_bring_what_a_whole_load_brings(rank, setting)


def adopted_by_layer(l1: L1Pool) -> L1Pool:
    states = {name: [*field.clone()] for name, field in l1.state[2].items()}
    return L1Pool.adopt(l1.spec, {0: [*l1.paged[0].clone()], 1: [*l1.paged[1].clone()], 2: states})


def layers_bring_what_a_whole_load_brings(rank: Rank, setting: str) -> None:
    """Layer by layer, the last one first: each is there, and nothing of the others has changed."""
    copies = PoolCopies(rank.l1, rank.l2, setting=setting)
    for group in range(3):
        fill_with_noise(rank.l2.view(group), seed=group)
        count = len(rank.l1.rank.groups[group].layers)  # type: ignore[union-attr]
        copies.load(group, [3, 1], [0, 2])
        for layer in reversed(range(count)):
            before = slots_of(rank, group, [1, 4])
            copies.load(group, [3, 1], [4, 1], layers=slice(layer, layer + 1))
            after = slots_of(rank, group, [1, 4])
            whole = slots_of(rank, group, [2, 0])
            changed = [place for place in range(count) if after[place] != before[place]]
            assert changed == [layer]
            assert after[layer] == whole[layer]
    assert slots_of(rank, 2, [1, 4]) == slots_of(rank, 2, [2, 0])


def slots_of(rank: Rank, group: int, slots: list[int]) -> list[bytes]:
    """By layer, everything in these slots."""
    fields = [rank.l1.pages(group)] if group < 2 else [f for t in (0, 1) for f in rank.l1.fields(2, transient=bool(t))]
    count = len(fields[0])
    return [b"".join(as_bytes(field[layer][slots].cpu()) for field in fields) for layer in range(count)]


# -- who waits for what ------------------------------------------------------------------------------------------------


def by_layer(cuda: CudaDouble, order: CudaOrder, *layers: tuple[int, ...]) -> Wait | None:
    return order.run_by_layer([LayerCopy(ids, lambda ids=ids: cuda.launch(f"write {ids}")) for ids in layers])  # type: ignore[misc]  # bound now


def test_compute_waits_for_its_layer_and_goes_on_while_the_next_is_in_flight() -> None:
    cuda = CudaDouble()
    order = CudaOrder(CUDA, cuda)
    cuda.launch("read old pages")
    wait = by_layer(cuda, order, (0, 1), (2,), ())
    order.wait_layer(1)
    cuda.launch("layer 1")
    order.wait_layer(2)
    cuda.launch("layer 2")
    assert wait is not None
    wait()
    assert cuda.log == [
        "compute: read old pages",
        "compute: record 0",
        "load: wait 0",
        "load: write (0, 1)",
        "load: record 1",
        "load: write (2,)",
        "load: record 2",
        "load: write ()",
        "load: record 3",
        "compute: wait 1",
        "compute: layer 1",
        "compute: wait 2",
        "compute: layer 2",
        "host: wait 3",
    ]


def test_a_layer_that_a_later_load_does_not_bring_is_waited_for_by_its_own_event() -> None:
    cuda = CudaDouble()
    order = CudaOrder(CUDA, cuda)
    by_layer(cuda, order, (0,), (1,))
    by_layer(cuda, order, (0,))
    cuda.log.clear()
    for layer in (0, 1, 7):
        order.wait_layer(layer)
    assert cuda.log == ["compute: wait 4", "compute: wait 2"]


def test_backups_and_copies_of_states_wait_for_every_load_and_slots_of_no_load_for_none() -> None:
    """BR-001: a backup of a page that has not arrived would write down whatever was there before."""
    cuda = CudaDouble()
    order = CudaOrder(CUDA, cuda)
    by_layer(cuda, order, (0,), (1,))
    cuda.log.clear()
    order.run_after(order.mark(), lambda: cuda.launch("read page"))
    order.run_in_compute(lambda: cuda.launch("reset"), after_loads=False)
    order.run_in_compute(lambda: cuda.launch("snapshot"), after_loads=True)
    assert cuda.log == [
        "compute: record 3",
        "backup: wait 3",
        "backup: wait 2",
        "backup: read page",
        "backup: record 4",
        "host: wait 4",
        "compute: reset",
        "compute: wait 2",
        "compute: snapshot",
    ]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
def test_a_layer_that_cannot_be_enqueued_leaves_nothing_in_flight(error: type[BaseException]) -> None:
    cuda = CudaDouble()
    order = CudaOrder(CUDA, cuda)

    def refuse() -> None:
        raise error

    with pytest.raises(error):
        order.run_by_layer([LayerCopy((0,), lambda: cuda.launch("write")), LayerCopy((1,), refuse)])
    assert cuda.log[-1] == "host: wait for load"
    cuda.log.clear()
    order.wait_layer(0)
    assert not cuda.log


# -- jobs --------------------------------------------------------------------------------------------------------------


def load_by_layer(job_id: int, *items: tuple[int, int, int]) -> CopyJob:
    return CopyJob(job_id, CopyKind.LOAD, tuple(CopyItem(*item) for item in items), by_layer=True)


def arrive(job_id: int, job: CopyJob) -> CopyJob:
    return CopyJob(job_id, CopyKind.ARRIVE, job.items)


def test_a_load_by_layer_is_done_when_enqueued_and_arrives_later(rank: Rank) -> None:
    cuda = LazyCuda(random.Random(1))
    for group in range(3):
        fill_with_noise(rank.l2.view(group), seed=group)
    copies = EnqueuedCopies(PoolCopies(rank.l1, rank.l2), cuda)
    executor = rank.executor(copies=copies, order=CudaOrder(CUDA, cuda))
    job = load_by_layer(1, (0, 1, 2), (2, 1, 3))
    executor.submit(job)
    assert rank.completions.outcomes(1) == (Outcome.OK, Outcome.OK)
    executor.submit(arrive(2, job))
    assert not rank.l1.paged[0][:, 2].any()
    assert not rank.completions.has(2)
    assert executor.open_jobs()["load"] == 1
    cuda.run_all()
    assert rank.completions.outcomes(2) == (Outcome.OK, Outcome.OK)
    assert as_bytes(rank.l1.paged[0][:, 2]) == as_bytes(rank.l2.view(0)[1])


def test_on_a_cpu_a_load_by_layer_has_arrived_when_it_is_done(rank: Rank) -> None:
    fill_with_noise(rank.l2.view(0), seed=5)
    executor = rank.executor()
    job = load_by_layer(1, (0, 1, 2))
    executor.submit(job)
    assert as_bytes(rank.l1.paged[0][:, 2]) == as_bytes(rank.l2.view(0)[1])
    executor.submit(arrive(2, job))
    assert [rank.completions.outcomes(number) for number in (1, 2)] == [(Outcome.OK,)] * 2
    for layer in range(6):
        executor.wait_layer(layer)


def test_a_layer_of_no_group_is_refused(rank: Rank) -> None:
    with pytest.raises(UsageError, match=r"layer 6 is in no group of this rank, whose layers are \[0, 1, 2, 3, 4, 5\]"):
        rank.executor().wait_layer(6)


def test_br_001_a_layer_that_fails_fails_its_group_and_leaves_the_others(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def fail_the_second(leg: str, group: int, targets: Any) -> None:
        seen.append(group)
        if group == 0 and seen.count(0) == 2:
            raise RuntimeError("injected")

    monkeypatch.setattr("hicache.copy_jobs.layer_runs", lambda rank, counts: layer_runs(rank, counts, run_bytes_min=1))
    copies = FaultyCopies(PoolCopies(rank.l1, rank.l2), before=fail_the_second)
    executor = rank.executor(copies=copies)
    executor.submit(load_by_layer(1, (0, 1, 2), (2, 1, 3), (7, 0, 0)))
    assert rank.completions.outcomes(1) == (Outcome.IO_ERROR, Outcome.OK, Outcome.IO_ERROR)
    assert seen == [0, 2, 2, 0, 2]  # layers 0, 2, 3, 4, 5
    assert executor.faults() == {"copy.load": 2}


def test_an_arrival_is_never_refused_and_keeps_loads_out(rank: Rank) -> None:
    cuda = LazyCuda(random.Random(1))
    copies = EnqueuedCopies(PoolCopies(rank.l1, rank.l2), cuda)
    executor = rank.executor(copies=copies, order=CudaOrder(CUDA, cuda), limits=ExecutorLimits(open_jobs_max=1))
    jobs = [load_by_layer(number, (0, 1, number)) for number in range(3)]
    executor.submit(jobs[0])
    executor.submit(jobs[1])
    executor.submit(arrive(10, jobs[0]))
    executor.submit(arrive(11, jobs[1]))
    executor.submit(jobs[2])
    assert rank.completions.outcomes(2) == (Outcome.REFUSED,)
    cuda.run_all()
    assert [rank.completions.outcomes(number) for number in (10, 11)] == [(Outcome.OK,)] * 2


def test_closing_waits_for_what_was_loaded_by_layer(rank: Rank) -> None:
    """L2 is unpinned after it: False says that it must stay."""
    cuda = LazyCuda(random.Random(1))
    copies = EnqueuedCopies(PoolCopies(rank.l1, rank.l2), cuda)
    executor = rank.executor(copies=copies, order=CudaOrder(CUDA, cuda))
    executor.submit(load_by_layer(1, (0, 1, 2)))
    assert not executor.close(timeout_s=0.0)
    cuda.run_all()


def test_a_setting_that_is_none_is_refused(rank: Rank) -> None:
    with pytest.raises(ConfigError, match="layerwise = 1: expected True or False"):
        HiCache(rank.spec, l1=rank.l1, l2=None, l3=None, layerwise=1)  # type: ignore[arg-type]


class MarksNothing(CudaOrder):
    def mark(self) -> list[Any]:
        return []


@pytest.mark.parametrize("order", [CudaOrder, MarksNothing], ids=lambda order: order.__name__)
def test_br_002_a_backup_holds_what_compute_wrote_last_however_late_that_is(rank: Rank, order: type[CudaOrder]) -> None:
    """A thousand times; an order that does not wait for compute is found out."""
    cuda = LazyCuda(random.Random(2))
    copies = EnqueuedCopies(PoolCopies(rank.l1, rank.l2), cuda)
    executor = rank.executor(copies=copies, order=order(CUDA, cuda))
    source, mismatches = rank.l1.paged[0].view(torch.uint8), 0
    for trial in range(1000):
        for layer in range(2):
            cuda.launch(lambda layer=layer, value=trial % 251: source[layer, 3].fill_(value))  # type: ignore[misc]
        cuda.run_some(trial % 3)
        executor.submit(CopyJob(trial, CopyKind.BACKUP, (CopyItem(0, 3, 1),)))
        cuda.run_until(lambda trial=trial: rank.completions.has(trial))  # type: ignore[misc]
        mismatches += not bool((rank.l2.view(0)[1].view(torch.uint8) == trial % 251).all())
        rank.completions.all.clear()
    assert (mismatches == 0) == (order is CudaOrder)


# -- lives -------------------------------------------------------------------------------------------------------------


def live(seed: int, order: Callable[[torch.device, LazyCuda], CopyOrder] = CudaOrder) -> LayerLife:
    return lived(LayerLife(seed, order), loads=LOADS, steps_max=STEPS_MAX)


@pytest.mark.parametrize("seed", range(8))
def test_br_002_no_forward_reads_a_layer_that_has_not_arrived(seed: int) -> None:
    life = live(seed)
    assert not life.wrong
    assert life.cache.stats.objects["load.ok"] > LOADS


class WaitsForTheLayerBefore(CudaOrder):
    def wait_layer(self, layer: int) -> None:
        super().wait_layer(layer - 1)


class WaitsForNoLayer(CudaOrder):
    def wait_layer(self, layer: int) -> None: ...


class WritesBeforeTheLastReader(CudaOrder):
    def run_by_layer(self, copies: Any) -> Wait | None:
        compute, self._compute_stream = self._compute_stream, self._cuda.Stream(None)  # nothing has been asked of it
        try:
            return super().run_by_layer(copies)
        finally:
            self._compute_stream = compute


class CopiesStatesBeforeTheyArrive(CudaOrder):
    def run_in_compute(self, copy: Callable[[], None], *, after_loads: bool) -> None:
        super().run_in_compute(copy, after_loads=False)


MUTANTS = [CopiesStatesBeforeTheyArrive, WaitsForTheLayerBefore, WaitsForNoLayer, WritesBeforeTheLastReader]


@pytest.mark.parametrize("order", MUTANTS, ids=lambda order: order.__name__)
def test_lives_find_an_order_that_is_wrong(order: Callable[[torch.device, LazyCuda], CopyOrder]) -> None:
    assert any(live(seed, order).wrong for seed in range(40))


def test_lives_find_a_source_that_is_given_back_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Executor._submit_copies

    def at_once(executor: Executor, job: CopyJob, pending: PendingJob) -> None:
        if job.kind is CopyKind.ARRIVE:
            pending.settle_rest(Outcome.OK)
        else:
            real(executor, job, pending)

    monkeypatch.setattr(Executor, "_submit_copies", at_once)
    assert any(live(seed).wrong for seed in range(40))
