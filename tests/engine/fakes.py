"""An L3 in memory, and copies, that do what a test tells them: late, never, twice, or raising."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hicache.copies import Copies
from hicache.jobs import Completion
from hicache.l3 import Done, L3Item
from hicache.outcome import Outcome
from hicache.pools import L2Pool

WAIT_S = 20.0  # far above what anything here takes; only a broken test waits as long


class Completions:
    """What an executor reported, in order."""

    def __init__(self) -> None:
        self.all: list[Completion] = []
        self.threads: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, completion: Completion) -> None:
        with self._changed:
            self.all.append(completion)
            self.threads.append(threading.current_thread().name)
            self._changed.notify_all()

    def outcomes(self, job_id: int) -> tuple[Outcome, ...]:
        """Of a job, which must complete, and must have completed once."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._of(job_id), WAIT_S), f"job {job_id} does not complete"
            (completion,) = self._of(job_id)
            return completion.outcomes

    def has(self, job_id: int) -> bool:
        with self._changed:
            return bool(self._of(job_id))

    def _of(self, job_id: int) -> list[Completion]:
        return [completion for completion in self.all if completion.job_id == job_id]


class MemoryL3:
    """Keeps objects in a dict. A transfer is done in the calling thread, at once."""

    def __init__(self, memory: L2Pool, objects: dict[bytes, bytes] | None = None) -> None:
        self._memory = memory
        self.objects: dict[bytes, bytes] = {} if objects is None else objects
        self.calls: list[tuple[str, int, float]] = []  # name, items, timeout_s
        self.closed = 0

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        self.calls.append(("lookup", len(keys), timeout_s))
        return [Outcome.OK if key in self.objects else Outcome.ABSENT for key in keys]

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        self.calls.append(("get", len(items), timeout_s))
        done([self._read(item) for item in items])

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        self.calls.append(("put", len(items), timeout_s))
        done([self._write(item) for item in items])

    def close(self) -> None:
        self.closed += 1

    def _read(self, item: L3Item) -> Outcome:
        if item.key not in self.objects:
            return Outcome.ABSENT
        self._memory.buffer[item.offset : item.offset + item.size_bytes] = self.objects[item.key]
        return Outcome.OK

    def _write(self, item: L3Item) -> Outcome:
        is_new = item.key not in self.objects
        if is_new:
            self.objects[item.key] = bytes(self._memory.buffer[item.offset : item.offset + item.size_bytes])
        return Outcome.OK if is_new else Outcome.EXISTS


class ScriptedL3(MemoryL3):
    """Each transfer does what ``script`` says instead of reporting its outcomes at once."""

    def __init__(self, memory: L2Pool, script: Callable[[Done, list[Outcome]], None]) -> None:
        super().__init__(memory)
        self.script = script
        self.entered = threading.Semaphore(0)
        self.on_close: Callable[[], None] = lambda: None

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        super().get(items, timeout_s=timeout_s, done=self._scripted(done))

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        super().put(items, timeout_s=timeout_s, done=self._scripted(done))

    def close(self) -> None:
        super().close()
        self.on_close()

    def _scripted(self, done: Done) -> Done:
        def run(outcomes: list[Outcome]) -> None:
            self.entered.release()
            self.script(done, outcomes)

        return run


@dataclass
class FaultyCopies:
    """The copies of ``inner``, each of which may be held up or made to fail first."""

    inner: Copies
    before: Callable[[str, int, Sequence[int]], None] = lambda leg, group, targets: None
    calls: list[str] = field(default_factory=list)
    name: str = "faulty"

    def backup(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._enter("backup", group, targets)
        self.inner.backup(group, sources, targets)

    def load(self, group: int, sources: Sequence[int], targets: Sequence[int], *, layers: slice | None = None) -> None:
        self._enter("load", group, targets)
        self.inner.load(group, sources, targets, layers=layers)

    def snapshot(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._enter("snapshot", group, targets)
        self.inner.snapshot(group, sources, targets)

    def restore(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._enter("restore", group, targets)
        self.inner.restore(group, sources, targets)

    def reset(self, group: int, targets: Sequence[int]) -> None:
        self._enter("reset", group, targets)
        self.inner.reset(group, targets)

    def clear(self, group: int, targets: Sequence[int]) -> None:
        self._enter("clear", group, targets)
        self.inner.clear(group, targets)

    def _enter(self, leg: str, group: int, targets: Sequence[int]) -> None:
        self.calls.append(leg)
        self.before(leg, group, targets)
