"""File systems of a test's own, with the faults that only real ones have. Skips where none can be mounted."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
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
        trigger = Path("/sys/fs/ext4") / Path(self.device).name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("this kernel cannot be told to find an error in a file system")
        trigger.write_text("1")

    def lose_from(self, offset: int) -> None:
        """Nothing behind ``offset`` of the device can be read any more, but for what a cache has."""
        os.truncate(self.image, offset)

    def whole_again(self, size_bytes: int) -> None:
        """The device has as many bytes as at first, of which those that were lost are zeros."""
        os.truncate(self.image, size_bytes)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """As a backup freezes it: whoever writes waits."""
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
    if shutil.which("mkfs.ext4") is None or shutil.which("losetup") is None:
        pytest.skip("there is no mkfs.ext4(8), or no losetup(8)")
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
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        run("umount", str(folder))


def run(*command: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(command, check=True, capture_output=True)


def drop_caches() -> None:
    """What is clean in the page cache is gone."""
    run("sync")
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        pytest.skip("the page cache cannot be dropped here")
