"""What goes wrong between the ranks of a replica, and with the part of L3 that one of them has."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hicache.l3 import Done, L3Item
from hicache.outcome import Outcome
from tests.simulation.scheduler import Process

if TYPE_CHECKING:
    from hicache.pools import L2Pool
    from tests.simulation.world import World

CONNECT_S = 0.05  # between two tries of a wire to reach a leader that does not listen yet
PIECE_BYTES = 4096


class RankFaults:
    """How often what happens. Changed by whoever drives the simulation."""

    def __init__(self) -> None:
        self.calm()

    def calm(self) -> None:
        self.failing_rank = 0
        self.failing_share = 0.0  # of the objects that this rank asks L3 for, or gives it: they fail for it alone
        self.late_share = 0.0  # of what goes over a wire
        self.late_s_max = 0.0
        self.cut_share = 0.0  # of what goes over a wire: it ends there
        self.slow_share = 0.0  # of the steps of a worker


class ShardL3:
    """The L3 of one rank: now and then an object fails for it, and for no other rank."""

    def __init__(self, world: World, l3: Any, l2: L2Pool, rank: int) -> None:
        self._world, self._l3, self._l2, self._rank = world, l3, l2, rank

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        if self._fails(len(keys))[:1] == [True]:
            return [Outcome.UNAVAILABLE] * len(keys)
        return self._l3.lookup(keys, timeout_s=timeout_s)  # type: ignore[no-any-return]

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """What fails leaves garbage where the object should be."""
        fails = self._fails(len(items))
        for item, is_bad in zip(items, fails, strict=True):
            if is_bad:
                self._l2.buffer[item.offset : item.offset + item.size_bytes] = b"\xbb" * item.size_bytes
        self._pass_on(self._l3.get, items, fails, timeout_s=timeout_s, done=done)

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """What fails is not stored, beside shards of other ranks that are."""
        self._pass_on(self._l3.put, items, self._fails(len(items)), timeout_s=timeout_s, done=done)

    def close(self) -> None:
        self._l3.close()

    def __getattr__(self, name: str) -> Any:  # Any: whatever the client has
        return getattr(self._l3, name)

    def _fails(self, count: int) -> list[bool]:
        sim, faults = self._world.scheduler, self._world.rank_faults
        share = faults.failing_share if faults.failing_rank == self._rank else 0.0
        fails = [bool(share) and sim.rng.random() < share for _ in range(count)]
        self._world.tally.shards_failed += sum(fails)
        return fails

    def _pass_on(self, act: Any, items: Sequence[L3Item], fails: list[bool], *, timeout_s: float, done: Done) -> None:
        def joined(outcomes: list[Outcome]) -> None:
            answers = iter(outcomes)
            done([Outcome.IO_ERROR if is_bad else next(answers) for is_bad in fails])

        good = [item for item, is_bad in zip(items, fails, strict=True) if not is_bad]
        if good:
            act(good, timeout_s=timeout_s, done=joined)
        else:
            joined([])


class Wire:
    """What the links of a replica go over, as between nodes: bytes on it come in pieces, late, or no more."""

    def __init__(self, world: World, *, path: str, leader_path: str) -> None:
        self.path, self._leader_path, self._world = path, leader_path, world
        self.process = Process(path.rpartition("/")[2])
        self._socket: Any = world.node.sockets  # Any: in place of the module
        world.scheduler.spawn(self._accept, name=self.process.name, process=self.process)

    def _accept(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            from pathlib import Path

            Path(self.path).unlink()
        listener = self._socket.socket(self._socket.AF_UNIX, self._socket.SOCK_STREAM)
        listener.bind(self.path)
        listener.listen(8)
        while True:
            near, _ = listener.accept()
            self._spawn(lambda near=near: self._connect(near))

    def _connect(self, near: Any) -> None:
        """A leader that is still to come is waited for, like a node that does not answer yet."""
        while True:
            far = self._socket.socket(self._socket.AF_UNIX, self._socket.SOCK_STREAM)
            try:
                far.connect(self._leader_path)
                break
            except OSError:
                far.close()
                self._world.scheduler.sleep(CONNECT_S)
        self._spawn(lambda: self._carry(near, far))
        self._carry(far, near)

    def _carry(self, source: Any, target: Any) -> None:
        sim, faults = self._world.scheduler, self._world.rank_faults
        with contextlib.suppress(OSError):
            while part := source.recv(PIECE_BYTES):
                if sim.rng.random() < faults.late_share:
                    sim.sleep(sim.rng.uniform(0, faults.late_s_max))
                if sim.rng.random() < faults.cut_share:
                    self._world.tally.links_cut += 1
                    break
                target.sendall(part)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(self._socket.SHUT_RDWR)

    def _spawn(self, run: Any) -> None:
        self._world.scheduler.spawn(run, name=self.process.name, process=self.process)
