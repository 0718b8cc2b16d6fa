"""A daemon with neighbours at work, for clients that die, lie, flood and never read."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.client.memory import SmallMemory, UnshareableMemory
from tests.daemon.rig import DaemonProcess, scrape, wait_until
from tests.faults.other_client import OtherClient

MIB = 1 << 20
ROUNDS = 3  # that each neighbour completes while something hostile goes on
MALLORY, BOB = "mallory-token-0123456789", "bob-token-0123456789abcd"
BASE_METRICS = (
    "hicache_inflight_bytes",
    "hicache_storage_queued_chunks",
    "hicache_storage_errors_total",
    "hicache_regions",
    "hicache_region_bytes",
    "hicache_sessions",
)


class Besieged:
    """A real daemon with two neighbours of the tenant bob, one for each way that objects go."""

    def __init__(self, folder: Path) -> None:
        (folder / "tenants").write_text(f"mallory {MALLORY}\nbob {BOB}\n")
        (folder / "tenants").chmod(0o600)
        self.daemon = DaemonProcess(
            folder, tenants_file=folder / "tenants", listen="127.0.0.1:0", capacity_bytes="256MiB"
        ).wait_ready()
        self.address = self.daemon.target.replace("unix:", "unix://")
        self.tcp_address = f"tcp://{self.daemon.ready['listen']}"
        self.memory_socket = f"{self.daemon.settings['socket']}.memory"
        self.neighbours = [
            OtherClient(address, memory(2 * MIB), size_bytes=MIB, token=BOB)
            for address, memory in ((self.address, SmallMemory), (self.tcp_address, UnshareableMemory))
        ]
        self.base = self.readings()
        self.own_bytes = self.read_own_bytes()

    def close(self) -> None:
        for neighbour in self.neighbours:
            neighbour.close()
        self.daemon.close()

    def readings(self) -> dict[str, float]:
        """What has to be the same again when the hostile are gone."""
        samples = scrape(self.daemon.ready["http"])
        descriptors = os.listdir(f"/proc/{self.daemon.process.pid}/fd")
        return {name: samples[name] for name in BASE_METRICS} | {"descriptors": len(descriptors)}

    def read_own_bytes(self) -> int:
        """Memory that is neither of clients nor of files."""
        lines = Path(f"/proc/{self.daemon.process.pid}/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0]) * 1024

    def is_as_before(self) -> bool:
        now = self.readings()
        return now.pop("descriptors") <= self.base["descriptors"] + 2 and now.items() <= self.base.items()

    def let_neighbours_work(self) -> None:
        """Returns when each has completed some more rounds."""
        wanted = [neighbour.rounds + ROUNDS for neighbour in self.neighbours]
        wait_until(
            lambda: all(neighbour.rounds >= rounds for neighbour, rounds in zip(self.neighbours, wanted, strict=True)),
            what=f"the neighbours' rounds: {[neighbour.wrong for neighbour in self.neighbours]}",
        )


@contextlib.contextmanager
def victims(besieged: Besieged) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Clients in the middle of transfers, one for each way."""
    ways = ((besieged.address, "memory"), (besieged.address, "bounce"), (besieged.tcp_address, "stream"))
    processes = [
        subprocess.Popen([sys.executable, "-m", "tests.faults.victim", address, MALLORY, bulk], stdout=subprocess.PIPE)
        for address, bulk in ways
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
