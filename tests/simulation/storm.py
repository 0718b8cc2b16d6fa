"""What the director of a life lets go wrong, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import World

WEATHERS = (
    "mixed",
    "mixed",
    "freezing",
    "forgetful",
    "late",
    "failing",
)  # which faults come, all of them or one kind again and again
RANK_STRIKES = 0.4  # of strikes at random, where there are ranks
STOPPED_S_MAX = 12.0  # more than the silence that ranks allow each other


class Storm:
    """Faults of one life, as its seed draws them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sim = world.scheduler

    def strike(self) -> None:
        """Something goes wrong, or ends to."""
        sim, disk = self._sim, self._world.disk
        match self._world.weather:
            case "freezing":
                disk.freezes_reads_only = True
                disk.frozen_until_s = sim.now_s + sim.rng.uniform(5.0, 30.0)
            case "late":  # a little more than the ten seconds that engines give a fetch
                disk.freezes_reads_only = True
                if disk.frozen_until_s < sim.now_s - 1.0:
                    disk.frozen_until_s = sim.now_s + sim.rng.uniform(10.2, 14.0)
            case "forgetful":
                disk.forgets_share = sim.rng.choice((0.0, 0.05, 0.3))
            case "failing":  # calls of the disk, and now and then what waits for them
                disk.share = sim.rng.choice((0.0, 0.01, 0.05, 0.2))
                if sim.rng.random() < 0.5:
                    self._strike_processes()
            case _ if self._world.crews and sim.rng.random() < RANK_STRIKES:
                self._strike_ranks()
            case _:
                if not self._strike_processes():
                    self._strike_what_is_between()

    def _strike_ranks(self) -> None:
        """One rank of a replica, or what is between it and its leader."""
        sim, faults, tally = self._sim, self._world.rank_faults, self._world.tally
        crew = sim.rng.choice(list(self._world.crews.values()))
        worker = sim.rng.choice(crew.workers) if crew.workers else None
        match sim.rng.randrange(10):
            case 0 | 1 if worker is not None and not worker.is_gone:
                sim.kill(worker.process)
                tally.rank_kills += 1
            case 2 | 3 if worker is not None and not worker.is_gone:
                sim.stop(worker.process, seconds=sim.rng.uniform(0.1, STOPPED_S_MAX))
                tally.ranks_stopped += 1
            case 4 | 5:
                faults.failing_rank = sim.rng.randrange(crew.spec.rank_count)
                faults.failing_share = sim.rng.choice((0.02, 0.1, 0.5, 1.0))
            case 6:
                faults.late_share, faults.late_s_max = sim.rng.choice(((0.3, 0.2), (0.05, 4.0), (0.01, 12.0)))
            case 7:
                faults.cut_share = sim.rng.choice((0.001, 0.01))
            case 8:
                faults.slow_share = sim.rng.choice((0.05, 0.3))
            case _:
                faults.calm()

    def _strike_processes(self) -> bool:
        """One process is killed or stopped, or not."""
        sim, world = self._sim, self._world
        match sim.rng.randrange(19):
            case 0:
                world.daemon.kill()
                sim.sleep(sim.rng.choice((0.0, 0.0, 1.0, 10.0)))
                world.daemon.start()
            case 1:
                world.daemon.stop()
                world.daemon.start()
            case 2:
                engine = sim.rng.choice(world.engines)
                if not engine.is_done:
                    engine.kill()
                    engine.start()
            case _:
                return False
        return True

    def _strike_what_is_between(self) -> None:
        """Networks, calls, the disk, and the clock on the wall."""
        sim, disk = self._sim, self._world.disk
        network, rpc = self._world.node.network, self._world.node.rpc_faults
        match sim.rng.randrange(16):
            case 0 | 1 | 2:
                network.break_share = sim.rng.choice((0.002, 0.01, 0.03))
            case 3:
                network.delay_share, network.delay_s_max = sim.rng.choice(((0.05, 0.05), (0.3, 0.5), (0.02, 5.0)))
            case 4:
                rpc.lost_reply_share = sim.rng.choice((0.0, 0.02, 0.1))
            case 5:
                rpc.lost_request_share = sim.rng.choice((0.0, 0.02, 0.1))
            case 6:
                rpc.delay_s_max = sim.rng.choice((0.05, 0.5, 4.0))
            case 7:
                disk.forgets_share = sim.rng.choice((0.0, 0.02))
            case 8:
                disk.share = sim.rng.choice((0.0, 0.0, 0.01, 0.1))
            case 9 | 10 | 11:
                disk.frozen_until_s = sim.now_s + sim.rng.uniform(0.5, 20.0)
            case 12:
                self._world.tally.streams_broken += self._world.node.rpc.break_streams()
            case 13:
                sim.wall_offset_s += sim.rng.choice((-86_400.0, -5.0, 5.0, 86_400.0))
            case _:
                self.calm()

    def calm(self) -> None:
        """Nothing goes wrong any more."""
        network, rpc, disk = self._world.node.network, self._world.node.rpc_faults, self._world.disk
        network.break_share, network.delay_share, network.delay_s_max = 0.0, 0.05, 0.05
        rpc.lost_reply_share = rpc.lost_request_share = 0.0
        rpc.delay_s_max = 0.05
        disk.share = disk.forgets_share = disk.frozen_until_s = 0.0
        self._world.rank_faults.calm()
