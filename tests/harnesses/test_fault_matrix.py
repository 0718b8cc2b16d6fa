"""The tables in docs/faults.md are what happens: some cells of each, in every run; all of them on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hicache.admin.verbs import VERBS
from hicache.backends.faulty import FaultKind
from hicache.jobs import CopyKind
from hicache.moves import COPIES_SETTINGS
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import BulkKind
from tests.harnesses.cells import DOCUMENT, FAULTS, SLACK_S, Bound, Part
from tests.harnesses.copy_faults import run_copies
from tests.harnesses.copy_legs import BACK_ENDS, LEGS
from tests.harnesses.fault_matrix import parts, sample
from tests.harnesses.rpc_faults import ADMIN, CALLS
from tests.harnesses.storage_faults import run_store

PARTS = parts()
NAMES = [part.name for part in PARTS]


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_every_call_meets_every_fault_as_documented_and_leaves_nothing(part: Part) -> None:
    places = sample(part, shift=NAMES.index(part.name))
    documented = part.documented_cells()
    assert part.run(places) == {place: documented[place] for place in places}, (
        f"run python -m tests.harnesses.fault_matrix --write --part '{part.name}'"
    )


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_every_place_has_a_cell_or_a_reason(part: Part) -> None:
    assert part.documented() == part.markdown(part.documented_cells())
    assert set(part.documented_cells()) | set(part.reasons) == set(part.all_places)
    assert not set(part.reasons) - set(part.all_places)


def test_nothing_that_there_is_is_missing_in_the_matrix() -> None:
    assert {kind.value for kind in FaultKind} | {"killed"} == set(FAULTS)
    assert {method.name for method in pb.DESCRIPTOR.services_by_name["HiCached"].methods} <= set(CALLS)
    assert {kind.name for kind in BulkKind} <= set(CALLS)
    assert set(BACK_ENDS) == set(COPIES_SETTINGS) - {"auto"}
    assert {leg.kind for leg in LEGS.values()} == set(CopyKind) - {CopyKind.ARRIVE, CopyKind.CLEAR}


def test_a_verb_that_is_in_no_table_is_named_with_the_reason() -> None:
    text = DOCUMENT.read_text()
    [line] = [line for line in text.splitlines() if line.startswith("- Verbs without a row")]
    assert {verb.name for verb in VERBS} - set(ADMIN) == set(line.split("`")[1::2])


class TestMutants:
    """What the matrix would find."""

    def test_a_store_that_does_not_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hicache.backends.file_objects._Check.is_right", lambda _: True)
        with pytest.raises(AssertionError, match="a get is OK with wrong bytes"):
            run_store("file", [("wrong bytes", "get")])

    def test_a_client_that_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hicache.client.status.Counters.count", lambda *_: None)
        with pytest.raises(AssertionError, match="OK was counted as"):
            run_store("mooncake", [("delay", "lookup")])

    def test_an_executor_that_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hicache.executor.Executor._copy_fault", lambda *_: None)
        with pytest.raises(AssertionError, match=r"counted {} in place of {'copy.load': 1}"):
            run_copies([("EIO", "load")])

    def test_a_copy_that_fails_in_silence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "hicache.copy_jobs.CopyRun.outcomes", property(lambda run: [Outcome.OK for _ in run._job.items])
        )
        with pytest.raises(AssertionError, match="load is OK with wrong bytes"):
            run_copies([("short", "load")])


class TestBound:
    """What calls a hang a hang."""

    @pytest.fixture
    def waiting(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
        """A call that takes so many seconds, by a clock that is moved."""
        now_s = [0.0]
        monkeypatch.setattr("tests.harnesses.cells.time.monotonic", lambda: now_s[0])
        monkeypatch.setattr("tests.harnesses.cells.TICK_S", 1e9)

        def wait(seconds: float) -> None:
            now_s[0] += seconds

        return wait

    def test_a_call_that_is_over_soon_after_its_deadline_is_none(self, waiting: Callable[[float], None]) -> None:
        with Bound().within(1.0, "get"):
            waiting(1.0 + SLACK_S / 2)

    def test_a_call_that_goes_on_is_one(self, waiting: Callable[[float], None]) -> None:
        with pytest.raises(AssertionError, match=r"get took .* with a deadline of 1.0 s"), Bound().within(1.0, "get"):
            waiting(1.1 + SLACK_S)

    def test_on_a_slow_machine_it_takes_longer(self, waiting: Callable[[float], None]) -> None:
        bound = Bound()
        bound.learn("get", lambda: waiting(0.5))
        with bound.within(1.0, "get"):
            waiting(5.0)


def test_the_harness_leaves_no_thread() -> None:
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("fault-matrix")]
