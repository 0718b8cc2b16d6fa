"""The book of jobs: what several ranks answer, taken together."""

from __future__ import annotations

import itertools

import pytest

from hicache.errors import UsageError
from hicache.jobbook import JobBook, Outcomes, batches
from hicache.jobs import Completion, CopyItem, CopyJob, CopyKind, Job, LookupItem, LookupJob
from hicache.outcome import Outcome


def lookup(job_id: int, *, items: int = 3) -> Job:
    return LookupJob(job_id, tuple(LookupItem(0, bytes([item])) for item in range(items)))


def emitted(book: JobBook, done: list[Outcomes]) -> int:
    return book.emit(lookup, done.append)


def test_jobs_are_numbered_and_handed_out_once_in_order() -> None:
    book, done = JobBook(), []
    first, second = emitted(book, done), emitted(book, done)
    assert [job.job_id for job in book.take()] == [first, second]
    assert book.take() == []
    assert book.open_count == 2


def test_br_045_an_item_is_there_only_when_every_rank_has_it() -> None:
    ok, absent, exists = Outcome.OK, Outcome.ABSENT, Outcome.EXISTS
    for order in itertools.permutations([(ok, ok, absent), (ok, absent, ok), (exists, ok, ok)]):
        book, done = JobBook(ranks=3), []
        job_id = emitted(book, done)
        for rank, outcomes in enumerate(order[:2]):
            book.complete(Completion(job_id, outcomes), rank=rank)
            assert done == []
            assert book.open_count == 1
        book.complete(Completion(job_id, order[2]), rank=2)
        assert done == [(exists, absent, absent)]
        assert book.open_count == 0
        assert [outcome.is_ok for outcome in done[0]] == [True, False, False]


def test_jobs_end_when_every_rank_is_lost_and_those_that_follow_from_them_too() -> None:
    book, done = JobBook(ranks=2), []
    gone = (Outcome.UNAVAILABLE,) * 3

    def again(outcomes: Outcomes) -> None:
        done.append(outcomes)
        emitted(book, done)

    emitted(book, done)  # and not taken before the ranks are lost
    book.lose(0)
    book.lose(1)
    assert done == [gone]
    assert book.take() == []
    book.emit(lookup, again)
    book.emit(lambda job_id: CopyJob(job_id, CopyKind.RESET, (CopyItem(0, 0, 1),)), done.append)
    assert book.has_emitted
    assert book.take() == []
    assert done == [gone, gone, (Outcome.OK,), gone]
    assert book.open_count == 0
    assert not book.has_emitted


def test_a_lost_rank_answers_once_for_all_it_had_open_and_at_once_for_what_follows() -> None:
    book, done = JobBook(ranks=3), []
    ok, gone = (Outcome.OK,) * 3, (Outcome.UNAVAILABLE,) * 3
    answered, waiting = emitted(book, done), emitted(book, done)
    for rank in (0, 1):
        book.complete(Completion(answered, ok), rank=rank)
    book.complete(Completion(waiting, ok), rank=0)
    book.lose(2)
    assert done == [gone]  # of the others, one is still at work: its memory is in use
    assert book.open_count == 1
    book.complete(Completion(waiting, ok), rank=2)  # too late to be heard
    book.complete(Completion(waiting, ok), rank=1)
    assert done == [gone, gone]
    book.lose(2)
    later = emitted(book, done)
    assert book.open_count == 1
    for rank in (0, 1):
        book.complete(Completion(later, ok), rank=rank)
    assert done == [gone] * 3


def test_a_state_is_emptied_on_the_ranks_that_are_left() -> None:
    book, done = JobBook(ranks=2), []
    book.lose(1)
    for outcome in (Outcome.OK, Outcome.IO_ERROR):
        job_id = book.emit(
            lambda job_id: CopyJob(job_id, CopyKind.RESET, (CopyItem(0, 1, 1),)),
            done.append,
        )
        book.complete(Completion(job_id, (outcome,)))
    assert done == [(Outcome.OK,), (Outcome.IO_ERROR,)]


def test_a_rank_answers_a_job_once() -> None:
    book, done = JobBook(ranks=2), []
    job_id = emitted(book, done)
    book.complete(Completion(job_id, (Outcome.OK,) * 3), rank=1)
    with pytest.raises(UsageError, match=f"job {job_id} is not open on rank 1"):
        book.complete(Completion(job_id, (Outcome.OK,) * 3), rank=1)
    assert not done


def test_a_step_has_a_number_between_the_jobs_before_and_after_it() -> None:
    book, done = JobBook(), []
    assert emitted(book, done) < book.number() < book.number() < emitted(book, done)


def test_a_job_without_items_is_done_when_all_ranks_have_answered() -> None:
    book, done = JobBook(ranks=2), []
    job_id = book.emit(lambda job_id: LookupJob(job_id, ()), done.append)
    book.complete(Completion(job_id, ()))
    assert done == []
    book.complete(Completion(job_id, ()), rank=1)
    assert done == [()]


def test_a_completion_nobody_waits_for_is_refused() -> None:
    book, done = JobBook(), []
    job_id = emitted(book, done)
    book.complete(Completion(job_id, (Outcome.OK,) * 3))
    for stray in (job_id, job_id + 1, 0, -1):
        with pytest.raises(UsageError, match=f"job {stray} is not open"):
            book.complete(Completion(stray, (Outcome.OK,) * 3))
    assert len(done) == 1


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_completion_of_the_wrong_length_is_refused_and_changes_nothing(count: int) -> None:
    book, done = JobBook(), []
    job_id = emitted(book, done)
    with pytest.raises(UsageError, match=f"has 3 items, its completion {count}"):
        book.complete(Completion(job_id, (Outcome.OK,) * count))
    book.complete(Completion(job_id, (Outcome.OK,) * 3))
    assert len(done) == 1


def test_what_follows_a_job_may_emit_the_next_one() -> None:
    book, done = JobBook(), []
    first = book.emit(lookup, lambda outcomes: done.append(emitted(book, [])))
    book.take()
    book.complete(Completion(first, (Outcome.OK,) * 3))
    assert [job.job_id for job in book.take()] == done


@pytest.mark.parametrize(("length", "size"), [(0, 3), (1, 3), (3, 3), (7, 3), (7, 1)])
def test_batches_are_consecutive_and_bounded(length: int, size: int) -> None:
    elements = list(range(length))
    made = list(batches(elements, size))
    assert [element for batch in made for element in batch] == elements
    assert all(0 < len(batch) <= size for batch in made)
