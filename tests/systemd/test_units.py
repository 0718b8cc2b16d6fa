"""The units as they are installed: where, with which paths, and how little they leave to the service."""

from __future__ import annotations

import difflib
import re
import subprocess
from pathlib import Path

import pytest

from hicache.daemon.config import DaemonConfig, load_config
from hicache.daemon.listeners import NAMES
from hicache.daemon.process_limits import FILES_MIN, files_needed
from tests.systemd.manager import HAS_ANALYZE, ROOT, unit_directives

# Of 10; what is left is that it runs in the host's root folder, may use Unix sockets, sees /proc/sys and other users.
EXPOSURE_MAX = 0.4

needs_analyze = pytest.mark.skipif(not HAS_ANALYZE, reason="systemd-analyze is missing: apt-get install systemd")
UNITS = ("hicached.service", "hicached.socket", "hicached@.service", "hicached@.socket")


def make(target: str, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-s", "-C", str(ROOT), target, f"DESTDIR={folder}", *settings]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the units are; their hicached is a program that exists, as verify wants."""
    folder = tmp_path_factory.mktemp("root")
    result = make("install-systemd", folder, "PREFIX=/usr", "HICACHED=/bin/true")
    assert result.returncode == 0, result.stderr
    return folder / "usr/lib/systemd/system"


def test_paths_are_filled_in_and_uninstalling_leaves_the_configuration(tmp_path: Path) -> None:
    assert make("install-systemd", tmp_path, "PREFIX=/opt/hc", "SYSCONFDIR=/opt/etc").returncode == 0
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    assert not [path for path, text in texts.items() if re.search(r"@[A-Z]+@", text)]
    unit = texts[tmp_path / "opt/hc/lib/systemd/system/hicached.service"]
    assert "ExecStart=/opt/hc/bin/hicached --config /opt/etc/hicached.toml\n" in unit
    config = tmp_path / "opt/etc/hicached.toml"
    config.write_text('socket = "/elsewhere"\n')
    assert make("install-systemd", tmp_path, "PREFIX=/opt/hc", "SYSCONFDIR=/opt/etc").returncode == 0
    assert config.read_text() == 'socket = "/elsewhere"\n'
    assert make("uninstall-systemd", tmp_path, "PREFIX=/opt/hc", "SYSCONFDIR=/opt/etc").returncode == 0
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {config}


def test_a_hicached_that_the_unit_could_not_see_is_not_installed(tmp_path: Path) -> None:
    result = make("install-systemd", tmp_path, "HICACHED=/home/me/bin/hicached")
    assert result.returncode != 0
    assert "/home/me/bin/hicached" in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_installed_configuration_is_one(tmp_path: Path) -> None:
    assert make("install-systemd", tmp_path).returncode == 0
    text = (tmp_path / "etc/hicached.toml").read_text(encoding="utf-8")
    (tmp_path / "settings.toml").write_text(re.sub(r"^#(\w+ =)", r"\1", text, flags=re.MULTILINE))
    config = load_config(str(tmp_path / "settings.toml"), {"socket": str(tmp_path / "s")})
    assert config.tenants_file == "/etc/hicached/tenants"


@needs_analyze
def test_systemd_finds_nothing_wrong(installed: Path) -> None:
    units = [str(installed / name.replace("@.", "@one.")) for name in UNITS]
    result = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@needs_analyze
def test_systemd_finds_what_is_wrong(installed: Path, tmp_path: Path) -> None:
    unit = tmp_path / "hicached.service"
    unit.write_text((installed / "hicached.service").read_text().replace("Type=notify", "Type=notified"))
    assert "notified" in subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True).stderr


@needs_analyze
@pytest.mark.parametrize("name", ["hicached.service", "hicached@.service"])
def test_the_service_may_do_little(installed: Path, name: str, tmp_path: Path) -> None:
    assert exposure(installed / name) <= EXPOSURE_MAX
    weaker = tmp_path / name
    weaker.write_text((installed / name).read_text().replace("ProtectSystem=strict\n", ""))
    assert exposure(weaker) > EXPOSURE_MAX, "the score sees what is missing"


def exposure(unit: Path) -> float:
    """The score of systemd-analyze security: 0 may do nothing, 10 everything."""
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(unit)]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert found, said
    return float(found[1])


def test_an_instance_is_a_service_like_the_one_but_for_its_names() -> None:
    for kind in ("service", "socket"):
        one = (ROOT / f"systemd/hicached.{kind}").read_text(encoding="utf-8").splitlines()
        many = (ROOT / f"systemd/hicached@.{kind}").read_text(encoding="utf-8").splitlines()
        for line in difflib.ndiff(one, many):
            if line.startswith("+ "):
                assert "%i" in line or "nstance" in line, f"{kind}: {line}"


def test_the_sockets_are_those_of_the_default_settings() -> None:
    config = DaemonConfig()
    expected = {config.socket, config.memory_socket, config.bulk_socket, config.admin_socket, config.http}
    assert set(unit_directives(ROOT / "systemd/hicached.socket", "ListenStream")) == expected
    assert len(NAMES) == len(expected) + 2, "listen and bulk_listen are off by default"


def test_the_limit_on_files_is_enough_for_the_sessions_that_it_names() -> None:
    unit = ROOT / "systemd/hicached.service"
    [limit] = unit_directives(unit, "LimitNOFILE")
    named = re.search(r"enough for sessions_max = (\d+)", unit.read_text(encoding="utf-8"))
    assert named
    assert files_needed(DaemonConfig(sessions_max=int(named[1]))) <= int(limit)


def test_what_the_docs_say_of_the_units_is_in_them() -> None:
    docs = (ROOT / "docs/hicached.md").read_text(encoding="utf-8").partition("\n## systemd\n")[2]
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "systemd").iterdir()}
    said = re.findall(r"`((?:WatchdogSec|LimitNOFILE|Type|LoadCredential)=[^` ]+)`", docs)
    assert {word.partition("=")[0] for word in said} == {"WatchdogSec", "LimitNOFILE", "Type", "LoadCredential"}
    for word in said:
        assert word in texts["hicached.service"] or word in ("Type=notify-reload",), word
    [group] = unit_directives(ROOT / "systemd/hicached.socket", "SocketGroup")
    assert f"usermod -aG {group} ENGINE_USER" in docs
    assert f"g {group} -" in texts["hicached.sysusers"]
    assert f"{EXPOSURE_MAX} of 10" in docs
    assert f"fewer than {FILES_MIN}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"less than {FILES_MIN}" in docs
