"""Damage on the medium of a closed store."""

from __future__ import annotations

import os
from pathlib import Path


def overwrite_everywhere(directory: Path, found: bytes, replacement: bytes) -> int:
    """Replace every occurrence of ``found`` in the files of a store; returns how many there were."""
    count = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            raw = path.read_bytes()
            start = raw.find(found)
            with path.open("r+b") as file:
                while start >= 0:
                    count += 1
                    file.seek(start)
                    file.write(replacement)
                    start = raw.find(found, start + 1)
    return count


def flip_bit(directory: Path, content: bytes, *, at: int) -> None:
    """Flip one bit of the byte ``at`` of a payload, wherever the store has it."""
    found = content[at : at + 64]
    assert overwrite_everywhere(directory, found, bytes([found[0] ^ 0x10])) > 0


def zero_block(directory: Path, content: bytes, *, at: int) -> None:
    """Overwrite 4 KiB of a payload with zeros."""
    assert overwrite_everywhere(directory, content[at : at + 4096], bytes(4096)) > 0


def files_under(directory: Path) -> list[Path]:
    """All files of a store."""
    return [Path(folder, name) for folder, _, names in os.walk(directory) for name in names]
