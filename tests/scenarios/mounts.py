"""File systems of a test's own, with the faults that only real ones have.

Where there is no program or no right to make one, the test is skipped and says why. They go whatever becomes of the
test: one that a process still uses is out of the tree at once, and ends with the process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Disk:
    """An ext4 on a loop device over a file."""

    folder: Path
    device: str
    image: Path

    def fail_inside(self) -> None:
        """The file system finds an error in itself, and does what its mount option ``errors=`` says."""
        try:
            (Path("/sys/fs/ext4") / Path(self.device).name / "trigger_fs_error").write_text("1")
        except OSError as error:
            pytest.skip(f"this kernel cannot be told to find an error in a file system: {error}")

    def lose_from(self, offset: int) -> None:
        """Nothing behind ``offset`` of the device can be read any more, but for what a cache has."""
        os.truncate(self.image, offset)

    def whole_again(self, size_bytes: int) -> None:
        """The device has as many bytes as at first, of which those that were lost are zeros."""
        os.truncate(self.image, size_bytes)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """As a backup freezes it: whoever writes waits."""
        needs("fsfreeze")
        run("fsfreeze", "-f", str(self.folder))
        try:
            yield
        finally:
            run("fsfreeze", "-u", str(self.folder))


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """One that is made, and goes."""
    with mounted(folder, "-t", "tmpfs", "-o", options, "tmpfs"):
        yield folder


@contextmanager
def ext4(folder: Path, *, size_bytes: int, options: str) -> Iterator[Disk]:
    """In ``folder``, which is made."""
    needs("mkfs.ext4", "losetup")
    folder.mkdir()
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    attached = subprocess.run(["losetup", "-f", "--show", str(image)], capture_output=True, text=True, check=False)
    if attached.returncode:
        pytest.skip(f"no loop device can be had here: {attached.stderr.strip()}")
    device = attached.stdout.strip()
    try:
        with mounted(folder / "disk", "-o", options, device):
            yield Disk(folder / "disk", device, image)
    finally:
        run("losetup", "-d", device)


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    needs("mount", "umount")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this cannot be mounted here: {done.stderr.splitlines()[0]}")
    try:
        yield
    finally:
        run("umount", "-l", str(folder))


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}(8)")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def drop_from_cache(files: Iterable[Path]) -> None:
    """Their content is on the medium, and nowhere else."""
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
