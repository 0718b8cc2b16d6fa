"""Settings: each one checked, and all of them against each other."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.daemon.config import FIELDS, DaemonConfig, load_config, to_toml
from hicache.daemon.settings import HostPort, parse_tcp, size
from hicache.errors import ConfigError

MIB = 1 << 20


def load(folder: Path, **settings: object) -> DaemonConfig:
    return load_config(None, {"socket": str(folder / "s.sock"), "path": str(folder / "store")} | settings)


def load_toml(folder: Path, text: str) -> DaemonConfig:
    file = folder / "hicached.toml"
    file.write_text(text + f'\nsocket = "{folder}/s.sock"\npath = "{folder}/store"\n')
    return load_config(str(file), {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("10GiB", 10 << 30), ("1.5 MiB", 3 * MIB // 2), ("500MB", 500_000_000), ("7 kB", 7000), ("2KiB", 2048)],
)
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert size(0)("capacity_bytes", text) == expected


@pytest.mark.parametrize(
    "value", ["", "GiB", "-1", "1e9", "10 gib", "1.2.3MiB", "10GiBx", True, 1.5, None, [1], "9" * 30]
)
def test_sizes_that_mean_nothing_are_refused(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        size(0)("capacity_bytes", value)
    assert caught.value.setting == "capacity_bytes"
    assert "10GiB" in str(caught.value)


@given(text=st.text(max_size=20))
def test_no_text_makes_the_parsers_fail_otherwise_than_with_a_config_error(text: str) -> None:
    for name, field in FIELDS.items():
        with contextlib.suppress(ConfigError):
            field.metadata["parse"](name, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:1", HostPort("127.0.0.1", 1)),
        ("localhost:0", HostPort("127.0.0.1", 0)),
        ("[::1]:65535", HostPort("::1", 65535)),
        ("", None),
    ],
)
def test_tcp_addresses_are_read(text: str, expected: HostPort | None) -> None:
    assert parse_tcp("listen", text) == expected
    if expected is not None:
        assert parse_tcp("listen", str(expected)) == expected


@pytest.mark.parametrize("text", ["1", ":1", "host:1", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "::1:1", "[::1]"])
def test_tcp_addresses_that_would_be_a_guess_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="listen"):
        parse_tcp("listen", text)


def test_the_file_is_read_and_flags_override_it(folder: Path) -> None:
    file = folder / "hicached.toml"
    file.write_text(f'socket = "{folder}/s.sock"\ncapacity_bytes = "2GiB"\nio_threads = 3\n')
    config = load_config(str(file), {"io_threads": "5", "backend": None})
    assert (config.capacity_bytes, config.io_threads, config.backend) == (2 << 30, 5, "lmdb")


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("io_threads = true", "io_threads"),
        ("io_threads = 1.0", "io_threads"),
        ("high_watermark = 'x'", "high_watermark"),
        ("high_watermark = nan", "high_watermark"),
        ("socket_mode = 0o600", "socket_mode"),
        ("nonsense = 1", "nonsense"),
        ("[section]\na = 1", "section"),
        ("= broken", "config"),
        ("io_threads = 1\nio_threads = 2", "config"),
    ],
)
def test_wrong_files_are_refused_with_the_setting(folder: Path, text: str, setting: str) -> None:
    file = folder / "hicached.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(file), {"socket": str(folder / "s.sock")})
    assert caught.value.setting == setting


def test_a_missing_file_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="config"):
        load_config(str(folder / "none.toml"), {})


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"low_watermark": 0.95}, "low_watermark"),
        ({"listen": "127.0.0.1:1"}, "listen"),
        ({"object_bytes_max": "2MiB", "batch_bytes_max": "1MiB"}, "object_bytes_max"),
        ({"object_bytes_max": "2MiB", "capacity_bytes": "1MiB"}, "object_bytes_max"),
        ({"session_inflight_bytes_max": "2MiB", "inflight_bytes_max": "1MiB"}, "session_inflight_bytes_max"),
        ({"batch_keys_max": 100_000}, None),
        ({"bulk_listen": "127.0.0.1:1"}, "bulk_listen"),
        ({"listen": "127.0.0.1:65535", "tenants_file": "/tmp/t"}, "bulk_listen"),
        ({"listen": "127.0.0.1:7", "bulk_listen": "127.0.0.1:7", "tenants_file": "/tmp/t"}, "bulk_listen"),
        ({"file_shared": True}, "file_shared"),
        ({"http": "/tmp/x", "ready_file": "/tmp/x"}, "ready_file"),
        ({"path": ""}, "path"),
        ({"socket": "/tmp/" + "x" * 100}, "socket"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(
    folder: Path, settings: dict[str, Any], setting: str | None
) -> None:
    if setting is None:
        load(folder, **settings)
        return
    with pytest.raises(ConfigError) as caught:
        load(folder, **settings)
    assert caught.value.setting == setting


def test_paths_that_collide_with_the_socket_are_refused(folder: Path) -> None:
    for name in ("s.sock", "s.sock.memory", "s.sock.lock"):
        with pytest.raises(ConfigError, match="another path"):
            load(folder, ready_file=str(folder / name))


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity_bytes": "1MiB"},
        {"object_bytes_max": "2GiB"},
        {"inflight_bytes_max": "1MiB"},
        {"batch_bytes_max": "1MiB"},
        {"session_inflight_bytes_max": "4GiB"},
    ],
    ids=str,
)
def test_one_bound_can_be_changed_alone(folder: Path, settings: dict[str, str]) -> None:
    config = load(folder, **settings)
    for name, value in settings.items():
        assert getattr(config, name) == size(0)(name, value)
    assert config.object_bytes_max <= min(
        config.capacity_bytes, config.batch_bytes_max, config.session_inflight_bytes_max
    )
    assert config.session_inflight_bytes_max <= config.inflight_bytes_max


def test_relative_paths_become_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = load_config(None, {"socket": "s.sock", "path": "store"})
    assert (config.socket, config.path) == (str(folder / "s.sock"), str(folder / "store"))


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    capacity=st.integers(1, 1000),
)
def test_printed_settings_are_read_back_to_equal_ones(tmp_path_factory: Any, text: str, capacity: int) -> None:
    folder = tmp_path_factory.mktemp("c")
    before = load_config(
        None,
        {"socket": "/tmp/s.sock", "path": f"/tmp/{text}x", "capacity_bytes": f"{capacity}MiB", "high_watermark": 0.97},
    )
    (folder / "c.toml").write_text(to_toml(before), encoding="utf-8")
    assert load_config(str(folder / "c.toml"), {}) == before


@pytest.mark.parametrize("place", ["", "nowhere/ready.json"])
def test_a_ready_file_that_cannot_be_written_is_refused_before_anything_is_opened(folder: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="ready_file"):
        load(folder, ready_file=str(folder / place))


def test_the_settings_of_files_are_in_the_url_of_the_backend(tmp_path: Path) -> None:
    path = tmp_path / "store"
    assert load(tmp_path, backend="file").backend_url == f"file://{path}"
    assert load(tmp_path, backend="lmdb", file_fsync=True).backend_url == f"lmdb://{path}"
    config = load_toml(tmp_path, 'backend = "file"\nfile_shared = true\nfile_fsync = true\nfile_direct = "off"')
    assert config.backend_url == f"file://{path}?shared=1&fsync=1&direct=off"
    assert load(tmp_path, backend="file", file_fsync="true").file_fsync
    for value in ("yes", 1, None):
        with pytest.raises(ConfigError, match="true or false"):
            load(tmp_path, file_shared=value if value is not None else "")
