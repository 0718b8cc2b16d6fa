"""What kind of object a key stands for, as far as its namespace says: attention, window, state or other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from hicache.keys import FieldValue, page_of_object

OTHER = "other"
GROUPS_MAX = 64  # of a namespace; what is beyond is other


def classes_of(descriptor: Mapping[str, FieldValue]) -> tuple[str, ...]:
    """The class of each group of a namespace, by its index. A descriptor is a client's: whatever it lacks is other."""
    classes = []
    for index in range(GROUPS_MAX):
        kind = descriptor.get(f"group.{index}.kind")
        if kind is None:
            break
        is_window = descriptor.get(f"group.{index}.window_tokens") is not None
        classes.append({"state": "state", "paged": "window" if is_window else "attention"}.get(str(kind), OTHER))
    return tuple(classes)


def count_classes(keys: Iterable[bytes], classes: tuple[str, ...]) -> Counter[str]:
    """How many of the keys, all longer than their suffix, are of which class."""
    groups = Counter(page_of_object(key)[1] for key in keys)
    counts: Counter[str] = Counter()
    for group, count in groups.items():
        counts[classes[group] if group < len(classes) else OTHER] += count
    return counts
