"""Faults put into the directory of an engine that owns its slots, one at a time, to see whether the walks find them.

``python -m tests.core.slot_mutants`` prints after how many steps each is found, and by which check.
"""

from __future__ import annotations

from hicache.fetches import Fetches
from hicache.index import Index
from hicache.room import Room
from hicache.slot_directory import SlotDirectory
from hicache.slot_loader import SlotLoader
from hicache.slot_saver import SlotSaver
from hicache.slot_use import SlotUse
from tests.core.mutants import Edit, mutant, tell
from tests.core.slot_walk import walk_of

SLOT_MUTANTS = (
    mutant(
        "a load does not wait for the save that reads its target",
        SlotLoader.go_on,
        "if self._use.touching(under_way.targets):",
        "if False:",
    ),
    mutant(
        "a load that waits is forgotten",
        SlotSaver._emit,
        "self._loader.go_on()",
        "pass",
    ),
    mutant(
        "a step does not wait for the saves that read its slots",
        SlotUse.touching,
        "self._jobs.get(slot, ())",
        "()",
    ),
    mutant(
        "a step that says nothing waits for nothing",
        SlotDirectory.step,
        "after = self._use.reading",
        "after = set()",
    ),
    mutant("slots of two groups are never the same", SlotUse.slot, "0 if self._one_numbering else group", "group"),
    mutant("what was promised may be evicted", SlotLoader._promise, "self._index.keep(record.keys, pages)", "Keep()"),
    mutant("a promise is kept for ever", SlotLoader.expire, "self.forget(record)", "self._promised.pop(record)"),
    mutant("a load takes what has failed", SlotLoader._longest, "masks[page] &= ~(1 << group)", "pass"),
    mutant(
        "a load that failed is taken for whole",
        SlotLoader._copied,
        "load.failed = bool(failed)",
        "load.failed = False",
    ),
    mutant(
        "what a load reads may be evicted",
        SlotLoader.load,
        "keep = self._index.keep(record.keys, pages)",
        "keep = Keep()",
    ),
    mutant("a load keeps what it has read for ever", SlotLoader._copied, "self._index.let_go(under_way.keep)", "pass"),
    mutant(
        "a load leaves its targets busy",
        SlotLoader._copied,
        "self._use.end(under_way.job_id, under_way.targets)",
        "pass",
    ),
    mutant(
        "a load takes a window for the engine's own that it has not",
        SlotLoader._parts,
        "max(own, rule.first_needed(group, pages))",
        "max(own, rule.first_needed(group, pages) + 1)",
    ),
    mutant(
        "a prefetch that is over keeps its share", SlotLoader.conclude, "if record.prefetch is not None:", "if False:"
    ),
    mutant(
        "the engine's own pages are fetched all the same",
        Index.available,
        "self.rule.all_mask if page < own else self.resident(keys[page])",
        "self.resident(keys[page])",
    ),
    mutant(
        "what comes after the engine's own pages is not published",
        Fetches._reachable_node,
        "if page > prefetch.own_pages and full:",
        "if page and full:",
    ),
    mutant(
        "a save copies what is below already", SlotSaver._prepare, "for group in slots) & ~below", "for group in slots)"
    ),
    mutant(
        "a page is saved whose parent is nowhere",
        SlotSaver._prepare,
        " or not self._is_parent_below(record, page)",
        "",
        Edit(SlotSaver._is_reachable, "return parent is None or", "return True or"),
    ),
    mutant(
        "a state is saved without its attention",
        SlotSaver._prepare,
        "if (below | wanted) & full != full or",
        "if",
        Edit(SlotSaver._land, "(node.masks[Tier.L2] | node.in_l3 | groups) & full == full and ", ""),
    ),
    mutant("a failed copy is published in L2", SlotSaver._land, "is_whole = complete and", "is_whole ="),
    mutant(
        "a failed save keeps its slots of L2",
        SlotSaver._land,
        "self._index.release(Tier.L2, group, [target])",
        "pass",
    ),
    mutant(
        "a save without room keeps slots of other groups",
        SlotSaver._acquire,
        "self._index.release(Tier.L2, taken, [handle])",
        "pass",
    ),
    mutant("a save without room leaves its page in the way", SlotSaver._prepare, "node.copying &= ~wanted", "pass"),
    mutant("a save leaves its slots busy", SlotSaver._emit, "self._use.end(job_ids[0], sources)", "pass"),
    mutant("a save never ends", SlotSaver._emit, "save.slots -= sources", "pass"),
    mutant(
        "what L3 does not have is noted as there",
        SlotSaver._answered,
        "if outcome.is_ok and node is not None:",
        "if node:",
    ),
    mutant(
        "what is known of a path is never forgotten",
        SlotDirectory.release,
        "instead_of=record.anchor",
        "instead_of=None",
    ),
    mutant(
        "nobody is told of what leaves L2",
        Index.retract,
        "if self.changes is not None and entry.tier is Tier.L2:",
        "if False:",
    ),
    mutant(
        "nobody is told of what comes to L2",
        Index.publish,
        "if self.changes is not None and tier is Tier.L2:",
        "if False:",
    ),
    mutant("a page that goes leaves its node", Room._drop, "self._tree.prune(node)", "pass"),
    mutant(
        "a hold ends at the first page that is here",
        Index._deepest,
        "range(pages - 1 if full else -1, -1, -1)",
        "range(pages)",
    ),
)


if __name__ == "__main__":
    tell(SLOT_MUTANTS, walk_of)
