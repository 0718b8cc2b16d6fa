"""Puts the simulated modules in the place of the real ones, in every module of hicache, and takes them out again."""

from __future__ import annotations

import asyncio
import concurrent.futures._base as futures_base
import gc
import importlib
import itertools
import logging
import pkgutil
import random
import secrets
import selectors
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import structlog

import hicache.backends
import hicache.client
import hicache.daemon
from hicache.notices import Notices
from tests.simulation import preemption
from tests.simulation.net import Eventfds, NetworkFaults, Selectors, Sockets
from tests.simulation.primitives import Queues, Threading, Time
from tests.simulation.rpc import Channel, Rpc, RpcFaults
from tests.simulation.scheduler import Scheduler, SimulationError


class Secrets:
    """In place of the module ``secrets``: whatever is drawn there orders sets and names, so the seed draws it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def token_bytes(self, count: int = 32) -> bytes:
        return self._rng.randbytes(count)

    def token_hex(self, count: int = 32) -> str:
        return self._rng.randbytes(count).hex()

    def randbits(self, count: int) -> int:
        return self._rng.getrandbits(count)

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        return getattr(secrets, name)


class Node:
    """What surrounds the code under test in one life."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.network = NetworkFaults()
        self.rpc_faults = RpcFaults()
        self.threading = Threading(scheduler)
        self.sockets = Sockets(scheduler, self.network)
        self.eventfds = Eventfds()
        self.rpc = Rpc(scheduler, self.threading, self.rpc_faults)
        self.complaints: list[str] = []  # what the code under test calls an error of its own


@cache
def load_all() -> None:
    """Every module of hicache that a node needs is loaded, so that none is later with the real modules in it."""
    for package in (hicache.backends, hicache.client, hicache.daemon):
        for found in pkgutil.iter_modules(package.__path__):
            if "mooncake" not in found.name and found.name != "__main__":
                importlib.import_module(f"{package.__name__}.{found.name}")
    importlib.import_module("hicache.cache")
    importlib.import_module("hicache.ranks.worker")
    importlib.import_module("tests.core.small_engine")
    _functions_with_clocks()  # while the collector shows all
    _cells_with_factories()
    preemption.prepare()
    gc.freeze()  # so that a collection after each life looks at that life alone


@contextmanager
def patched(node: Node) -> Iterator[None]:
    """In this block hicache runs in the simulation."""
    load_all()
    scheduler = node.scheduler
    clock = Time(scheduler)
    fakes: dict[types.ModuleType, Any] = {
        threading: node.threading,
        time: clock,
        sys.modules["queue"]: Queues(scheduler, node.threading),
        sys.modules["socket"]: node.sockets,
        selectors: Selectors(scheduler),
        random: _SeededRandom(scheduler.rng),
        secrets: Secrets(scheduler.rng),
    }
    with ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("hicache")]:
            for name, value in list(vars(module).items()):
                if isinstance(value, types.ModuleType) and value in fakes:
                    set_in(stack, module, name, fakes[value])
                elif isinstance(value, Notices):  # which remembers what it has said in the life before
                    set_in(stack, module, name, Notices(logging.getLogger(module.__name__), clock=clock.monotonic))
        set_in(stack, futures_base, "threading", node.threading)
        numbers = itertools.count()
        slotted: dict[
            int, tuple[object, int]
        ] = {}  # without attributes of their own: kept, so that none takes its place

        def number_of(thing: object) -> int:
            """In place of ``id`` and of hashes that are one: they depend on where an object lies."""
            if type(thing).__dictoffset__:
                return vars(thing).setdefault("_simulated_id", next(numbers))  # type: ignore[no-any-return]
            if id(thing) not in slotted:
                slotted[id(thing)] = (thing, next(numbers))
            return slotted[id(thing)][1]

        futures_base.id = number_of  # type: ignore[attr-defined]  # locks of several futures are taken in its order
        stack.callback(delattr, futures_base, "id")
        for owner in {*_classes_hashed_by_place(), futures_base.Future, asyncio.Event, asyncio.Lock}:
            set_in(stack, owner, "__hash__", number_of)
        _replace_defaults(stack, {time.monotonic: clock.monotonic, time.time: clock.time})
        _replace_factories(stack, fakes)
        set_in(stack, sys.modules["hicache.ranks.loop"], "os", node.eventfds)
        session = sys.modules["hicache.client.session"]
        set_in(stack, session, "HiCachedStub", node.rpc.stub_class())
        set_in(stack, sys.modules["hicache.client.address"], "grpc", _Grpc(sys.modules["grpc"]))
        set_in(stack, sys.modules["hicache.daemon.server"], "GrpcServer", node.rpc.server_class())
        set_in(stack, sys.modules["hicache.daemon.socket_lock"], "remove_stale_socket", _remove_socket)
        stack.enter_context(_complaints_of(node))
        if scheduler.has_points:
            stack.enter_context(preemption.points(scheduler.point))
        stack.enter_context(_uncollected())
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """The collector comes when the whole process has made so many objects, and runs finalizers: not within a life."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _classes_hashed_by_place() -> Iterator[type]:
    for name, module in list(sys.modules.items()):
        if name.startswith("hicache"):
            for found in vars(module).values():
                is_class_of_it = isinstance(found, type) and found.__module__ == name
                if is_class_of_it and found.__hash__ is object.__hash__:
                    yield found


class _SeededRandom:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def uniform(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        return getattr(random, name)


class _Grpc:
    """The module, but for the channel."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.insecure_channel = Channel

    def __getattr__(self, name: str) -> Any:  # Any: whatever the module has
        return getattr(self._module, name)


def _remove_socket(setting: str, path: str) -> None:
    """Nobody else listens there: daemons of one life follow each other."""
    import os

    if os.path.lexists(path):
        os.unlink(path)


def set_in(stack: ExitStack, owner: Any, name: str, value: object) -> None:
    before = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)


def _replace_defaults(stack: ExitStack, replacements: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Clocks that functions of hicache have as defaults were bound when they were defined."""
    for function in _functions_with_clocks():
        for attribute in ("__defaults__", "__kwdefaults__"):
            before = getattr(function, attribute)
            if isinstance(before, tuple):
                after: Any = tuple(_replaced(value, replacements) for value in before)
            elif before:
                after = {name: _replaced(value, replacements) for name, value in before.items()}
            else:
                continue
            if after != before:
                setattr(function, attribute, after)
                stack.callback(setattr, function, attribute, before)


@cache
def _functions_with_clocks() -> list[types.FunctionType]:
    clocks = (time.monotonic, time.time)
    return [
        found
        for found in gc.get_objects()
        if type(found) is types.FunctionType
        and (found.__module__ or "").startswith("hicache")
        and any(value in clocks for value in (*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values()))
    ]


def _replace_factories(stack: ExitStack, fakes: Mapping[types.ModuleType, Any]) -> None:
    """What fields of dataclasses are made by was bound when the classes were."""
    for cell, module, name in _cells_with_factories():
        stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
        cell.cell_contents = getattr(fakes[module], name)


@cache
def _cells_with_factories() -> list[tuple[types.CellType, types.ModuleType, str]]:
    names = {threading: ("Lock", "RLock", "Condition", "Event"), selectors: ("DefaultSelector",)}
    factories = [(getattr(module, name), module, name) for module in names for name in names[module]]
    return [
        (cell, module, name)
        for function in gc.get_objects()
        if type(function) is types.FunctionType and (function.__module__ or "").startswith("hicache")
        for cell in function.__closure__ or ()
        for factory, module, name in factories
        if _is_in(cell, factory)
    ]


def _is_in(cell: types.CellType, thing: object) -> bool:
    try:
        return cell.cell_contents is thing
    except ValueError:  # it is empty
        return False


def _replaced(value: Any, replacements: dict[Callable[..., Any], Callable[..., Any]]) -> Any:
    return replacements.get(value, value) if isinstance(value, types.BuiltinFunctionType) else value


@contextmanager
def _complaints_of(node: Node) -> Iterator[None]:
    """Errors that the code logs with a traceback are defects; warnings are what faults are told by."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and not node.scheduler.is_over:
                text = self.format(record)
                node.complaints.append(text)

    def note(_: Any, method: str, event: Any) -> Any:
        if event.get("exc_info") and not node.scheduler.is_over:
            import traceback

            node.complaints.append(f"{event.get('event')}: {traceback.format_exc()}")
        raise structlog.DropEvent

    handler = Handler()
    loggers = [logging.getLogger(name) for name in ("hicache", "concurrent.futures", "asyncio")]
    level = logging.getLogger().level  # which a reload of the daemon sets
    before, propagated = structlog.get_config(), [logger.propagate for logger in loggers]
    structlog.configure(processors=[note], cache_logger_on_first_use=False)
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, propagated, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagates
        structlog.configure(**before)
        logging.getLogger().setLevel(level)


__all__ = ["Node", "SimulationError", "patched"]
