"""gRPC between fibers: the stub of a client calls the real service of hicached, through messages on the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Never

import grpc

from hicache.daemon.config import DaemonConfig
from hicache.daemon.grpc_server import GRACE_S
from tests.simulation.scheduler import Process, Scheduler

STREAMS = ("Session", "Watch")  # as long as their client wants
METHODS = ("Lookup", "Delete", "Lease", "Pin", "Stats", "Report")


class RpcError(grpc.RpcError, grpc.Call):  # type: ignore[misc]  # grpc.Call is abstract; what is asked of it is here
    """How a call ends that has no reply."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._status, self._details = status, details

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details

    def initial_metadata(self) -> Any:
        return ()

    def trailing_metadata(self) -> Any:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> float:
        return 0.0

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


RpcError.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class Ended(Exception):
    """The service has ended the call with a status."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status, self.details = status, details


class RpcFaults:
    """How often what happens to a call."""

    def __init__(self) -> None:
        self.lost_request_share = 0.0  # the call ends, the daemon never saw it
        self.lost_reply_share = 0.0  # the daemon did it, the client is not told
        self.delay_share = 0.1
        self.delay_s_max = 0.05
        self.lost = 0


class Server:
    """One daemon's service, while it serves."""

    def __init__(self, service: Any, sessions: Any, process: Process, loop: asyncio.AbstractEventLoop) -> None:
        self.service, self.sessions, self.process, self.loop = service, sessions, process, loop
        self.calls: list[RunningCall] = []


class RunningCall:
    """A call between both sides. What a side says wakes the other."""

    def __init__(self, sim: Scheduler, threading: Any, server: Server, method: str, deadline_s: float | None) -> None:
        self._sim = sim
        self.method = method
        self.server = server
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self.replies: deque[bytes] = deque()
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.task: asyncio.Task[Any] | None = None
        self.is_cancelled = False

    def finish(self, status: grpc.StatusCode, details: str = "") -> None:
        with self.changed:
            if self.status is None:
                self.status = (status, details)
                self.changed.notify_all()

    def reply(self, packed: bytes) -> None:
        with self.changed:
            self.replies.append(packed)
            self.changed.notify_all()

    # what the service sees

    async def abort(self, code: grpc.StatusCode, details: str = "") -> Never:
        raise Ended(code, details)

    async def read(self) -> Any:
        return await self.requests.get()

    async def write(self, message: Any) -> None:
        self.reply(message.SerializeToString())

    def time_remaining(self) -> float | None:
        return None if self.deadline_s is None else max(0.0, self.deadline_s - self._sim.now_s)

    def peer(self) -> str:
        return "unix:"

    def invocation_metadata(self) -> Any:
        return ()

    def auth_context(self) -> Any:
        return {}


class Rpc:
    """All servers of the node, by path, and the stubs that reach them."""

    def __init__(self, scheduler: Scheduler, threading: Any, faults: RpcFaults) -> None:
        self._sim, self._threading, self._faults = scheduler, threading, faults
        self.servers: dict[str, Server] = {}

    def server_class(self) -> type:
        """In place of ``GrpcServer``."""
        rpc = self

        class SimulatedGrpcServer:
            def __init__(self, config: DaemonConfig, service: Any, sessions: Any, *_: Any) -> None:
                self._config, self._service, self._sessions = config, service, sessions

            async def start(self) -> str:
                fiber = rpc._sim.current
                assert fiber is not None
                server = Server(self._service, self._sessions, fiber.process, asyncio.get_running_loop())
                rpc.servers[self._config.socket] = server
                fiber.process.at_death.append(lambda: rpc._die(server))
                return ""

            async def stop(self) -> None:
                self._sessions.close()
                server = rpc.servers.pop(self._config.socket, None)
                if server is not None:
                    await asyncio.sleep(GRACE_S)
                    for call in list(server.calls):
                        if call.task is not None:
                            call.task.cancel()
                        call.finish(grpc.StatusCode.UNAVAILABLE, "the server has stopped")

        return SimulatedGrpcServer

    def _die(self, server: Server) -> None:
        self.servers = {path: other for path, other in self.servers.items() if other is not server}
        for call in server.calls:
            call.status = call.status or (grpc.StatusCode.UNAVAILABLE, "Socket closed")
            while call.changed._waiting:
                self._sim.wake(call.changed._waiting.popleft())

    def begin(self, path: str, method: str, packed: bytes | None, *, deadline_s: float | None) -> RunningCall:
        """Raises RpcError where nobody listens."""
        sim, faults = self._sim, self._faults
        sim.maybe_switch()
        if sim.rng.random() < faults.delay_share:
            sim.sleep(sim.rng.uniform(0, faults.delay_s_max))
        server = self.servers.get(path)
        if server is None or not server.process.is_alive:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "failed to connect")
        call = RunningCall(sim, self._threading, server, method, deadline_s)
        if method not in STREAMS and sim.rng.random() < faults.lost_request_share:
            faults.lost += 1
            return call  # until its deadline
        server.calls.append(call)
        server.loop.call_soon_threadsafe(self._serve, call, method, packed)
        return call

    def _serve(self, call: RunningCall, method: str, packed: bytes | None) -> None:
        if call.is_cancelled:
            call.server.calls.remove(call)
        else:
            call.task = call.server.loop.create_task(self._run(call, method, packed))

    async def _run(self, call: RunningCall, method: str, packed: bytes | None) -> None:
        from hicache.wire import hicached_pb2 as pb

        service = call.server.service
        requests = {"Lookup": pb.LookupRequest, "Delete": pb.KeysRequest, "Lease": pb.LeaseRequest}
        requests |= {"Pin": pb.PinRequest, "Stats": pb.StatsRequest, "Report": pb.ReportRequest}
        try:
            if method == "Session":
                await service.Session(None, call)
            elif method == "Watch":
                assert packed is not None
                await service.Watch(pb.WatchRequest.FromString(packed), call)
            else:
                assert packed is not None
                reply = await getattr(service, method)(requests[method].FromString(packed), call)
                if self._sim.rng.random() < self._faults.lost_reply_share:
                    self._faults.lost += 1
                    return
                if reply is not None:
                    call.reply(reply.SerializeToString())
            call.finish(grpc.StatusCode.OK)
        except Ended as ended:
            call.finish(ended.status, ended.details)
        except asyncio.CancelledError:
            call.finish(grpc.StatusCode.CANCELLED, "cancelled")
        finally:
            if call in call.server.calls:
                call.server.calls.remove(call)

    def stub_class(self) -> type:
        """In place of ``HiCachedStub``."""
        rpc = self

        class Stub:
            def __init__(self, channel: Channel) -> None:
                self._channel = channel
                for method in METHODS:
                    setattr(self, method, UnaryMethod(self, method))
                self.Session, self.Watch = self._session, self._watch

            def begin(self, method: str, request: Any, timeout: float) -> RunningCall:
                if self._channel.is_closed:
                    raise ValueError("Cannot invoke RPC on closed channel!")
                deadline_s = rpc._sim.now_s + timeout
                return rpc.begin(self._channel.path, method, request.SerializeToString(), deadline_s=deadline_s)

            def unary(self, method: str, request: Any, timeout: float) -> Any:
                from hicache.wire import hicached_pb2 as pb

                replies = {"Lookup": pb.LookupReply, "Delete": pb.OutcomesReply, "Pin": pb.OutcomesReply}
                replies |= {"Lease": pb.LeaseReply, "Stats": pb.StatsReply, "Report": pb.ReportReply}
                deadline_s = rpc._sim.now_s + timeout
                call = self.begin(method, request, timeout)
                self._channel.calls.append(call)
                with call.changed:
                    call.changed.wait_for(lambda: call.replies or call.status, deadline_s - rpc._sim.now_s)
                self._channel.calls.remove(call)
                if call.replies:
                    return replies[method].FromString(call.replies.popleft())
                if call.status is None:
                    rpc.cancel(call)
                    raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
                raise RpcError(*call.status)

            def _session(self, requests: Iterator[Any]) -> StreamCall:
                return StreamCall(rpc, self._channel, "Session", requests)

            def _watch(self, request: Any) -> StreamCall:
                return StreamCall(rpc, self._channel, "Watch", iter([request]))

        return Stub

    def cancel(self, call: RunningCall) -> None:
        """By its client, who may be dead: nothing of it is waited for."""
        self._cut(call, grpc.StatusCode.CANCELLED, "Locally cancelled by application!")

    def break_streams(self) -> int:
        """The connections of all streams are reset. How many."""
        broken = [call for server in self.servers.values() for call in server.calls if call.method in STREAMS]
        for call in broken:
            self._cut(call, grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
        return len(broken)

    def _cut(self, call: RunningCall, status: grpc.StatusCode, details: str) -> None:
        call.is_cancelled = True
        call.status = call.status or (status, details)
        while call.changed._waiting:
            self._sim.wake(call.changed._waiting.popleft())
        if call.task is not None and call.server.process.is_alive and not call.server.loop.is_closed():
            call.server.loop.call_soon_threadsafe(call.task.cancel)


class UnaryMethod:
    """One of the stub's methods."""

    def __init__(self, stub: Any, name: str) -> None:
        self._stub, self._name = stub, name

    def __call__(self, request: Any, timeout: float, metadata: Any = ()) -> Any:
        return self._stub.unary(self._name, request, timeout)

    def future(self, request: Any, timeout: float, metadata: Any = ()) -> Any:
        """Begun, and not waited for."""
        with contextlib.suppress(grpc.RpcError):
            self._stub.begin(self._name, request, timeout)
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Whoever uses it does not want to know."""


class Channel:
    """In place of ``grpc.insecure_channel``."""

    def __init__(self, target: str, options: Any = None) -> None:
        self.path = target.removeprefix("unix:")
        self.is_closed = False
        self.calls: list[RunningCall] = []

    def close(self) -> None:
        self.is_closed = True
        for call in list(self.calls):
            call.finish(grpc.StatusCode.CANCELLED, "Channel closed!")


class StreamCall:
    """A stream, as its client sees it: begun when it is first read."""

    def __init__(self, rpc: Rpc, channel: Channel, method: str, requests: Iterator[Any]) -> None:
        self._rpc, self._channel, self._method = rpc, channel, method
        self._requests = requests
        self._call: RunningCall | None = None
        self._is_cancelled = False

    def __iter__(self) -> Iterator[Any]:
        from hicache.wire import hicached_pb2 as pb

        if self._is_cancelled:
            raise RpcError(grpc.StatusCode.CANCELLED, "cancelled")
        reply = pb.SessionEvent if self._method == "Session" else pb.WatchEvents
        packed = next(self._requests).SerializeToString()
        call = self._call = self._rpc.begin(self._channel.path, self._method, packed, deadline_s=None)
        fiber = self._rpc._sim.current
        assert fiber is not None
        fiber.process.at_death.append(lambda: self._rpc.cancel(call))
        if self._is_cancelled:  # while it was on its way
            self._rpc.cancel(call)
        if self._method == "Session":
            hello = pb.SessionRequest.FromString(packed)
            call.server.loop.call_soon_threadsafe(call.requests.put_nowait, hello)
        while True:
            with call.changed:
                call.changed.wait_for(lambda: call.replies or call.status)
            if call.replies:
                yield reply.FromString(call.replies.popleft())
                continue
            assert call.status is not None
            if call.status[0] is grpc.StatusCode.OK:
                return
            raise RpcError(*call.status)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._call is not None:
            self._rpc.cancel(self._call)
