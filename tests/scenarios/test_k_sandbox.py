"""BR-122: under the restrictions of its unit hicached does all that it does, and says what stands in its way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from hicache.client import DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from tests.client.memory import SmallMemory
from tests.client.support import QUICK, SPEC, get, key, put
from tests.daemon.client import Client
from tests.daemon.raw_links import object_key, payload_of
from tests.daemon.rig import TOKEN, DaemonProcess, http_get, refused_start, tenants_file, wait_until
from tests.security.conftest import TlsRig
from tests.systemd.manager import HAS_ANALYZE, ROOT, Manager, allowed_calls, unit_directives
from tests.systemd.seccomp import load_library
from tests.systemd.test_service import put_and_get

PAGE = 64 * 1024
KEYS = [object_key(number) for number in range(4)]
SERVICE = ROOT / "systemd/hicached.service"


def round_trip(address: str) -> None:
    """An object goes there and comes back over TLS."""
    with (
        closing(SmallMemory(PAGE)) as memory,
        closing(DaemonL3(address, spec=SPEC, memory=memory, settings=QUICK, token=TOKEN)) as remote,
    ):
        wait_until(lambda: remote.wait_ready(timeout_s=1), what="a session")
        memory.buffer[:PAGE] = payload_of(9, PAGE)
        assert put(remote, [L3Item(key(9), 0, PAGE)]) == [Outcome.OK]
        memory.buffer[:PAGE] = bytes(PAGE)
        assert get(remote, [L3Item(key(9), 0, PAGE)]) == [Outcome.OK]
        assert memory.buffer[:PAGE] == payload_of(9, PAGE)


def has_seccomp() -> bool:
    try:
        load_library()
    except OSError:
        return False
    return HAS_ANALYZE


@pytest.mark.skipif(not has_seccomp(), reason="systemd-analyze and libseccomp2 are needed: apt-get install systemd")
@pytest.mark.parametrize(("backend", "starts"), [("lmdb", 2), ("file", 1)])
def test_br_122_hicached_does_everything_under_the_restrictions_of_its_unit(
    manager: Manager, backend: str, starts: int
) -> None:
    """With files over TLS, and encrypted."""
    rig = TlsRig(manager.folder) if backend == "file" else None
    masters = manager.folder / "masters"
    masters.write_text(f"k1 {sha256(b'k1').hexdigest()}\n")
    masters.chmod(0o600)
    secured = {} if rig is None else rig.settings(encryption_keys=str(masters))
    manager.listen_unix()
    http_address = manager.listen("127.0.0.1:0")
    listen, bulk = manager.listen("127.0.0.1:0"), manager.listen("127.0.0.1:0")
    [families] = unit_directives(SERVICE, "RestrictAddressFamilies")
    settings = manager.folder / "hicached.toml"
    settings.write_text('capacity_bytes = "64MiB"\n')
    for _ in range(starts):
        manager.start(
            allowed_calls=allowed_calls(SERVICE),
            families=families.split(),
            refuses_writable_code=True,
            backend=backend,
            config=str(settings),
            capacity_bytes=None,
            object_bytes_max="8MiB",
            http=http_address,
            **secured | {"listen": listen, "bulk_listen": bulk},
            tenants_file=tenants_file(manager.folder),
            trace_file=str(manager.folder / "trace"),
        )
        manager.wait_ready()
        with Client(f"unix:{manager.folder}/s.sock", token=TOKEN) as client:
            put_and_get(client)
            assert client.put_stream(KEYS[1:3], [payload_of(2, 8 << 20)] * 2)
        if rig is None:
            with Client(listen, token=TOKEN) as client:
                assert client.get_stream(KEYS[:1], [PAGE]) == [payload_of(1, PAGE)]
        else:
            round_trip(rig.address(listen, certificate=rig.client))
        settings.write_text('capacity_bytes = "32MiB"\n')
        manager.signal(signal.SIGHUP)
        manager.hear_until(lambda message: "RELOADING" in message)
        assert manager.hear_until(lambda message: "READY" in message)["STATUS"] == "serving clients", manager.log
        assert http_get(http_address, "/metrics")[0] == 200
        manager.signal(signal.SIGTERM)
        assert manager.wait_end() == 0, manager.log
    assert "not permitted" not in manager.log


@pytest.mark.skipif(not has_seccomp(), reason="systemd-analyze and libseccomp2 are needed: apt-get install systemd")
def test_br_122_the_filter_filters_and_what_it_forbids_is_told_at_the_start(manager: Manager) -> None:
    manager.start(
        allowed_calls=allowed_calls(SERVICE), families=["AF_UNIX"], http="127.0.0.1:0", refuses_writable_code=True
    )
    assert manager.wait_end() == 2
    assert "hicached.socket" in manager.log
    denied = manager.folder / "denied.json"
    code = "import os, json, sys\ntry: os.chown(sys.argv[1], 0, 0)\nexcept OSError as error: print(error.errno)"
    denied.write_text("{}")
    told = {"fds": [], "names": "", "filter": allowed_calls(SERVICE), "families": ["AF_UNIX"], "mdwe": False}
    command = [sys.executable, "-m", "tests.systemd.launcher", json.dumps(told), sys.executable, "-c", code]
    result = subprocess.run([*command, str(denied)], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "1\n", result.stderr


@pytest.mark.parametrize("setting", ["path", "ready_file", "trace_file"])
def test_br_122_a_place_that_the_sandbox_hides_is_an_error_with_its_setting(
    start: Callable[..., DaemonProcess], folder: Path, setting: str
) -> None:
    """As ProtectSystem= and ProtectHome= do, /proc lets nobody make anything, not even root."""
    hidden = "/proc/hicached/store"
    code, line = refused_start(start(wait=False, **{setting: hidden}))
    assert code == 2
    assert setting in line
    assert hidden in line
