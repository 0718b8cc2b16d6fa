"""The commands of docs/operations.md are run, top to bottom, against a real daemon."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.outcome import Outcome
from tests.cli.conftest import store
from tests.daemon.client import Client

DOCS = Path(__file__).parents[2] / "docs"
RUNBOOK = DOCS / "operations.md"
ALERTS = DOCS.parent / "monitoring" / "alerts.yml"
PLACES = ("/etc/hicached", "/var/lib/hicached", "/run/hicached", "/backup", "/var/log")
BLOCK_TIMEOUT_S = 60

# Plays the service manager for one unit: `systemctl start|stop|restart|reload hicached`.
SYSTEMCTL = """#!/bin/bash
set -eu
[ "$2" = hicached ]
pid_file="$HICACHE_ROOT/pid"
start() {
    rm -f "$HICACHE_ROOT/ready"
    hicached --config "$HICACHE_ROOT/etc/hicached.toml" --ready-file "$HICACHE_ROOT/ready" \\
        >> "$HICACHE_ROOT/log" 2>&1 &
    echo $! > "$pid_file"
    while [ ! -e "$HICACHE_ROOT/ready" ]; do kill -0 "$(cat "$pid_file")"; sleep 0.05; done
}
stop() {
    kill "$(cat "$pid_file")"
    while kill -0 "$(cat "$pid_file")" 2> /dev/null; do sleep 0.05; done
    rm "$pid_file"
}
case "$1" in
    start) start ;;
    stop) stop ;;
    restart) stop; start ;;
    reload) kill -HUP "$(cat "$pid_file")" ;;
esac
"""


def blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL)


class Node:
    """A machine of its own, as far as the runbook goes: its places, its commands, its port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._http = f"127.0.0.1:{free.getsockname()[1]}"
        for place in PLACES:
            (root / place.lstrip("/")).mkdir(parents=True)
        self._commands = root / "bin"
        self._commands.mkdir()
        python = f"exec {sys.executable} -W ignore -m"
        self._command("hicache", f'#!/bin/sh\n{python} hicache.cli "$@"\n')
        self._command("hicached", f'#!/bin/sh\n{python} hicache.daemon "$@"\n')
        self._command("systemctl", SYSTEMCTL)
        if shutil.which("jq") is None:
            program = 'import json, sys; [print(row["namespace"]) for row in json.load(sys.stdin)["namespaces"]]'
            self._command("jq", f"#!/bin/sh\nexec {sys.executable} -c '{program}'\n")
        if shutil.which("curl") is None:
            program = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[-1]).read().decode())"
            self._command("curl", f"#!/bin/sh\nexec {sys.executable} -c '{program}' \"$@\"\n")

    def _command(self, name: str, text: str) -> None:
        path = self._commands / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, block: str) -> subprocess.CompletedProcess[str]:
        for place in PLACES:
            block = block.replace(place, str(self.root / place.lstrip("/")))
        block = block.replace("127.0.0.1:9470", self._http)
        environment = os.environ | {
            "PATH": f"{self._commands}:{os.environ['PATH']}",
            "PYTHONPATH": os.getcwd(),
            "HICACHE_ROOT": str(self.root),
            "HICACHE_ADMIN": str(self.root / "run/hicached/hicached.sock.admin"),
        }
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            capture_output=True,
            text=True,
            env=environment,
            timeout=BLOCK_TIMEOUT_S,
        )

    def run_whole(self, block: str) -> subprocess.CompletedProcess[str]:
        """One that has to succeed."""
        ran = self.run(block)
        assert ran.returncode == 0, (block, ran.stdout, ran.stderr, self.log)
        return ran

    @property
    def target(self) -> str:
        return f"unix:{self.root}/run/hicached/hicached.sock"

    @property
    def token(self) -> str:
        return (self.root / "etc/hicached/alice.token").read_text().strip()

    @property
    def log(self) -> str:
        log = self.root / "log"
        return log.read_text() if log.exists() else ""

    def stop(self) -> None:
        if (self.root / "pid").exists():
            self.run("systemctl stop hicached")


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    made = Node(folder)
    yield made
    made.stop()


@pytest.mark.timeout(300)  # some thirty processes, which wait for each other where cores are short
def test_the_commands_of_the_runbook_work_from_top_to_bottom(node: Node) -> None:
    install, *others = blocks()
    assert len(others) >= 11
    node.run_whole(install)
    with Client(node.target, token=node.token) as client:
        keys = store(client, range(5))
    for block in others:
        if "hicache import" not in block:
            node.run_whole(block)
            continue
        export, restore = block.split("for file in", 1)
        node.run_whole(export)
        with Client(node.target, token=node.token) as client:
            assert client.delete(keys) == [Outcome.OK] * 5
        assert "5 stored" in node.run_whole(f"for file in{restore}").stdout
    with Client(node.target, token=node.token) as client:
        assert client.present(keys) == [True] * 5, "after everything that was done"
    exports = list((node.root / "backup").glob("*.hicache"))
    assert len(exports) == 1
    assert exports[0].stat().st_size > 5 * 5000
    metrics = node.run("curl -fsS http://127.0.0.1:9470/metrics")
    capacity = re.search(r"^hicache_store_capacity_bytes (\S+)$", metrics.stdout, re.MULTILINE)
    assert capacity is not None
    assert float(capacity[1]) == 96 << 20, "the reload was taken"
    assert "mallory" not in (node.root / "etc/hicached/tenants").read_text()


@pytest.mark.skipif(not ALERTS.exists(), reason="the alert rules are not in this checkout")
def test_every_alert_has_its_section_and_no_other() -> None:
    shipped = re.findall(r"^\s*- alert: (\w+)$", ALERTS.read_text(), re.MULTILINE)
    sections = re.findall(r"^### alert-(\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == shipped
    links = re.findall(r"docs/operations\.md#([\w-]+)", ALERTS.read_text())
    assert links == [f"alert-{name.lower()}" for name in shipped]


def test_every_link_of_the_runbook_leads_somewhere() -> None:
    text = RUNBOOK.read_text()
    anchors = {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        if file:
            assert (DOCS / file).exists(), link
        else:
            assert anchor in anchors, link
