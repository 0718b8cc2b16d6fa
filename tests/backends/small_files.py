"""Code in a process whose files may not grow beyond a size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from hicache.backends.open import open_backend
from hicache.errors import ConfigError
from tests.backends.payloads import key, payload, put, get
{body}
"""


def run_limited(limit_bytes: int, body: str) -> str:
    """Run code in a process whose files may not grow beyond a size; returns what it prints."""
    code = LIMITED.format(limit=limit_bytes, body=body)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
