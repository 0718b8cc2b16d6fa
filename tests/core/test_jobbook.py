"""The book of jobs: what several ranks answer, taken together."""

from __future__ import annotations

import itertools

import pytest

from hicache.errors import UsageError
from hicache.jobbook import JobBook, Outcomes, batches
from hicache.jobs import Completion, Job, LookupItem, LookupJob
from hicache.outcome import Outcome


def lookup(job_id: int, *, items: int = 3) -> Job:
    return LookupJob(job_id, tuple(LookupItem(0, bytes([item])) for item in range(items)))


def emitted(book: JobBook, done: list[Outcomes], **options: bool) -> int:
    return book.emit(lookup, done.append, **options)


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
        for outcomes in order[:2]:
            book.complete(Completion(job_id, outcomes))
            assert done == []
            assert book.open_count == 1
        book.complete(Completion(job_id, order[2]))
        assert done == [(exists, absent, absent)]
        assert book.open_count == 0
        assert [outcome.is_ok for outcome in done[0]] == [True, False, False]


def test_a_job_for_one_rank_is_done_when_that_one_is() -> None:
    book, done = JobBook(ranks=4), []
    job_id = emitted(book, done, one_rank=True)
    book.complete(Completion(job_id, (Outcome.OK,) * 3))
    assert len(done) == 1


def test_a_job_without_items_is_done_when_all_ranks_have_answered() -> None:
    book, done = JobBook(ranks=2), []
    job_id = book.emit(lambda job_id: LookupJob(job_id, ()), done.append)
    book.complete(Completion(job_id, ()))
    assert done == []
    book.complete(Completion(job_id, ()))
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
