"""The directory: every decision about what is kept, loaded, published and evicted, without touching a byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hicache.costs.measured import MeasuredCosts
from hicache.directory_config import DirectoryConfig
from hicache.errors import StateNotCommitted, UsageError
from hicache.handover import Handover
from hicache.index import Index
from hicache.jobbook import JobBook, JobSide
from hicache.jobs import Completion
from hicache.loader import Load, Loader
from hicache.node import Keep, Tier
from hicache.policies.eviction import EvictionFactory
from hicache.policies.eviction_choice import lru
from hicache.policies.facts import RequestFacts
from hicache.policies.read import READ_POLICY_DEFAULT, ReadFactory, read_policy_of
from hicache.policies.snapshot import SnapshotPolicy
from hicache.policies.write import WritePolicy, WriteThrough
from hicache.prefetch import Prefetcher
from hicache.read_admission import ReadAdmission
from hicache.request import RequestRecord
from hicache.snapshots import Snapshots
from hicache.spec import CacheSpec, StateGroup
from hicache.stats import DirectoryStats, pages_by_source
from hicache.write_ahead import WriteAhead
from hicache.writer import Writer, WriterLimits


class Directory(JobSide):
    """Not thread-safe: one thread at a time. Emits jobs (``take_jobs``) and is told what became of them (``complete``).

    Slots are the same on every rank, so one decision holds for all. A request goes through ``open``, ``prefetch``,
    ``load``, ``extend`` and ``store`` as often as it likes, and ``release``, which is legal at any time after ``open``.
    """

    def __init__(
        self,
        spec: CacheSpec,
        config: DirectoryConfig,
        *,
        write_policy: WritePolicy | None = None,
        read_policy: str | ReadFactory = READ_POLICY_DEFAULT,
        snapshot_policy: SnapshotPolicy | None = None,
        eviction: EvictionFactory = lru,
    ) -> None:
        self.spec = spec
        policy = write_policy or WriteThrough()
        self.stats = DirectoryStats(spec.object_bytes)
        self.costs = MeasuredCosts()
        self.index = Index(
            spec,
            (config.l1_slots, config.l2_slots),
            l1_arena=config.l1_arena,
            has_l3=config.has_l3,
            spares_unwritten=policy.ahead_share > 0,
            lost=self.stats.tokens_lost,
            eviction=eviction,
        )
        self._jobs = JobBook(ranks=config.ranks)
        self._writer = Writer(
            self.index,
            self._jobs,
            policy,
            WriterLimits(
                any(config.l2_slots),
                config.has_l3,
                store_share=config.store_l2_share,
                confirm_interval_s=config.l3_confirm_interval_s,
            ),
            self.stats,
        )
        self._write_ahead: WriteAhead | None = None
        if policy.ahead_share and any(config.l2_slots):
            self._write_ahead = WriteAhead(self.index, self._writer, share=policy.ahead_share)
            self.index.write_ahead = self._write_ahead
        self._prefetcher = Prefetcher(
            self.index,
            self._jobs,
            config,
            self.stats,
            ReadAdmission(
                read_policy_of(read_policy, self.costs),
                self.costs,
                page_tokens=spec.page_tokens,
                now_s=lambda: self.index.now_s,
            ),
        )
        self._has_l3 = config.has_l3
        self._snapshots = Snapshots(
            spec,
            self.index,
            self._jobs,
            self._writer,
            snapshot_policy or SnapshotPolicy(),
            self.stats,
            double_buffering=config.double_buffering,
        )
        self._loader = Loader(
            spec,
            self.index,
            self._jobs,
            self._prefetcher,
            self.stats,
            double_buffering=config.double_buffering,
            by_layer=config.layerwise,
        )
        self._paged_groups = tuple(g for g, group in enumerate(spec.groups) if not isinstance(group, StateGroup))

    # -- jobs --------------------------------------------------------------------------------------------------------

    def complete(self, completion: Completion, *, rank: int = 0) -> None:
        """See ``JobSide``; what has been written down may be followed by more."""
        super().complete(completion, rank=rank)
        if self._write_ahead is not None:
            self._write_ahead.go_on()

    def step(self) -> int:
        """The number of the engine's next step: after all jobs emitted so far, and before all that follow."""
        return self._jobs.number()

    def flush(self) -> None:
        """Begin to send to L3 what the write policy has left for later. Nothing is, unless it writes back."""
        if self._write_ahead is not None and self._has_l3:
            self._write_ahead.flush()

    @property
    def is_all_written(self) -> bool:
        """Whether the write policy has left nothing for later."""
        return self._write_ahead is None or not self._has_l3 or self._write_ahead.is_all_written

    # -- a request ---------------------------------------------------------------------------------------------------

    def open(self, keys: list[bytes], *, token_count: int, now_s: float = 0.0) -> RequestRecord:
        """Match a prompt against L1 and L2 and keep what matched from eviction. ``keys``: of its full pages.

        ``now_s``, by any clock that goes forward, tells how long ago L3 was last asked about what matched.
        """
        prompt_pages = min(len(keys), max(0, token_count - 1) // self.spec.page_tokens)
        if self._jobs.has_lost:
            prompt_pages = 0
        record = RequestRecord(keys, token_count, token_count, prompt_pages, [[] for _ in self.spec.groups], {})
        pages = self.index.match(keys[:prompt_pages])
        record.keep = self.index.keep(keys, pages)
        self.index.touch(record.keep.entries)
        self.index.tell_time(now_s)
        record.facts = RequestFacts(now_s, token_count, token_count - pages * self.spec.page_tokens)
        self.index.note_use(record.keep, record.facts)
        self.index.expire()
        self._writer.confirm(self.index.path(keys, pages))
        record.local_tokens = self._tokens_by_tier(pages, record.keep)
        self.stats.requests += 1
        return record

    def prefetch(self, record: RequestRecord, *, patience_s: float = math.inf) -> None:
        """Begin to bring from L3 what would make the usable prefix longer, as far as the read policy says that it pays.
        Does nothing twice, or after the load. The request waits for ``patience_s`` at most."""
        self._check_not_released(record)
        if record.prefetch is None and not record.is_loaded:
            record.prefetch = self._prefetcher.start(record.keys[: record.prompt_pages], patience_s=patience_s)

    def tell_time(self, now_s: float) -> None:
        """By any clock that goes forward."""
        self.index.tell_time(now_s)

    def is_settled(self, record: RequestRecord) -> bool:
        """Whether waiting longer for the prefetch can bring nothing more."""
        return record.prefetch is None or record.prefetch.settled

    def load(self, record: RequestRecord, *, patient: bool = False) -> Load:
        """Choose the usable prefix over all groups and tiers, once, and bring it into L1 as one unit.

        Called again when the jobs are done: a copy that failed cuts the prefix back to an earlier legal stop. The
        live state slots then hold the snapshot of the boundary, or the empty state. ``patient``: see ``extend``.
        """
        self._check_not_released(record)
        if self._jobs.has_lost and not (record.is_loaded or record.loading):
            record.prompt_pages = 0
        return self._loader.load(record, patient=patient)

    def extend(self, record: RequestRecord, *, tokens: int, patient: bool = False) -> bool:
        """Make the page tables cover ``tokens`` tokens. False, and nothing changed, when L1 has no room.

        ``patient``: also when it has none but for what is about to be written down, which would be lost.
        """
        self._check_running(record)
        if tokens < 0:
            raise UsageError(f"tokens = {tokens}: expected 0 or more, from the start of the sequence")
        pages = -(-tokens // self.spec.page_tokens)
        taken: list[tuple[int, list[int]]] = []
        for group in self._paged_groups:
            count = max(0, pages - len(record.tables[group]))
            handles = self.index.acquire(Tier.L1, group, count, patient=patient)
            if handles is None:
                for other, others in taken:
                    self.index.release(Tier.L1, other, others)
                return False
            taken.append((group, handles))
        for group, handles in taken:
            record.tables[group] += handles
        self._keep_up()
        return True

    def append(self, record: RequestRecord, keys: Sequence[bytes], *, token_count: int) -> None:
        """The sequence has grown: ``keys`` of the pages that are full now and were not before."""
        self._check_not_released(record)
        record.keys += keys
        record.token_count = token_count

    def next_state_stop(
        self, record: RequestRecord, *, computed: int, until: int, ends_at: int | None = None
    ) -> int | None:
        """The first page boundary in ``(computed, until]`` at which the policy wants a snapshot that is not there.

        ``until`` is where the request would stop anyway, ``ends_at`` where its sequence ends, if that is known. With
        double buffering the slots are prepared in which the request can go on from there.
        """
        self._check_running(record)
        if not 0 <= computed <= until:
            raise UsageError(f"computed = {computed}, until = {until}: expected 0 <= computed <= until, in tokens")
        return self._snapshots.next_stop(record, computed=computed, until=until, ends_at=ends_at)

    def state_moved(self, record: RequestRecord) -> None:
        """Compute has been asked to read the states from their sources and to write them to the live slots.

        From now on they are read from there, and the sources are let go. Does nothing without sources.
        """
        self._check_running(record)
        self._snapshots.moved(record)

    def store(
        self, record: RequestRecord, *, computed: int, state_at: int | None, state_pending: int, donate: bool = False
    ) -> None:
        """Tokens ``[0, computed)`` are in L1: publish their full pages, and a snapshot of the live state if asked for.

        ``state_at`` says that the live state stands after exactly so many tokens, ``state_pending`` how many updates
        wait in its ring or depend on drafts. Raises StateNotCommitted, and publishes nothing, unless ``state_at`` is
        the page boundary at ``computed``, nothing is pending, and the live state cannot stand anywhere else.

        With ``donate`` the live slot itself becomes the snapshot, and the request can only be released after that.
        """
        self._check_running(record)
        self._check_computed(record, computed)
        if state_at is not None:
            self._check_committed(record, computed, state_at, state_pending)
        elif donate:
            raise UsageError("donate: the state of which boundary? Give it as state_at")
        record.computed = max(record.computed, computed)
        pages = max(record.published_pages, computed // self.spec.page_tokens)
        if pages:
            self._touch(record)  # first: as soon as a page is published, eviction may ask what it is worth
        for page in range(record.published_pages, pages):
            self._publish_page(record, page)
        record.published_pages = pages
        if self.index.rule.full_mask and record.published_pages:
            self.index.hold(record.keep, self.index.nodes[record.keys[record.published_pages - 1]])
        if state_at is not None:
            keep_state = self._snapshots.donate if donate else self._snapshots.take
            keep_state(record, state_at // self.spec.page_tokens)
        self._write(record)
        self._keep_up()

    def hand_over(self, record: RequestRecord) -> Handover:
        """Bring what the request has published to L3. Raises UsageError before its load and after its release."""
        self._check_not_released(record)
        if not record.is_loaded:
            raise UsageError("the request is not loaded: nothing of it has been stored")
        return Handover(self.index, self._writer, record.keys[: record.published_pages])

    def release(self, record: RequestRecord) -> None:
        """The request needs nothing any more. What it published stays; what is being copied stays until it is done."""
        self._check_not_released(record)
        record.released = True
        if record.prefetch is not None:
            self._prefetcher.conclude(record.prefetch, used_pages=0, reason="aborted")
        if record.published_pages and self._touch(record):
            self._write(record)
        self._snapshots.let_go(record)
        self.index.touch(record.keep.entries)
        self.index.touch_path(record.keep.path)
        self.index.let_go(record.keep)
        for group, table in enumerate(record.tables):
            self.index.release(Tier.L1, group, table)
            table.clear()
        self._keep_up()

    def _touch(self, record: RequestRecord) -> bool:
        """Tell the write policy of all pages of the request that are known, and that it has not been told of.

        Returns whether more pages may go down because of that.
        """
        first_page = record.touched_pages
        keys = record.keys[first_page:]
        record.touched_pages += len(keys)
        if not keys or not self._writer.touch(keys, first_page=first_page, request=record.facts):
            return False
        admitted = self._writer.admits(keys, first_page=first_page, request=record.facts)
        self.stats.skipped["backup.not_admitted"] += len(keys) - admitted
        return True

    def _write(self, record: RequestRecord) -> None:
        first_page = record.written_pages
        keys = record.keys[first_page : record.published_pages]
        record.written_pages += self._writer.write(keys, first_page=first_page, request=record.facts)

    def _keep_up(self) -> None:
        if self._write_ahead is not None:
            self._write_ahead.keep_up()

    def _tokens_by_tier(self, pages: int, keep: Keep) -> dict[str, int]:
        """Each page of a local prefix counts for the farthest tier that something of it lies in."""
        nodes = {entry.node for entry in keep.entries if entry.tier is Tier.L2}
        full = self.index.rule.full_mask
        if full:
            l2 = self.index.off_device_pages(keep.path) + sum(1 for node in nodes if node.masks[0] & full == full)
        else:
            farther = {node.page: "l2" for node in nodes}
            l2 = pages_by_source(pages, farther, first=self.index.rule.first_page(pages))["l2"]
        return {"l1": (pages - l2) * self.spec.page_tokens, "l2": l2 * self.spec.page_tokens}

    # -- publishing --------------------------------------------------------------------------------------------------

    def _publish_page(self, record: RequestRecord, page: int) -> None:
        for group in self._paged_groups:
            handle = record.tables[group][page]
            if handle is None:
                continue
            node = self.index.obtain(record.keys, page)
            entry = node.entries[Tier.L1][group]
            if entry is None:
                handle = self.index.pools[Tier.L1][group].hold(handle)
                entry = self.index.publish(node, Tier.L1, group, handle, request=record.facts)
            if not self.index.rule.full_mask >> group & 1:
                record.keep.entries.append(self.index.pin(entry))

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check_not_released(self, record: RequestRecord) -> None:
        if record.released:
            raise UsageError("the request has been released already")

    def _check_running(self, record: RequestRecord) -> None:
        if record.donated and not record.released:
            raise UsageError("the request has donated its state: it can only be released")
        if record.released or not record.is_loaded:
            state = "released" if record.released else "not loaded"
            raise UsageError(f"the request is {state}: extend and store come between load and release")

    def _check_computed(self, record: RequestRecord, computed: int) -> None:
        covered = [len(record.tables[group]) * self.spec.page_tokens for group in self._paged_groups]
        limit = min([record.token_count, *covered])
        if not 0 <= computed <= limit:
            raise UsageError(f"computed = {computed}: the request has tokens and pages for 0 to {limit}")

    def _check_committed(self, record: RequestRecord, computed: int, state_at: int, state_pending: int) -> None:
        if state_pending:
            raise StateNotCommitted(
                f"state_pending = {state_pending}: fold the ring into the state and settle all drafts before a snapshot"
            )
        if state_at != computed or state_at % self.spec.page_tokens:
            raise StateNotCommitted(
                f"state_at = {state_at}: a snapshot is taken where the state and all pages end,"
                f" at computed = {computed}, on a multiple of {self.spec.page_tokens} tokens"
            )
        if state_at < record.computed:
            raise StateNotCommitted(
                f"state_at = {state_at}: {record.computed} tokens are in the state already, and none can be taken back"
            )
        if record.sources and state_at != record.sources_at:
            raise StateNotCommitted(
                f"state_at = {state_at}: the state is still that of {record.sources_at} tokens, in the slot that"
                " state_source names: call state_moved after the step that wrote state_slot"
            )
