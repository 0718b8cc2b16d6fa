"""`from hicache import ...` where torch is not installed, as on a machine that runs hicached alone."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["HiCache", "RankWorker"])
def test_what_needs_torch_names_the_extra_that_brings_it(name: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; from hicache import CacheSpec; from hicache import {name}"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 1
    last_line = finished.stderr.strip().splitlines()[-1]
    assert last_line.startswith(f"ModuleNotFoundError: hicache.{name} needs torch")
    assert "pip install 'hicache[engine]'" in last_line
