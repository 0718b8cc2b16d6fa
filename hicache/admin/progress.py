"""How far long work on a store has come, as it is told: by a daemon, and by verbs that work on a directory."""

from __future__ import annotations

from hicache.admin.store_messages import DropLine, ImportAnswer, VerifyLine
from hicache.backends.exports import ImportProgress
from hicache.backends.scrub import DropProgress, ScrubProgress
from hicache.outcome import Outcome


def drop_line(progress: DropProgress, is_done: bool) -> DropLine:
    """How far a drop has come, as one line."""
    failed = progress.outcomes.total() - progress.outcomes[Outcome.OK] - progress.outcomes[Outcome.ABSENT]
    return DropLine(objects=progress.objects, payload_bytes=progress.payload_bytes, failed=failed, is_done=is_done)


def verify_line(progress: ScrubProgress, *, objects_stored: int, is_done: bool) -> VerifyLine:
    """How far a scrub has come, as one line."""
    return VerifyLine(
        objects=progress.objects,
        payload_bytes=progress.payload_bytes,
        corrupt=progress.corrupt,
        unreadable=progress.unreadable,
        gone=progress.gone,
        objects_stored=objects_stored,
        after=progress.after.hex(),
        is_done=is_done,
    )


def import_answer(progress: ImportProgress) -> ImportAnswer:
    """What became of an import, as one line."""
    good = (Outcome.OK, Outcome.EXISTS)
    return ImportAnswer(
        objects=progress.objects,
        payload_bytes=progress.payload_bytes,
        stored=progress.outcomes[Outcome.OK],
        existing=progress.outcomes[Outcome.EXISTS],
        damaged=progress.damaged,
        too_large=progress.too_large,
        failed={outcome.name: count for outcome, count in progress.outcomes.items() if outcome not in good},
    )
