"""A router that watches a tenant, and an operator of it who looks up, pins and deletes: clients without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache.client import DaemonL3
from hicache.client.watch import WatchKind
from hicache.outcome import Outcome
from tests.simulation.scheduler import Process, SimulationError

if TYPE_CHECKING:
    from tests.simulation.world import World

NAME = "router"
CALL_S = 2.0
LATE_S_MAX = 5.0  # after its deadline no call is still running
CLOSE_S_MAX = 20.0


class Router:
    """Of the first tenant. What its watch tells makes a picture, which is that of the store when all is calm."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._process = Process(NAME)
        self._client: Any = None  # Any: a DaemonL3 or None
        self._watch: Any = None
        self._ended = world.node.threading.Event()
        self.picture: set[bytes] = set()
        self.is_synced = False

    def start(self) -> None:
        self._world.scheduler.spawn(self._main, name=NAME, process=self._process)

    def _main(self) -> None:
        world = self._world
        self._client = DaemonL3(
            f"unix://{world.settings['socket']}",
            spec=world.spec,
            memory=None,
            token=world.token(0),
            client_name=NAME,
        )
        self._watch = self._client.watch()
        operator = world.node.threading.Thread(target=self._operate, name="operator")
        operator.start()
        for event in self._watch:
            world.tally.watched += 1
            match event.kind:
                case WatchKind.RESET:
                    self.picture, self.is_synced = set(), False
                case WatchKind.SYNCED:
                    self.is_synced = True
                case WatchKind.REMOVED:
                    self.picture.difference_update(event.keys)
                case _:
                    self.picture.update(event.keys)
        operator.join()
        began_s = world.scheduler.now_s
        self._client.close()
        if world.scheduler.now_s - began_s > CLOSE_S_MAX:
            raise SimulationError(f"closing a client took {world.scheduler.now_s - began_s:g} s")
        self._ended.set()

    def _operate(self) -> None:
        """Anything that a client without memory can ask for, about keys that are there, or were."""
        world, sim = self._world, self._world.scheduler
        client, known = self._client, list[bytes]()
        while world.is_storming:
            sim.sleep(sim.rng.expovariate(1.0))
            known = sorted(self.picture) or known
            keys = sim.rng.sample(known, min(len(known), sim.rng.randint(1, 8)))
            began_s = sim.now_s
            match sim.rng.randrange(8):
                case 0:
                    outcomes = client.delete(keys, timeout_s=CALL_S)
                case 1 | 2:
                    outcomes = client.pin(keys, pin_s=sim.rng.uniform(0.1, 20.0), timeout_s=CALL_S)
                case 3:
                    outcomes = client.unpin(keys, timeout_s=CALL_S)
                case _:
                    outcomes = client.lookup(keys, timeout_s=CALL_S)
            world.tally.operated += 1
            if len(outcomes) != len(keys) or Outcome.CORRUPT in outcomes:
                raise SimulationError(f"{len(keys)} keys came to {outcomes}")
            if sim.now_s - began_s > CALL_S + LATE_S_MAX:
                raise SimulationError(f"a call of {CALL_S:g} s took {sim.now_s - began_s:g} s")

    def check_picture(self) -> None:
        """In calm weather, when nobody stores."""
        daemon = self._world.daemon.daemon
        assert daemon is not None
        server = self._world.node.rpc.servers[str(self._world.settings["socket"])]
        mine = [session for session in server.sessions if session.client_name == NAME]
        if not mine or not self.is_synced:
            raise SimulationError(f"the router has {len(mine)} sessions, its watch says {self._watch.fault}")
        tenant = mine[0].tenant.digest
        there = {key[len(tenant) :] for batch in daemon.store.snapshot(tenant) for key in batch}
        if there != self.picture:
            missing, gone = len(there - self.picture), len(self.picture - there)
            raise SimulationError(f"of {len(there)} objects a watcher misses {missing}, and believes in {gone} others")

    def stop(self) -> None:
        self._watch.close()
        if not self._ended.wait(CLOSE_S_MAX + CALL_S + LATE_S_MAX):
            raise SimulationError("a watch did not end when it was closed")
