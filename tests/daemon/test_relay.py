"""What is passed for gRPC is copied both ways, whole, with its ends, and within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hicache.daemon.relay import Relay

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BIG = os.urandom(3 << 20)  # more than all buffers on the way


@asynccontextmanager
async def relayed(
    folder: Path, serve: Serve, *, is_remote: bool = False, connections_max: int = 8
) -> AsyncIterator[str | tuple[str, int]]:
    """The address of a relay to ``serve``."""
    server = await asyncio.start_unix_server(serve, folder / "inner")
    if is_remote:
        listener = socket.create_server(("127.0.0.1", 0))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "outer"))
        listener.listen()
    relay = Relay("test", listener, str(folder / "inner"), connections_max=connections_max)
    relay.start()
    yield listener.getsockname()
    await relay.stop()
    listener.close()
    server.close()
    await server.wait_closed()


async def connect(address: str | tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, str):
        return await asyncio.open_unix_connection(address)
    return await asyncio.open_connection(*address)


@pytest.mark.parametrize("is_remote", [False, True])
def test_bytes_and_ends_go_both_ways_however_slow_a_side_is(tmp_path: Path, is_remote: bool) -> None:
    names: list[object] = []

    async def echo_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        names.append(writer.get_extra_info("peername"))
        received = await reader.read()
        writer.write(received)
        await writer.drain()
        writer.close()

    async def steps() -> None:
        async with relayed(tmp_path, echo_at_the_end, is_remote=is_remote) as address:
            reader, writer = await connect(address)
            writer.write(BIG)
            await writer.drain()
            writer.write_eof()
            assert await reader.read() == BIG
            writer.close()

    asyncio.run(steps())
    [name] = names
    assert (b"-remote-" in bytes(str(name), "utf-8")) == is_remote


def test_a_side_that_breaks_ends_the_other(tmp_path: Path) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def steps() -> None:
        async with relayed(tmp_path, hang_up) as address:
            reader, writer = await connect(address)
            assert await reader.read() == b""
            writer.close()
        os.unlink(tmp_path / "outer")
        async with relayed(tmp_path, hang_up) as address:
            os.unlink(tmp_path / "inner")  # gRPC is gone
            reader, writer = await connect(address)
            assert await reader.read() == b""
            writer.close()

    asyncio.run(steps())


def test_one_more_than_the_bound_is_closed_and_has_room_when_another_goes(tmp_path: Path) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome")
        await reader.read()
        writer.close()

    async def is_welcome(address: str | tuple[str, int]) -> tuple[bool, asyncio.StreamWriter]:
        reader, writer = await connect(address)
        return await reader.read(7) == b"welcome", writer

    async def steps() -> None:
        async with relayed(tmp_path, greet, connections_max=2) as address:
            first, second, third = [await is_welcome(address) for _ in range(3)]
            assert (first[0], second[0], third[0]) == (True, True, False)
            first[1].close()
            await first[1].wait_closed()
            async with asyncio.timeout(10):
                while not (again := await is_welcome(address))[0]:
                    again[1].close()
            for _, writer in (second, third, again):
                writer.close()

    asyncio.run(steps())


async def until_there_is_room(address: str | tuple[str, int]) -> None:
    """A connection that is not closed at once: the server says a byte."""
    async with asyncio.timeout(10):
        while True:
            reader, writer = await connect(address)
            said = await reader.read(1)
            writer.close()
            if said:
                return


def test_a_silent_client_that_grpc_has_given_up_takes_no_room(tmp_path: Path) -> None:
    async def give_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"!")
        await writer.drain()
        writer.close()

    async def steps() -> None:
        async with relayed(tmp_path, give_up, connections_max=1) as address:
            reader, stranger = await connect(address)
            assert await reader.read() == b"!", "and the end, after which it stays and says nothing"
            await until_there_is_room(address)
            stranger.close()

    asyncio.run(steps())


def test_a_client_that_takes_nothing_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.daemon.relay.TAKE_S", 0.05)
    is_first = True

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal is_first
        writer.write(BIG * 10 if is_first else b"!")
        is_first = False
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async def steps() -> None:
        async with relayed(tmp_path, flood, connections_max=1) as address:
            with socket.socket(socket.AF_UNIX) as stalled:
                stalled.connect(str(address))
                await until_there_is_room(address)

    asyncio.run(steps())
