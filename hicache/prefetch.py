"""The prefetcher: brings what L3 has of a prompt into L2, in page order, and keeps account of every token found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hicache.index import Index
from hicache.jobbook import JobBook, Outcomes, batches
from hicache.jobs import FetchJob, LookupItem, LookupJob, TransferItem
from hicache.node import Node, Tier
from hicache.outcome import Outcome
from hicache.prefetch_record import Part, Prefetch
from hicache.read_admission import Offer, ReadAdmission
from hicache.slots import slot_of
from hicache.stats import DirectoryStats

EARLIER_STOP_BYTES_SHARE = 1 / 8  # of a plan: what having an earlier legal stop may cost on top


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """Bounds of the way up. ``l2_share`` is the part of each L2 pool that prefetches may hold at a time: what is
    arriving, and what has arrived and waits for its request to load it."""

    has_l3: bool
    page_tokens: int
    threshold_tokens: int = 256
    l2_share: float = 0.5
    job_items_max: int = 16


class Prefetcher:
    """Looks up, plans over all groups and tiers, fetches, and publishes page by page; plans anew when some of it fails.

    A page is published in L2 when every object of it that was asked for is settled and its full-attention objects are
    there; a page after one that failed is not published, since it could not be reached.

    What one request is fetching is not fetched for another, which waits for it as for what it fetches itself. A plan
    waits only for plans that were made before it, so they cannot wait for each other in a circle.
    """

    def __init__(
        self, index: Index, jobs: JobBook, limits: PrefetchLimits, stats: DirectoryStats, admission: ReadAdmission
    ) -> None:
        self._index = index
        self._admission = admission
        self._jobs = jobs
        self._limits = limits
        self._stats = stats
        self._held = [0] * len(index.pools[Tier.L2])  # L2 slots that prefetches hold, by group
        self._coming: dict[tuple[bytes, int], list[Prefetch]] = {}  # (key, group) being fetched: who else waits for it

    def start(self, keys: Sequence[bytes], *, own: int = 0, patience_s: float = math.inf) -> Prefetch:
        """Begin for a prompt with these restorable pages. The result may be settled at once, with nothing to gain.

        ``own``: so many leading pages the engine has itself; nothing of them is looked up or fetched.
        ``patience_s``: the request will not wait longer.
        """
        prefetch = Prefetch(keys, remote=[0] * len(keys), own_pages=own)
        prefetch.patient_until_s = self._index.now_s + patience_s
        local = max(own, self._index.match(keys, own=own))
        reason = self._reason_to_decline(len(keys), local)
        if reason is not None:
            self._stats.prefetch_declined[reason] += 1
            prefetch.settled = True
            return prefetch
        nodes = map(self._index.nodes.get, keys)  # L3 is not asked for what is here, which may go meanwhile
        prefetch.remote = [0 if node is None else node.resident & node.in_l3 for node in nodes]
        parts = self._missing(keys, beyond=local, own=own)
        self._limit_patience(prefetch, Offer(local, [len(keys)], len(keys), lambda stop: 0, patience_s))
        items = tuple(LookupItem(group, keys[page]) for page, group in parts)
        self._jobs.emit(
            lambda job_id: LookupJob(job_id, items),
            lambda outcomes: self._looked_up(prefetch, parts, outcomes),
        )
        return prefetch

    def known_pages(self, prefetch: Prefetch, resident_pages: int) -> int:
        """Leading pages whose full-attention objects are here or, as the lookup said, in L3; of the first
        ``resident_pages`` the caller knows that they are."""
        full = self._index.rule.full_mask
        pages = resident_pages
        while full and pages < len(prefetch.keys):
            if (self._index.resident(prefetch.keys[pages]) | prefetch.remote[pages]) & full != full:
                break
            pages += 1
        return pages

    def conclude(self, prefetch: Prefetch, *, used_pages: int, reason: str) -> None:
        """The request takes a prefix of ``used_pages`` and waits no longer; the rest is dropped, by ``reason``.

        What is still on its way is published when it arrives, for whoever comes next. Idempotent.
        """
        if prefetch.concluded:
            return
        prefetch.concluded = True
        if prefetch.fetching is not None and reason == "late":
            tokens = self._limits.page_tokens
            gain = (prefetch.base_pages * tokens, prefetch.planned_pages * tokens)
            self._admission.give_up(prefetch.fetching, gain_tokens=gain)
        promised = prefetch.planned_pages - prefetch.base_pages
        used = min(max(used_pages - prefetch.base_pages, 0), promised)
        if not prefetch.settled:
            reason = "late"
        elif prefetch.fault is not None:
            reason = prefetch.fault.name.lower()
        self._stats.prefetch_in_flight -= promised * self._limits.page_tokens
        self._stats.prefetch_used += used * self._limits.page_tokens
        self._drop(promised - used, reason)
        for _, group in prefetch.fetched:
            self._held[group] -= 1
        for keep in prefetch.keeps:
            self._index.let_go(keep)

    def _reason_to_decline(self, page_count: int, local: int) -> str | None:
        if not self._limits.has_l3:
            return "no_l3"
        if page_count == local:
            return "nothing_to_gain"
        if (page_count - local) * self._limits.page_tokens < self._limits.threshold_tokens:
            return "below_threshold"
        return None

    def _missing(self, keys: Sequence[bytes], *, beyond: int, own: int) -> list[Part]:
        """Objects not resident here that some boundary after ``beyond`` pages needs."""
        rule = self._index.rule
        firsts = [rule.first_needed(group, beyond + 1) for group in range(len(self._held))]
        parts: list[Part] = []
        for page in range(own, len(keys)):
            resident = self._index.resident(keys[page])
            parts += [
                (page, group) for group, first in enumerate(firsts) if page >= first and not resident >> group & 1
            ]
        return parts

    def _looked_up(self, prefetch: Prefetch, parts: Sequence[Part], outcomes: Outcomes) -> None:
        self._stats.count("lookup", (group for _, group in parts), outcomes)
        if prefetch.concluded:
            prefetch.settled = True
            return
        for (page, group), outcome in zip(parts, outcomes, strict=True):
            if outcome.is_ok:
                prefetch.remote[page] |= 1 << group
            elif outcome is Outcome.ABSENT:
                node = self._index.nodes.get(prefetch.keys[page])
                if node is not None:
                    self._index.gone_from_l3(node, 1 << group)
            else:
                prefetch.fault = prefetch.fault or outcome
        self._plan(prefetch)

    def _plan(self, prefetch: Prefetch) -> None:
        """Choose the longest prefix over all tiers, cut it to what L2 has room for, and fetch what it lacks."""
        base, stops, local = self._prospects(prefetch)
        found = stops[-1] if stops else base
        worth = self._worth(prefetch, base, stops, local)
        wanted = worth[-1] if worth else base
        prefetch.base_pages = base
        prefetch.planned_pages = max(base, self._fetch_longest(prefetch, worth, local))
        self._stats.prefetch_found += (found - base) * self._limits.page_tokens
        if unreachable := sum(there.bit_count() for there in prefetch.remote[found:]):
            self._stats.skipped["lookup.unreachable"] += unreachable
        self._stats.prefetch_in_flight += (prefetch.planned_pages - base) * self._limits.page_tokens
        self._drop(found - wanted, "faster_computed")
        self._drop(wanted - prefetch.planned_pages, "no_host_capacity")
        if wanted < found:
            self._probe(prefetch, self._offer(prefetch, base, stops, local))

    def _offer(self, prefetch: Prefetch, base: int, stops: list[int], local: list[int]) -> Offer:
        expected = self._expected(prefetch, local)

        def bytes_until(stop: int) -> int:
            return self._bytes([(page, g) for page, g in self._index.rule.needed(stop) if not expected[page] >> g & 1])

        patience_s = max(0.0, prefetch.patient_until_s - self._index.now_s)
        return Offer(base, stops, len(prefetch.keys), bytes_until, patience_s)

    def _worth(self, prefetch: Prefetch, base: int, stops: list[int], local: list[int]) -> list[int]:
        """The leading ones of ``stops`` that the read policy wants, and with it how long to wait for them."""
        offer = self._offer(prefetch, base, stops, local)
        worth = self._admission.worth(offer)
        if worth:
            self._limit_patience(prefetch, replace(offer, stops=worth))
        return worth

    def _limit_patience(self, prefetch: Prefetch, offer: Offer) -> None:
        prefetch.give_up_at_s = self._index.now_s + self._admission.patience_s(offer)

    def _probe(self, declined: Prefetch, offer: Offer) -> None:
        """Fetch a few pages of what was declined for nobody."""
        pages = self._admission.probe_pages(offer)
        if not pages:
            return
        parts = [
            part
            for part in sorted(self._index.rule.needed(offer.stops[-1]))
            if not (self._here(declined, part[0]) >> part[1] & 1 or self._is_coming(declined, part))
        ]
        chosen = sorted({page for page, _ in parts})[:pages]
        parts = [part for part in parts if chosen[0] <= part[0] <= chosen[-1]] if chosen else []
        probe = Prefetch(declined.keys, list(declined.remote), own_pages=declined.own_pages, concluded=True)
        if not parts or not self._has_budget(parts) or not self._acquire(probe, parts):
            return
        self._stats.prefetch_probes += 1
        probe.next_page, probe.target_pages = chosen[0], chosen[-1] + 1
        self._fetch_all(probe, parts, is_probe=True)

    def _replan(self, prefetch: Prefetch) -> None:
        """Some of it failed: fetch what the longest prefix without that lacks, such as an earlier snapshot."""
        prefetch.replans_left -= 1
        prefetch.handles.clear()
        prefetch.arrived.clear()
        base, stops, local = self._prospects(prefetch)
        stops = [stop for stop in stops if stop <= prefetch.planned_pages]
        self._fetch_longest(prefetch, self._worth(prefetch, base, stops, local), local)

    def _prospects(self, prefetch: Prefetch) -> tuple[int, list[int], list[int]]:
        """The usable prefix without L3, the legal stops beyond it with L3, and the masks of what is resident."""
        local = [self._here(prefetch, page) for page in range(len(prefetch.keys))]
        base = self._index.rule.usable(local)
        stops = self._index.rule.legal_stops(here | there for here, there in zip(local, prefetch.remote, strict=True))
        return base, [stop for stop in stops if stop > base], local

    def _fetch_longest(self, prefetch: Prefetch, stops: list[int], local: list[int]) -> int:
        """Fetch for the longest of ``stops`` that L2 has room for, and return it; 0, and settled, without one."""
        prefetch.next_page = 0
        prefetch.has_missed = False
        prefetch.target_pages, missing = self._reserve(prefetch, stops, local)
        prefetch.settled = not missing and not prefetch.awaited
        self._fetch_all(prefetch, missing)
        return prefetch.target_pages

    def _fetch_all(self, prefetch: Prefetch, parts: Sequence[Part], *, is_probe: bool = False) -> None:
        if not parts:
            return
        prefetch.fetching = self._admission.begin(self._bytes(parts), is_probe=is_probe)
        for batch in batches(parts, self._limits.job_items_max):
            self._fetch(prefetch, batch)

    def _reserve(self, prefetch: Prefetch, stops: list[int], local: list[int]) -> tuple[int, list[Part]]:
        """Room in L2 for the longest of ``stops`` that has it: its length and the parts to fetch, or ``(0, [])``.

        What the plan uses of this engine's own copies is kept, so that making room cannot break it; what is coming for
        another request takes no room, and is awaited.
        """
        budgets = [self._budget(group) for group in range(len(self._held))]
        candidates = self._index.rule.fitting(stops, self._expected(prefetch, local), budgets)
        while candidates:
            stop = candidates.pop()
            keep = self._index.keep(prefetch.keys, stop)
            needed = self._index.rule.needed(stop)
            absent = [(page, group) for page, group in needed if not self._here(prefetch, page) >> group & 1]
            missing = [part for part in absent if not self._is_coming(prefetch, part)]
            if self._acquire(prefetch, missing):
                prefetch.keeps.append(keep)
                self._await(prefetch, [part for part in absent if self._is_coming(prefetch, part)])
                missing += self._add_earlier_stop(prefetch, stops, stop, missing)
                return stop, sorted(missing, key=self._is_full_attention)
            self._index.let_go(keep)
            del candidates[len(candidates) * 3 // 4 :]  # few attempts, and no more than a quarter too short
        return 0, []

    def _add_earlier_stop(self, prefetch: Prefetch, stops: list[int], stop: int, missing: list[Part]) -> list[Part]:
        """Room for the windows and states of a legal stop before ``stop`` as well, and what is missing of them.

        When the time is over before everything has arrived, what has is of use up to there. It is the stop next to the
        middle of what the plan brings, if it costs little beside that.
        """
        earlier = [other for other in stops if other < stop]
        if not earlier or not missing:
            return []
        middle = (missing[0][0] + stop) / 2
        nearest = min(earlier, key=lambda other: abs(other - middle))
        planned = set(missing)
        parts = [
            (page, group)
            for page, group in self._index.rule.needed_partial(nearest)
            if (page, group) not in planned
            and not (self._here(prefetch, page) >> group & 1 or self._is_coming(prefetch, (page, group)))
        ]
        is_cheap = self._bytes(parts) <= EARLIER_STOP_BYTES_SHARE * self._bytes(missing)
        return parts if is_cheap and self._has_budget(parts) and self._acquire(prefetch, parts) else []

    def _has_budget(self, parts: Sequence[Part]) -> bool:
        return all(sum(g == group for _, g in parts) <= self._budget(group) for group in range(len(self._held)))

    def _expected(self, prefetch: Prefetch, local: list[int]) -> list[int]:
        """The masks of what is here, or coming for another request."""
        return [mask | self._coming_mask(key) for mask, key in zip(local, prefetch.keys, strict=True)]

    def _here(self, prefetch: Prefetch, page: int) -> int:
        return self._index.available(prefetch.keys, page, own=prefetch.own_pages)

    def _is_coming(self, prefetch: Prefetch, part: Part) -> bool:
        return (prefetch.keys[part[0]], part[1]) in self._coming

    def _coming_mask(self, key: bytes) -> int:
        if not self._coming:
            return 0
        return sum(1 << group for group in range(len(self._held)) if (key, group) in self._coming)

    def _await(self, prefetch: Prefetch, parts: Sequence[Part]) -> None:
        prefetch.awaited.update(parts)
        for page, group in parts:
            self._coming[prefetch.keys[page], group].append(prefetch)

    def _bytes(self, parts: Sequence[Part]) -> int:
        return sum(self._stats.object_bytes[group] for _, group in parts)

    def _is_full_attention(self, part: Part) -> bool:
        """Windows and states are asked for first: without them nothing else is of use."""
        return bool(self._index.rule.full_mask >> part[1] & 1)

    def _budget(self, group: int) -> int:
        capacity = self._index.pools[Tier.L2][group].capacity
        share = max(1, int(self._limits.l2_share * capacity)) - self._held[group]
        return min(share, self._index.room(Tier.L2, group))

    def _acquire(self, prefetch: Prefetch, parts: Sequence[Part]) -> bool:
        taken: dict[Part, int] = {}
        for group in range(len(self._held)):
            wanted = [part for part in parts if part[1] == group]
            handles = self._index.acquire(Tier.L2, group, len(wanted), patient=True)
            if handles is None:
                for (_, taken_group), handle in taken.items():
                    self._index.release(Tier.L2, taken_group, [handle])
                return False
            taken.update(zip(wanted, handles, strict=True))
        prefetch.handles |= taken
        for _, group in parts:
            self._held[group] += 1
        return True

    def _fetch(self, prefetch: Prefetch, parts: Sequence[Part]) -> None:
        items = tuple(
            TransferItem(group, prefetch.keys[page], slot_of(prefetch.handles[page, group])) for page, group in parts
        )
        self._coming.update(((prefetch.keys[page], group), []) for page, group in parts)
        self._jobs.emit(
            lambda job_id: FetchJob(job_id, items), lambda outcomes: self._fetched(prefetch, parts, outcomes)
        )

    def _fetched(self, prefetch: Prefetch, parts: Sequence[Part], outcomes: Outcomes) -> None:
        self._stats.count("fetch", (group for _, group in parts), outcomes)
        for part, outcome in zip(parts, outcomes, strict=True):
            prefetch.arrived[part] = outcome
            if not outcome.is_ok:
                prefetch.fault = prefetch.fault or outcome
                prefetch.remote[part[0]] &= ~(1 << part[1])
        self._admission.arrived(self._bytes(parts))
        if len(prefetch.arrived) == len(prefetch.handles) and prefetch.fetching is not None:
            self._admission.end(prefetch.fetching, set(prefetch.arrived.values()))
            prefetch.fetching = None
        self._go_on(prefetch)

    def _go_on(self, first: Prefetch) -> None:
        """Publish what has arrived, and settle or plan anew when that is all; then so with those that wait for it."""
        going = [first]
        while going:
            prefetch = going.pop()
            if prefetch.settled:
                continue
            going += self._publish_in_order(prefetch)
            if len(prefetch.arrived) < len(prefetch.handles) or prefetch.awaited:
                continue
            has_failed = prefetch.has_missed or not all(outcome.is_ok for outcome in prefetch.arrived.values())
            if has_failed and prefetch.replans_left and not prefetch.concluded:
                self._replan(prefetch)
            else:
                prefetch.settled = True

    def _publish_in_order(self, prefetch: Prefetch) -> list[Prefetch]:
        """Returns those that have waited for something that was published, or will not be."""
        told: list[Prefetch] = []
        while prefetch.next_page < prefetch.target_pages:
            page = prefetch.next_page
            all_parts = [(page, group) for group in range(len(self._held))]
            parts = [part for part in all_parts if part in prefetch.handles]
            if any(part not in prefetch.arrived for part in parts) or not prefetch.awaited.isdisjoint(all_parts):
                break
            if parts:
                self._publish_page(prefetch, page, parts)
                told += [waiting for part in parts for waiting in self._share(prefetch, part)]
            prefetch.next_page += 1
        return told

    def _share(self, prefetch: Prefetch, part: Part) -> list[Prefetch]:
        """A part that was being fetched is here, or has failed: give it to those that wait for it."""
        page, group = part
        key = prefetch.keys[page]
        node = self._index.nodes.get(key)
        entry = None if node is None else node.nearest(group)
        waiting = self._coming.pop((key, group))
        for other in waiting:
            other.awaited.discard(part)
            if entry is None:
                other.has_missed = True
            elif not other.concluded:
                other.shared.add(part)
                other.keeps[-1].entries.append(self._index.pin(entry))
        return waiting

    def _publish_page(self, prefetch: Prefetch, page: int, parts: Sequence[Part]) -> None:
        good = [part for part in parts if prefetch.arrived[part].is_ok]
        node = self._reachable_node(prefetch, page, good)
        for part in parts:
            group, handle = part[1], prefetch.handles[part]
            if node is None or part not in good or node.entries[Tier.L2][group] is not None:
                self._held[group] -= 1
                self._index.release(Tier.L2, group, [handle])
                continue
            entry = self._index.publish(node, Tier.L2, group, handle)
            self._index.stored(node, 1 << group)
            if prefetch.concluded:
                self._held[group] -= 1
            else:
                prefetch.fetched.add(part)
                prefetch.keeps[-1].entries.append(self._index.pin(entry))

    def _reachable_node(self, prefetch: Prefetch, page: int, good: Sequence[Part]) -> Node | None:
        """The node to publish under; None when its parent, or a full-attention object of its own, is not here."""
        nodes, full = self._index.nodes, self._index.rule.full_mask
        if page > prefetch.own_pages and full:
            parent = nodes.get(prefetch.keys[page - 1])
            if parent is None or parent.resident & full != full:
                return None
        present = self._index.resident(prefetch.keys[page]) | sum(1 << group for _, group in good)
        if not good or present & full != full:
            return None
        return self._index.obtain(prefetch.keys, page)

    def _drop(self, pages: int, reason: str) -> None:
        if pages:
            self._stats.prefetch_dropped[reason] += pages * self._limits.page_tokens
