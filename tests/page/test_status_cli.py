"""`hicache status` and `hicache top`: what they print, how they end, and `top` in a real terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from hicache.admin.client import Admin
from hicache.admin.screen import screen, size, span, spark
from hicache.admin.status import ErrorCount, SlowObject, Status, TenantUse
from hicache.admin.verbs import STATUS
from hicache.cli import cli, main
from hicache.cli.top import ends_it
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import DaemonProcess
from tests.page.conftest import KIB, MIB, TOKENS

COLUMNS, LINES = 80, 24
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]")


def run(*arguments: str) -> Result:
    """The command in this process, as its entry point runs it, without a terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hicache", *arguments])
        runner = CliRunner(env={"COLUMNS": str(COLUMNS)})
        return runner.invoke(click.Command("main", callback=main), [])


def test_status_is_one_screen_and_exit_code_0(start_tenants: Callable[..., ThreadedDaemon]) -> None:
    daemon = start_tenants()
    with Client(daemon.target, token=TOKENS["alice"]) as alice:
        alice.put_stream([object_key(1)], [b"x" * MIB])
        done = run("status", "--admin", daemon.config.admin_socket)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    lines = done.output.splitlines()
    assert re.fullmatch(r"hicached \S+  ready  lmdb, up \d+ s, 1 of 64 sessions", lines[0].rstrip())
    assert re.search(r"^L3 .* 1\.\d MiB of 64\.0 MiB  1 objects", done.output, re.MULTILINE)
    assert re.search(r"^alice .* 1\.\d MiB of 4\.0 MiB  1 objects", done.output, re.MULTILINE)
    assert re.search(r"^put 1\.0 MiB .* ms .* alice ", done.output, re.MULTILINE)
    assert all(len(line) <= COLUMNS for line in lines)


def test_json_is_the_documented_status_and_nothing_else_is_on_stdout(daemon: ThreadedDaemon, folder: Path) -> None:
    for address in (daemon.config.admin_socket, daemon.ready.http):
        done = run("status", "--admin", address, "--json", "-")
        assert (done.exit_code, msgspec.json.decode(done.stdout, type=Status).state) == (0, "ready")
    run("top", "--admin", daemon.ready.http, "--json", str(folder / "status.json"))
    assert json.loads((folder / "status.json").read_text())["format"] == 1


@pytest.mark.parametrize("verb", ["status", "top"])
def test_exit_codes(daemon: ThreadedDaemon, folder: Path, verb: str) -> None:
    assert run(verb, "--admin", daemon.config.admin_socket).exit_code == 0
    for arguments, code, words in (
        (["--admin", str(folder / "none")], 3, "there is no such socket"),
        (["--admin", "nowhere"], 2, "the absolute path of the admin socket"),
        (["--token-file", str(folder / "none")], 2, "a readable text file"),
        (["--no-such-option"], 2, "No such option"),
    ):
        done = run(verb, *arguments)
        assert (done.exit_code, words in done.stderr) == (code, True), done.output


def test_a_daemon_that_is_not_ready_is_exit_code_1(daemon: ThreadedDaemon) -> None:
    daemon.daemon._readiness = "draining"
    done = run("status", "--admin", daemon.config.admin_socket)
    assert done.exit_code == 1
    assert "  draining  " in done.output


def told(**changes: Any) -> Status:  # Any: values of fields of several types
    """A status with more of everything than a small terminal has lines for."""
    base = json.loads(STATUS_JSON)
    status = msgspec.convert(base, Status)
    tenants = [
        TenantUse(
            name=f"tenant-{number}-" + "n" * 50,
            used_bytes=(1 << 40) - number,
            quota_bytes=1 << 40,
            objects=12_345_678,
            quota_objects=0,
            pinned_bytes=0,
            evicted_objects=0,
            sessions=3,
        )
        for number in range(32)
    ]
    slow = SlowObject(
        at_s=1e9, kind="get", seconds=12.5, size_bytes=MIB, objects=256, tenant="t" * 64, key="0123456789ab"
    )
    errors = [ErrorCount(of="put objects", reason=f"reason_{number}", count=number) for number in range(32)]
    return msgspec.structs.replace(status, tenants=tenants, slowest=[slow] * 10, errors=errors, **changes)


STATUS_JSON = """{"version": "1", "backend": "lmdb", "state": "ready", "at_s": 0, "uptime_s": 90061, "window_s": 3600,
"store_age_s": 0.1, "tiers": [{"name": "l3", "used_bytes": 5, "capacity_bytes": 10, "objects": 1}],
"lookups": {"asked": 10, "found": 5, "hit_rate": 0.5, "ceiling": 0.8},
"traffic": {"read_bytes": 0, "written_bytes": 0, "evicted_bytes": 0, "read_bytes_per_s": 0, "written_bytes_per_s": 0},
"latency": [{"kind": "get", "calls": 0, "p50_s": null, "p99_s": null}],
"sessions": {"open": 1, "limit": 2, "inflight_bytes": 0, "inflight_waiting": 1},
"loop_delay": {"longest_s": 0.25, "core_wait_s": 0.2}, "tenants": [], "tenant_count": 0,
"namespaces": [], "namespace_count": 0, "slowest": [], "errors": []}"""


def rendered(status: Status, *, columns: int, lines: int | None) -> list[str]:
    console = Console(width=columns, force_terminal=False, file=io.StringIO())
    console.print(screen(status, columns=columns, lines=lines), end="")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 12), (200, 60), (20, 5)])
def test_a_screen_keeps_within_its_terminal(columns: int, lines: int) -> None:
    shown = rendered(told(), columns=columns, lines=lines)
    assert len(shown) <= max(lines, 7), "what has no end gives way, what is always there does not"
    assert all(len(line) <= columns for line in shown)


def test_every_table_gets_its_share_of_a_small_terminal() -> None:
    shown = rendered(told(), columns=COLUMNS, lines=LINES)
    assert len(shown) == LINES
    text = "\n".join(shown)
    for word in ("tenants", "tenant-0-", "errors in the last hour", "reason 0", "slowest objects", "get 1.0 MiB"):
        assert word in text
    assert len(rendered(told(), columns=COLUMNS, lines=None)) > 70


def test_what_others_named_cannot_control_the_terminal() -> None:
    tenant = told().tenants[0]
    evil = msgspec.structs.replace(tenant, name="\x1b]0;owned\x07[bold red]x")
    shown = rendered(msgspec.structs.replace(told(), tenants=[evil]), columns=COLUMNS, lines=None)
    [line] = [line for line in shown if "owned" in line]
    assert line.startswith("?]0;owned?[bold r")


def test_sizes_times_and_lines_of_blocks_are_short() -> None:
    assert [size(value) for value in (0, 1023, 1024, 1.5 * MIB, 1023.9 * KIB, 2**60)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "1.0 MiB",
        "1024 PiB",
    ]
    assert [span(value) for value in (5, 65, 3700, 90_061)] == ["5 s", "1 min", "1 h 1 min", "1 d 1 h"]
    assert spark([0.0, None, 0.5, 1.0], top=1.0) == "▁ ▅█"
    assert spark([]) == ""


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = COLUMNS, lines: int = LINES) -> None:
        self._ours, theirs = os.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(theirs)
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hicache.cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environment | {"TERM": "xterm-256color", "LANG": "C.UTF-8"},
        )
        self._theirs = theirs
        self._seen = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, pattern: str, *, within_s: float = 20.0) -> str:
        """Returns what was printed from the last match to this one, without escapes."""
        deadline = time.monotonic() + within_s
        while True:
            plain = ESCAPES.sub("", self._seen)
            match = re.search(pattern, plain)
            if match is not None:
                self._seen = ""
                return plain
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in {plain[-3000:]!r}"
            if select.select([self._ours], [], [], left_s)[0]:
                self._seen += os.read(self._ours, 65536).decode(errors="replace")

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def wait_end(self) -> int:
        """The exit code; the terminal must be as it was."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.05)[0]:
                self._seen += os.read(self._ours, 65536).decode(errors="replace")
        code = self.process.wait(0)
        assert termios.tcgetattr(self._theirs) == self.before
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*arguments: str, **settings: int) -> Terminal:
        opened.append(Terminal(*arguments, **settings))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_top_lives_through_a_restart_takes_another_size_and_ends_on_q(
    start: Callable[..., DaemonProcess], terminal: Callable[..., Terminal]
) -> None:
    daemon = start()
    top = terminal("top", "--admin", f"{daemon.settings['socket']}.admin")
    first = top.wait_for(r"hicached \S+  ready")
    assert "0 of 64 sessions" in first + top.wait_for("tenants")
    with Client(daemon.target) as client:
        client.put_stream([object_key(1)], [b"x" * KIB])
        top.wait_for(r"1 of 64 sessions")
        top.wait_for(r"put 1\.0 KiB")
    daemon.kill()
    top.wait_for("lost: hicached at ")
    start()
    top.wait_for(r"hicached \S+  ready")
    top.resize(40, 10)
    shown = top.wait_for("L3 ")
    top.wait_for("L3 ")
    top.press(b"x\x1b[A")
    top.wait_for("L3 ")
    assert top.process.poll() is None, "an arrow is no reason to end"
    top.press(b"q")
    assert top.wait_end() == 0, shown


@pytest.mark.parametrize("typed", [b"q", b"Q", b"\x1b", b"\x03", b"", b"x\x1b[Aq", b"\x1b[A\x1b"])
def test_keys_that_end_top(typed: bytes) -> None:
    assert ends_it(typed)


@pytest.mark.parametrize("typed", [b"x", b"\x1b[A", b"\x1bOB", b"\x1b[15~", b"\x1b[1;5C\x1b[B"])
def test_keys_that_do_not_end_top(typed: bytes) -> None:
    assert not ends_it(typed)


def test_ctrl_c_ends_top_as_q_does(daemon: ThreadedDaemon, terminal: Callable[..., Terminal]) -> None:
    top = terminal("top", "--admin", daemon.ready.http)
    top.wait_for("ready")
    with suppress(ProcessLookupError):
        os.killpg(top.process.pid, signal.SIGINT)
    assert top.wait_end() == 0


def test_top_without_a_terminal_shows_it_once_without_colours(daemon: ThreadedDaemon) -> None:
    command = [sys.executable, "-m", "hicache.cli", "top", "--admin", daemon.config.admin_socket]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ready" in done.stdout
    assert "\x1b" not in done.stdout


def test_help_says_what_the_exit_codes_mean() -> None:
    for verb in ("status", "top"):
        text = CliRunner().invoke(cli, [verb, "--help"]).output
        assert "Exit codes:\n    0  " in text
        assert "    3  no hicached answer" in text


def test_status_tells_what_the_api_tells(daemon: ThreadedDaemon) -> None:
    document = json.loads(run("status", "--admin", daemon.config.admin_socket, "--json", "-").stdout)
    assert set(document) == set(msgspec.to_builtins(Admin(daemon.config.admin_socket).ask(STATUS)))
