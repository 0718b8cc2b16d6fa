"""`python -m tools.mooncake_here`: ends with 0 where the Mooncake tests can run, else says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hicache.backends.mooncake_client import load_wheel
from hicache.errors import ConfigError

MASTER = Path(sys.executable).with_name("mooncake_master")


def main() -> int:
    """Load the wheel and run its master: that is what finds out whether the libraries of the system are there."""
    try:
        load_wheel()
    except ConfigError as error:
        print(f"Mooncake cannot run here: {error}", file=sys.stderr)
        return 1
    asked = subprocess.run([MASTER, "--version"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        print(f"Mooncake cannot run here: {asked.stderr.strip()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
