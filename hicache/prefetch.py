"""The prefetcher: plans what L3 shall bring of a prompt into L2, and keeps account of every token found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hicache.directory_config import DirectoryConfig
from hicache.fetches import Fetches
from hicache.index import Index
from hicache.jobbook import JobBook, Outcomes
from hicache.jobs import LookupItem, LookupJob
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.prefetch_record import Lookup, Part, Prefetch
from hicache.read_admission import Offer, ReadAdmission
from hicache.stats import DirectoryStats

EARLIER_STOP_BYTES_SHARE = 1 / 8  # of a plan: what having an earlier legal stop may cost on top


class Prefetcher:
    """Looks up, plans over all groups and tiers, and plans anew when some of what is fetched fails. L3 is not asked for
    what would not be fetched though it had all of it.

    What one request is fetching is not fetched for another, which waits for it as for what it fetches itself. A plan
    waits only for plans that were made before it, so they cannot wait for each other in a circle.
    """

    def __init__(
        self, index: Index, jobs: JobBook, config: DirectoryConfig, stats: DirectoryStats, admission: ReadAdmission
    ) -> None:
        self._index = index
        self._admission = admission
        self._jobs = jobs
        self._config = config
        self._stats = stats
        self._group_count = len(index.pools[Tier.L2])
        self.fetches = Fetches(index, jobs, stats, admission, l2_share=config.prefetch_l2_share, on_arrival=self._go_on)

    def start(self, keys: Sequence[bytes], *, own: int = 0, patience_s: float = math.inf) -> Prefetch:
        """Begin for a prompt with these restorable pages. The result may be settled at once, with nothing to gain.

        ``own``: so many leading pages the engine has itself; nothing of them is looked up or fetched.
        ``patience_s``: the request will not wait longer.
        """
        prefetch = Prefetch(keys, remote=[0] * len(keys), own_pages=own)
        prefetch.patient_until_s = self._index.now_s + patience_s
        local = max(own, self._index.match(keys, own=own))
        if (reason := self._reason_to_decline(len(keys), local)) is not None:
            self._decline(prefetch, reason)
            return prefetch
        nodes = map(self._index.nodes.get, keys)  # L3 is not asked for what is here, which may go meanwhile
        prefetch.remote = [0 if node is None else node.resident & node.in_l3 for node in nodes]
        parts = self._missing(keys, beyond=local, own=own)
        hoped = self._hoped(prefetch, local, parts)
        if (reason := self._admission.reason_to_decline(hoped)) is None:
            self._limit_patience(prefetch, hoped)
            self._look_up(prefetch, parts)
            return prefetch
        self._decline(prefetch, reason)
        if self._admission.begin_probe(hoped):
            self._look_up(self._probe_of(prefetch), parts)
        return prefetch

    def _decline(self, prefetch: Prefetch, reason: str) -> None:
        self._stats.prefetch_declined[reason] += 1
        prefetch.settled = True

    def _look_up(self, prefetch: Prefetch, parts: Sequence[Part]) -> None:
        prefetch.looking = Lookup(parts, self._index.now_s)
        items = tuple(LookupItem(group, prefetch.keys[page]) for page, group in parts)
        self._jobs.emit(
            lambda job_id: LookupJob(job_id, items), lambda outcomes: self._looked_up(prefetch, parts, outcomes)
        )

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
        if reason == "late":
            self._give_up(prefetch)
        promised = prefetch.planned_pages - prefetch.base_pages
        used = min(max(used_pages - prefetch.base_pages, 0), promised)
        if not prefetch.settled:
            reason = "late"
        elif prefetch.fault is not None:
            reason = prefetch.fault.name.lower()
        self._stats.prefetch_in_flight -= promised * self._index.page_tokens
        self._stats.prefetch_used += used * self._index.page_tokens
        self._drop(promised - used, reason)
        self.fetches.let_go(prefetch)

    def _give_up(self, prefetch: Prefetch) -> None:
        """What has not come until now tells how fast L3 is."""
        if (looking := prefetch.looking) is not None:
            looking.is_counted = self._admission.give_up_lookup(len(looking.parts), looking.asked_s)
        if prefetch.fetching is not None:
            tokens = self._index.page_tokens
            gain = (prefetch.base_pages * tokens, prefetch.planned_pages * tokens)
            self._admission.give_up(prefetch.fetching, gain_tokens=gain)

    def _reason_to_decline(self, page_count: int, local: int) -> str | None:
        if not self._config.has_l3:
            return "no_l3"
        if page_count == local:
            return "nothing_to_gain"
        if (page_count - local) * self._index.page_tokens < self._config.prefetch_threshold_tokens:
            return "below_threshold"
        return None

    def _missing(self, keys: Sequence[bytes], *, beyond: int, own: int) -> list[Part]:
        """Objects not resident here that some boundary after ``beyond`` pages needs."""
        rule = self._index.rule
        firsts = [rule.first_needed(group, beyond + 1) for group in range(self._group_count)]
        parts: list[Part] = []
        for page in range(own, len(keys)):
            resident = self._index.resident(keys[page])
            parts += [
                (page, group) for group, first in enumerate(firsts) if page >= first and not resident >> group & 1
            ]
        return parts

    def _looked_up(self, prefetch: Prefetch, parts: Sequence[Part], outcomes: Outcomes) -> None:
        assert prefetch.looking is not None, "asked once, and answered once"
        if not prefetch.looking.is_counted:
            self._admission.answered(len(parts), prefetch.looking.asked_s, set(outcomes))
        prefetch.looking = None
        self._stats.count("lookup", (group for _, group in parts), outcomes)
        if prefetch.concluded and not prefetch.is_probe:
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
        if prefetch.is_probe:
            self._fetch_probe(prefetch)
        else:
            self._plan(prefetch)

    def _plan(self, prefetch: Prefetch) -> None:
        """Choose the longest prefix over all tiers, cut it to what L2 has room for, and fetch what it lacks."""
        base, stops, local = self._prospects(prefetch)
        found = stops[-1] if stops else base
        worth = self._worth(prefetch, base, stops, local)
        wanted = worth[-1] if worth else base
        prefetch.base_pages = base
        prefetch.planned_pages = max(base, self._fetch_longest(prefetch, worth, local))
        self._stats.prefetch_found += (found - base) * self._index.page_tokens
        if unreachable := sum(there.bit_count() for there in prefetch.remote[found:]):
            self._stats.skipped["lookup.unreachable"] += unreachable
        self._stats.prefetch_in_flight += (prefetch.planned_pages - base) * self._index.page_tokens
        self._drop(found - wanted, "faster_computed")
        self._drop(wanted - prefetch.planned_pages, "no_host_capacity")
        if wanted < found and self._admission.begin_probe(self._offer(prefetch, base, stops, local)):
            self._fetch_probe(self._probe_of(prefetch))

    def _offer(self, prefetch: Prefetch, base: int, stops: list[int], local: list[int]) -> Offer:
        expected = self._expected(prefetch, local)

        def bytes_until(stop: int) -> int:
            return self.fetches.size_bytes(
                [(page, g) for page, g in self._index.rule.needed(stop) if not expected[page] >> g & 1]
            )

        patience_s = max(0.0, prefetch.patient_until_s - self._index.now_s)
        full = self._index.rule.full_mask
        here = next((page for page, mask in enumerate(expected) if mask & full != full), len(expected))
        return Offer(base, stops, len(prefetch.keys), bytes_until, patience_s, here_pages=here)

    def _hoped(self, prefetch: Prefetch, local: int, parts: Sequence[Part]) -> Offer:
        """What L3 has of a prompt at best: all of ``parts``, which are missing."""
        coming = self.fetches.is_coming
        missing = [part for part in parts if not coming(prefetch, part)]

        def bytes_until(stop: int) -> int:
            firsts = [self._index.rule.first_needed(group, stop) for group in range(self._group_count)]
            return self.fetches.size_bytes([(page, g) for page, g in missing if firsts[g] <= page < stop])

        pages = len(prefetch.keys)
        here = min((page for page, group in missing if self._index.rule.full_mask >> group & 1), default=pages)
        stops = [here, pages] if local < here < pages else [pages]
        patience_s = max(0.0, prefetch.patient_until_s - self._index.now_s)
        return Offer(local, stops, pages, bytes_until, patience_s, here_pages=here, lookup_objects=len(parts))

    def _worth(self, prefetch: Prefetch, base: int, stops: list[int], local: list[int]) -> list[int]:
        """The leading ones of ``stops`` that the read policy wants, and with it how long to wait for them."""
        offer = self._offer(prefetch, base, stops, local)
        worth = self._admission.worth(offer)
        if worth:
            self._limit_patience(prefetch, replace(offer, stops=worth))
        return worth

    def _limit_patience(self, prefetch: Prefetch, offer: Offer) -> None:
        prefetch.give_up_at_s = self._index.now_s + self._admission.patience_s(offer)

    def _probe_of(self, declined: Prefetch) -> Prefetch:
        """A prefetch for nobody."""
        keys, own = declined.keys, declined.own_pages
        self._stats.prefetch_probes += 1
        return Prefetch(keys, list(declined.remote), own_pages=own, concluded=True, is_probe=True)

    def _fetch_probe(self, probe: Prefetch) -> None:
        """Fetch of what L3 has as many of the first pages as are of interest, and have room."""
        base, stops, local = self._prospects(probe)
        parts: list[Part] = []
        if stops:
            parts = [
                part
                for part in sorted(self._index.rule.needed(stops[-1]))
                if not (self._here(probe, part[0]) >> part[1] & 1 or self.fetches.is_coming(probe, part))
            ]
        if parts:
            pages = self._admission.probe_pages(self._offer(probe, base, stops, local))
            parts = self._of_first_pages(parts, pages)
        if not parts or not self.fetches.acquire(probe, parts):
            self._admission.end_probe()
            probe.settled = True
            return
        probe.next_page, probe.target_pages = parts[0][0], parts[-1][0] + 1
        self.fetches.begin(probe, parts)

    def _of_first_pages(self, parts: list[Part], pages: int) -> list[Part]:
        """Those of the first ``pages`` pages that have parts, or of fewer, if L2 has no room for them."""
        numbers = sorted({page for page, _ in parts})[:pages]
        while numbers:
            chosen = [part for part in parts if part[0] <= numbers[-1]]
            if self.fetches.has_room(chosen):
                return chosen
            numbers = numbers[: len(numbers) // 2]
        return []

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
        self.fetches.begin(prefetch, missing)
        return prefetch.target_pages

    def _reserve(self, prefetch: Prefetch, stops: list[int], local: list[int]) -> tuple[int, list[Part]]:
        """Room in L2 for the longest of ``stops`` that has it: its length and the parts to fetch, or ``(0, [])``.

        What the plan uses of this engine's own copies is kept, so that making room cannot break it; what is coming for
        another request takes no room, and is awaited.
        """
        budgets = [self.fetches.room(group) for group in range(self._group_count)]
        candidates = self._index.rule.fitting(stops, self._expected(prefetch, local), budgets)
        while candidates:
            stop = candidates.pop()
            keep = self._index.keep(prefetch.keys, stop)
            needed = self._index.rule.needed(stop)
            absent = [(page, group) for page, group in needed if not self._here(prefetch, page) >> group & 1]
            missing = [part for part in absent if not self.fetches.is_coming(prefetch, part)]
            if self.fetches.acquire(prefetch, missing):
                prefetch.keeps.append(keep)
                self.fetches.wait_for(prefetch, [part for part in absent if self.fetches.is_coming(prefetch, part)])
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
            and not (self._here(prefetch, page) >> group & 1 or self.fetches.is_coming(prefetch, (page, group)))
        ]
        is_cheap = self.fetches.size_bytes(parts) <= EARLIER_STOP_BYTES_SHARE * self.fetches.size_bytes(missing)
        return parts if is_cheap and self.fetches.has_room(parts) and self.fetches.acquire(prefetch, parts) else []

    def _expected(self, prefetch: Prefetch, local: list[int]) -> list[int]:
        """The masks of what is here, or coming for another request."""
        return [mask | self.fetches.coming_mask(key) for mask, key in zip(local, prefetch.keys, strict=True)]

    def _here(self, prefetch: Prefetch, page: int) -> int:
        return self._index.available(prefetch.keys, page, own=prefetch.own_pages)

    def _is_full_attention(self, part: Part) -> bool:
        """Windows and states are asked for first: without them nothing else is of use."""
        return bool(self._index.rule.full_mask >> part[1] & 1)

    def _go_on(self, first: Prefetch) -> None:
        """Publish what has arrived, and settle or plan anew when that is all; then so with those that wait for it."""
        going = [first]
        while going:
            prefetch = going.pop()
            if prefetch.settled:
                continue
            going += self.fetches.publish_in_order(prefetch)
            if len(prefetch.arrived) < len(prefetch.handles) or prefetch.awaited:
                continue
            has_failed = prefetch.has_missed or not all(outcome.is_ok for outcome in prefetch.arrived.values())
            if has_failed and prefetch.replans_left and not prefetch.concluded:
                self._replan(prefetch)
            else:
                prefetch.settled = True

    def _drop(self, pages: int, reason: str) -> None:
        if pages:
            self._stats.prefetch_dropped[reason] += pages * self._index.page_tokens
