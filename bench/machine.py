"""What every benchmark says beside its figures: the machine, and all of it as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path


def machine_facts(load_before: float) -> dict[str, object]:
    """``load_before`` is the load average when the run began."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }


def write_json(document: dict[str, object], json_path: str | None) -> None:
    """To a file, to stdout for ``-``, nowhere for None."""
    text = json.dumps(document, indent=1) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
    elif json_path is not None:
        Path(json_path).write_text(text)
