"""What one tier holds: a tree of runs of pages, evicted from its leaves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hicache.policies.eviction import EvictionFactory
from hicache.policies.facts import EvictionFacts, RequestFacts

_START_BITS = 24


class Gone(NamedTuple):
    """Pages ``[start, end)`` of a path have left a tier."""

    path: Sequence[int]
    start: int
    end: int


class Run:
    """Pages ``[start, end)`` of a path that came together, without a branch between them.

    root ── run ─┬─ run            a run loses pages at its end, when nothing is below it,
                 └─ run ── run     and is split when a request uses only its first pages
    """

    __slots__ = (
        "born_at", "children", "end", "is_parked", "last", "parent", "path", "reads", "start", "tick", "used_s", "uses",
    )  # fmt: skip

    def __init__(self, parent: Run | None, path: Sequence[int], start: int, end: int) -> None:
        self.parent = parent
        self.path = path
        self.start = start
        self.end = end
        self.children: dict[int, Run] = {}  # by their first block
        self.is_parked = False
        self.tick = 0
        self.used_s = 0.0
        self.born_at = 0
        self.uses = 1
        self.reads = 0  # requests that took it from this tier
        self.last: RequestFacts | None = None


class Counts:
    """What has happened to pages of a tier so far."""

    __slots__ = ("evicted", "expired", "never_read", "read", "written")

    def __init__(self) -> None:
        self.written = 0
        self.read = 0
        self.evicted = 0
        self.expired = 0
        self.never_read = 0  # of those that have left


class ResidentTree:
    """The pages of one tier: with each page all pages before it.

    The eviction policy says which pages leave, of those that have nothing below them and that the request under way
    does not use.

    ``run_pages_max`` 1 makes each page an item of its own, as a policy may ask for with ``by_page``.
    """

    def __init__(
        self,
        capacity_pages: int | None,
        *,
        page_tokens: int,
        page_bytes: int,
        eviction: EvictionFactory,
        run_pages_max: int | None = None,
    ) -> None:
        assert capacity_pages is None or capacity_pages > 0, capacity_pages
        self.capacity_pages = capacity_pages
        self.resident_pages = 0
        self.counts = Counts()
        self.now_s = 0.0
        self.gone: list[Gone] | None = None  # collects what leaves, if somebody wants to know
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._root = Run(None, (), 0, 0)
        self._policy = eviction(self)
        self._run_pages_max = 1 if self._policy.by_page else run_pages_max
        self._watches_use = self._policy.watches_use
        self._walked: tuple[Sequence[int], tuple[Run, int, list[Run]]] = ((), (self._root, 0, []))  # by ``match``
        self._tick = 0
        self._births = 0

    # -- what the policy asks ----------------------------------------------------------------------------------------

    def last_use(self, run: Run) -> int:
        """See ``Describe``. The start orders the runs of one path like their ends do, and stays when pages go."""
        return (run.tick << _START_BITS) - run.start

    def facts(self, run: Run) -> EvictionFacts:
        """See ``Describe``: of the last page of the run."""
        return EvictionFacts(
            run.path[run.end - 1],
            self.now_s,
            run.used_s,
            (run.tick << _START_BITS) - run.start,
            run.born_at,
            run.uses,
            run.end * self._page_tokens,
            self._page_tokens,
            self._page_bytes,
            False,
            run.last,
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are here. O(runs of the path)."""
        self._walked = (blocks, self._walk(blocks, len(blocks)))
        return self._walked[1][1]

    def _walk(self, blocks: Sequence[int], pages: int) -> tuple[Run, int, list[Run]]:
        """The deepest run that is wholly in ``blocks[:pages]``, the end of what is here of them, and the runs from the
        root's child to that one. A run that is partly in it is not among them."""
        run, here, path = self._root, 0, list[Run]()
        while here < pages and (child := run.children.get(blocks[here])) is not None:
            end = child.end
            if end > pages or child.path[end - 1] != blocks[end - 1]:
                return run, _common(child.path, blocks, here + 1, min(end, pages)), path
            run, here = child, end
            path.append(child)
        return run, here, path

    def use(self, blocks: Sequence[int], pages: int, request: RequestFacts | None, *, reads_from: int = 0) -> int:
        """A request uses the first ``pages`` blocks: those that are here are used again, the others come in, as far as
        there is room besides the path. Pages that are here from ``reads_from`` on are read. Returns how many came in.
        """
        self._tick += 1
        walked, found = self._walked
        run, here, path = found if walked is blocks and found[1] <= pages else self._walk(blocks, pages)
        self._walked = ((), found)
        if run.end < here:
            run = self._split(run.children[blocks[run.end]], here)
            path.append(run)
        self._note_use(path, request)
        if reads_from < here:
            self._note_reads(path, reads_from)
        return self._extend(run, blocks, pages, request)

    def _note_use(self, path: list[Run], request: RequestFacts | None) -> None:
        tick, now_s = self._tick, self.now_s
        if self._watches_use:
            for run in path:
                self._policy.used(run)
        for run in path:
            run.tick = tick
            run.used_s = now_s
            run.uses += 1
            run.last = request

    def _note_reads(self, path: list[Run], start: int) -> None:
        for run in path:
            if run.end > start:
                run.reads += 1
                self.counts.read += run.end - max(run.start, start)

    def _extend(self, run: Run, blocks: Sequence[int], pages: int, request: RequestFacts | None) -> int:
        missing = pages - run.end
        if missing <= 0:
            return 0
        if self.capacity_pages is not None and self.resident_pages + missing > self.capacity_pages:
            self._make_room(missing)
            missing = min(missing, self.capacity_pages - self.resident_pages)
        end = run.end + missing
        step = self._run_pages_max or missing
        for start in range(run.end, end, step or 1):
            run = self._append(run, blocks, start, min(start + step, end), request)
        self.counts.written += missing
        self.resident_pages += missing
        return missing

    def _append(self, parent: Run, blocks: Sequence[int], start: int, end: int, request: RequestFacts | None) -> Run:
        run = Run(parent, blocks, start, end)
        self._births += 1
        run.born_at = self._births
        run.tick, run.used_s, run.last = self._tick, self.now_s, request
        parent.children[blocks[start]] = run
        self._policy.add(run)
        return run

    def _split(self, tail: Run, middle: int) -> Run:
        """Take the pages before ``middle`` out of a run, as a run of their own, which is returned."""
        assert tail.start < middle < tail.end, (tail.start, middle, tail.end)
        parent = tail.parent
        assert parent is not None, "the root is not split"
        head = Run(parent, tail.path, tail.start, middle)
        head.tick, head.used_s, head.born_at = tail.tick, tail.used_s, tail.born_at
        head.uses, head.reads, head.last = tail.uses, tail.reads, tail.last
        head.children[tail.path[middle]] = tail
        parent.children[tail.path[tail.start]] = head
        tail.parent, tail.start = head, middle
        self._policy.add(head)
        return head

    # -- eviction ----------------------------------------------------------------------------------------------------

    def _make_room(self, pages: int) -> None:
        """Evict until there is room for ``pages``, or nothing is left that may go."""
        assert self.capacity_pages is not None
        policy, in_use = self._policy, list[Run]()
        while (short := self.resident_pages + pages - self.capacity_pages) > 0 and (run := policy.first()) is not None:
            if run.tick == self._tick:
                policy.remove(run)
                in_use.append(run)
            elif run.children:
                policy.remove(run)
                run.is_parked = True
            elif run.end - run.start > short:
                self._trim(run, short)
            else:
                policy.pop()
                self._drop(run)
        for run in in_use:
            policy.add(run)

    def expire(self) -> None:
        """Let go what the policy does not want to keep, though there is room."""
        while (run := self._policy.expired(self.now_s)) is not None:
            self._walked = ((), self._walked[1])
            if run.children:
                self._policy.remove(run)
                run.is_parked = True
            else:
                self._policy.pop()
                self.counts.expired += run.end - run.start
                self._drop(run)

    def _trim(self, run: Run, pages: int) -> None:
        """The last ``pages`` of a run leave."""
        end = run.end
        run.end = end - pages
        self.resident_pages -= pages
        self.counts.evicted += pages
        if not run.reads:
            self.counts.never_read += pages
        if self.gone is not None:
            self.gone.append(Gone(run.path, run.end, end))

    def _drop(self, run: Run) -> None:
        parent = run.parent
        assert parent is not None, "the root does not go"
        assert not run.children, "children go before parents"
        self._trim(run, run.end - run.start)
        del parent.children[run.path[run.start]]
        if not parent.children and parent.is_parked:
            parent.is_parked = False
            self._policy.add(parent)

    # -- what is asked from outside ----------------------------------------------------------------------------------

    def victim(self) -> EvictionFacts | None:
        """Of the page that would leave for another one; None while there is room."""
        if self.capacity_pages is None or self.resident_pages < self.capacity_pages:
            return None
        run = self._policy.first()
        return None if run is None else self.facts(run)

    def pages_unread(self) -> int:
        """Pages that are here and were never read from this tier."""
        return sum(run.end - run.start for run in self.runs() if not run.reads)

    def runs(self) -> Iterator[Run]:
        """All runs, parents before children."""
        stack = list(self._root.children.values())
        while stack:
            run = stack.pop()
            yield run
            stack += run.children.values()

    def check(self) -> None:
        """Assert what must hold between requests. O(all that is here)."""
        counts, pages = self.counts, 0
        for run in self.runs():
            pages += run.end - run.start
            assert run.start < run.end, "no run is empty"
            assert run.parent is not None, "only the root has no parent"
            assert run.parent.end == run.start, "no page is here without the one before it"
            if run.parent is not self._root:
                assert run.parent.path[run.start - 1] == run.path[run.start - 1], "ids name whole prefixes"
                assert run.parent.tick >= run.tick, "a parent is used whenever its child is"
            assert run.is_parked != (run in self._policy), "each item waits to be evicted, or is parked"
            assert run.children or not run.is_parked, "nothing is parked with nothing below it"
            assert all(run.path[run.end - 1] == child.path[run.end - 1] for child in run.children.values())
        assert pages == self.resident_pages == counts.written - counts.evicted, "bytes in - bytes out = resident"
        assert self.capacity_pages is None or pages <= self.capacity_pages, "what is full takes no more"


def _common(some: Sequence[int], others: Sequence[int], first: int, end: int) -> int:
    """Up to where two paths are the same, of which ``first`` pages are and ``end`` are not. Ids name whole prefixes."""
    if some[end - 1] == others[end - 1]:
        return end
    differs: Callable[[int], bool] = lambda page: some[page] != others[page]  # noqa: E731
    return bisect_left(range(end), x=True, lo=first, hi=end, key=differs)
