"""The public traces, and what is known of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.admission.__main__ import TRACES
from bench.admission.traces import Trace, load_trace

NAMES = {"conv": "mooncake_conversation_trace.jsonl.zst", "synth": "mooncake_synthetic_trace.jsonl.zst"}
CAPACITIES = (1000, 5859, 20000, 50000)
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "policies.json").read_text())


@functools.cache
def trace(name: str) -> Trace:
    """Of ``NAMES``. Skips the test that asks when the file is not there."""
    path = TRACES / NAMES[name]
    if not path.is_file():
        pytest.skip(f"{path} is not there: golden counts are NOT checked")
    return load_trace(path)
