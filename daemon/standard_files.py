"""Descriptors 0 to 2 are what they are for, also in a process that was started without them."""

from __future__ import annotations

import os
import sys


def open_standard_files() -> None:
    """Opens /dev/null in place of what is closed. To be called first: otherwise the next file that is opened, such as
    a database, is standard error, and whatever a library prints there goes into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
