"""Every command has a help with an example, is completed by a shell, is in the docs, and keeps to the exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from bench.admission.traces import load_trace
from hicache.cli import cli, options
from tests.cli.conftest import run, store
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
OLDER = {"demo", "plan", "calibrate"}  # with pages and tests of their own


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_says_what_it_does(name: str) -> None:
    command = COMMANDS[name]
    assert command.help, name
    assert command.help.strip().splitlines()[0].endswith((".", ":", ",")) or len(command.help) > 40
    if name in OLDER:
        return
    assert "Examples:" in (command.epilog or ""), name
    examples = [line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("hicache ")]
    assert any(line.startswith(f"hicache {name}") for line in examples)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.name}"
            assert parameter.help[0].isupper()
            assert parameter.help.rstrip("]").endswith((".", ")")), f"{name} {parameter.name}"


def test_every_command_is_in_the_docs_and_no_other() -> None:
    headings = re.findall(r"^### `hicache ([a-z ]+)`", DOCS.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(set(COMMANDS) - OLDER)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - OLDER))
def test_every_option_is_in_the_docs_and_no_other(name: str) -> None:
    section = DOCS.read_text().split(f"### `hicache {name}`", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
    shared = {"--admin", "--token-file", "--json", "--help"}
    mine = {
        opt
        for parameter in COMMANDS[name].params
        for opt in (*parameter.opts, *parameter.secondary_opts)
        if opt.startswith("--")
    }
    assert set(re.findall(r"`(--[a-z-]+)", section)) - shared == mine - shared


def test_the_exit_codes_in_the_docs_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| ([0-9]) \| (.+) \|$", DOCS.read_text(), re.MULTILINE)
    codes = {value for name, value in vars(options).items() if name.startswith("EXIT_")}
    assert {int(code) for code, _ in rows} == codes
    assert all(len(meaning) > 10 for _, meaning in rows)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hicache", "na"], {"namespaces"}),
        (["hicache", "tenants", "r"], {"rotate"}),
        (["hicache", "verify", "--r"], {"--rate"}),
        (["hicache", "completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes_commands_and_options(words: list[str], expected: set[str], folder: Path) -> None:
    script = folder / "completion"
    script.write_text(run("completion", "bash").out)
    command = folder / "hicache"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore -m hicache.cli "$@"\n')
    command.chmod(0o755)
    function = re.search(r"complete .*-F (_\w+)", script.read_text())
    assert function is not None
    typed = " ".join(f"'{word}'" for word in words)
    asked = f"""
        source {script}
        COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}
        {function[1]} hicache "{words[-1]}" ""
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}
    ran = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, env=environment, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == expected, ran


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_completion(shell: str) -> None:
    ran = run("completion", shell)
    assert (ran.code, "_HICACHE_COMPLETE" in ran.out) == (0, True)
    assert run("completion", "csh").code == 2


def test_a_trace_is_recorded_from_a_running_daemon(daemon: ThreadedDaemon, admin: str, folder: Path) -> None:
    """Until it is full: the third lookup does not fit."""
    import threading

    out = folder / "trace.jsonl"
    results = []
    with Client(daemon.target) as client:
        keys = store(client, range(6))
        thread = threading.Thread(
            target=lambda: results.append(
                run(
                    "trace",
                    "record",
                    "--out",
                    out,
                    "--for",
                    "60",
                    "--max-bytes",
                    "600",
                    "--block-tokens",
                    "16",
                    "--admin",
                    admin,
                    "--json",
                    folder / "json",
                )
            )
        )
        thread.start()
        while thread.is_alive():
            client.lookup([*keys, object_key(77)])
        thread.join()
    assert results[0].code == 0, results[0]
    trace = load_trace(out)
    assert len(trace.requests) >= 2
    assert {tuple(request.blocks) for request in trace.requests} == {tuple(range(7))}
    assert trace.block_tokens == 16
    assert out.stat().st_size <= 600
    assert out.stat().st_mode & 0o077 == 0
    assert not any(key.hex().encode() in out.read_bytes() for key in keys)


def test_a_trace_ends_at_its_time_and_recorders_are_given_back(
    daemon: ThreadedDaemon, admin: str, folder: Path
) -> None:
    for _ in range(5):
        ran = run("trace", "record", "--out", folder / "t", "--for", "0.01s", "--admin", admin)
        assert (ran.code, "0 requests" in ran.out) == (0, True), ran


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--for", "ever"], 2, "for = 'ever'"),
        (["--for", "0"], 2, "seconds = 0.0: expected more than 0"),
        (["--max-bytes", "much"], 2, "max-bytes = 'much'"),
        (["--block-tokens", "0"], 2, "block_tokens = 0"),
    ],
)
def test_bad_input_of_a_trace_is_named(
    arguments: list[str], code: int, says: str, daemon: ThreadedDaemon, admin: str, folder: Path
) -> None:
    ran = run("trace", "record", "--out", folder / "t", *arguments, "--admin", admin)
    assert (ran.code, says in ran.err) == (code, True), ran
    assert not (folder / "t").exists()


def test_a_trace_that_cannot_be_written_is_named(start_thread: Callable[..., ThreadedDaemon], admin: str) -> None:
    start_thread()
    ran = run("trace", "record", "--out", "/nowhere/t", "--for", "1", "--admin", admin)
    assert (ran.code, "out = '/nowhere/t'" in ran.err) == (2, True), ran
