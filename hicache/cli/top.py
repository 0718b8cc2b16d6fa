"""`hicache top`: how a hicached is, kept up to date on the whole terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from functools import partial

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from hicache.admin.client import Admin
from hicache.admin.follow import Follower
from hicache.admin.screen import screen
from hicache.admin.verbs import STATUS
from hicache.cli.options import admin_options, json_option, read_token, write_json

_SPECIAL_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]")

_CTRL_C = b"\x03"

REDRAW_S = 0.5  # also without news: the terminal may have another size


@click.command(epilog="\b\nExamples:\n  hicache top\n  hicache top --once --admin 127.0.0.1:9470")
@admin_options
@click.option("--once", is_flag=True, help="Show it once and end, as where the output is no terminal.")
@json_option
def top(admin: str, token_file: str | None, once: bool, json_path: str | None) -> None:
    """Watch a hicached: the screen of `hicache status`, every second, with the last minutes as small bars.

    It goes on through restarts of the daemon. q, Escape or Ctrl-C ends it. --admin also takes the HOST:PORT of
    hicached's http, which anybody may ask. --json writes the status once.

    \b
    Exit codes:
      0  ended by a key, or shown once
      1  the daemon refused
      2  an option is wrong
      3  no hicached answered at the start
    """
    asked = Admin(admin, token=read_token(token_file))
    first = asked.ask(STATUS)
    write_json(json_path, msgspec.to_builtins(first))
    console = Console(highlight=False)
    if json_path == "-":
        return
    if once or json_path is not None or not (console.is_terminal and sys.stdin.isatty()):
        console.print(screen(first, columns=console.width), end="")
        return
    _watch(asked, console)


def _watch(admin: Admin, console: Console) -> None:
    """Until a key ends it. Ctrl-C is one: an exception in the middle of drawing might be swallowed there."""
    news_out, news_in = os.pipe()
    os.set_blocking(news_in, False)

    def tell(news: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # then it is awake enough
            os.write(news_in, news)

    follower = Follower(admin, changed=partial(tell, b"\n"))
    interrupts = _interrupts(partial(tell, _CTRL_C))
    with (
        interrupts,
        _keys() as keys,
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        follower.start()
        while True:
            live.update(_view(follower, *console.size), refresh=True)
            ready, _, _ = select.select([keys, news_out], [], [], REDRAW_S)
            if news_out in ready and _CTRL_C in os.read(news_out, 4096):
                break
            if keys in ready and ends_it(os.read(keys, 4096)):
                break
    follower.stop()  # its thread ends with the process: nothing closes the pipe that it may still write to


def ends_it(typed: bytes) -> bool:
    """Whether q, Escape, Ctrl-C or the end of the input is among what was typed; arrows and the like are not Escape."""
    return not typed or any(key in b"qQ\x1b\x03" for key in _SPECIAL_KEY.sub(b"", typed))


def _view(follower: Follower, columns: int, lines: int) -> RenderableType:
    trouble, status = follower.trouble, follower.status
    if status is None:
        return Text(trouble or "connecting")
    if trouble is None:
        return screen(status, follower.samples, columns=columns, lines=lines)
    warning = Text(f"lost: {trouble}. What is shown is from before; trying again.", "bold red", no_wrap=True)
    warning.overflow = "ellipsis"
    return Group(warning, screen(status, follower.samples, columns=columns, lines=lines - 1))


@contextlib.contextmanager
def _interrupts(told: Callable[[], None]) -> Iterator[None]:
    """SIGINT is ``told``, and raises nothing within the block."""
    before = signal.signal(signal.SIGINT, lambda *_: told())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """The terminal's input, key by key and unseen; as it was after the block."""
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSANOW, before)  # not after what nobody may read any more
