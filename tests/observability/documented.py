"""What docs/metrics.md lists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def documented_metrics(section: str) -> dict[str, tuple[str, ...]]:
    """The labels of every metric in the first table of a section, by name as Prometheus has it."""
    body = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*)\|", body.split("\n### ")[0], flags=re.MULTILINE)
    return {name: tuple(label.strip() for label in labels.split(",") if label.strip()) for name, labels in rows}
