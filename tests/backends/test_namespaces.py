"""Names of namespaces outlive a restart, are bounded, and are never needed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hicache.backends import namespaces
from hicache.backends.namespaces import NAMES_FILE, NamespaceNames, namespace_tag, parse_namespace, tag_text
from hicache.errors import ConfigError

TENANT = b"t" * 16


def digest(number: int) -> bytes:
    return number.to_bytes(4, "big") + b"d" * 28


def test_a_tag_is_how_the_digest_begins() -> None:
    tag = namespace_tag(digest(0xABCDEF01))
    assert tag_text(tag) == "abcdef01" == digest(0xABCDEF01).hex()[:8]
    assert parse_namespace("ABCDEF01") == parse_namespace(digest(0xABCDEF01).hex()) == tag
    assert (parse_namespace("unknown"), tag_text(0)) == (0, "unknown")
    for wrong in ("", "abc", "abcdefg1", "a" * 65, "0x123456"):
        with pytest.raises(ConfigError, match="the first 8 or more hexadecimal digits"):
            parse_namespace(wrong)


def test_names_outlive_a_restart_and_the_least_recent_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "NAMES_MAX", 3)
    names = NamespaceNames(tmp_path)
    for number in (1, 2, 3, 1, 4):
        names.meet(TENANT, digest(number), b"fields", now_s=float(number))
    names.write()
    again = NamespaceNames(tmp_path)
    assert [again.get(TENANT, number) is not None for number in (1, 2, 3, 4)] == [True, False, True, True]
    found = again.get(TENANT, 4)
    assert found is not None
    assert (found.digest, found.descriptor, found.session_at_s) == (digest(4), b"fields", 4.0)
    assert again.get(b"o" * 16, 4) is None, "of another tenant"
    again.forget(TENANT)
    again.write()
    assert NamespaceNames(tmp_path).get(TENANT, 4) is None
    assert (tmp_path / NAMES_FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x91\xc0", b"\xdd\xff\xff\xff\xff", b"\x81" * 5000])
def test_a_file_that_cannot_be_read_is_no_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAMES_FILE).write_bytes(content)
    told: list[str] = []
    names = NamespaceNames(tmp_path, on_failure=told.append)
    assert len(told) == 1
    names.meet(TENANT, digest(1), b"", now_s=0.0)
    names.write()
    assert NamespaceNames(tmp_path).get(TENANT, 1) is not None


def test_a_directory_that_is_gone_is_told_and_tried_again(tmp_path: Path) -> None:
    told: list[str] = []
    names = NamespaceNames(tmp_path / "store", on_failure=told.append)
    names.meet(TENANT, digest(1), b"", now_s=0.0)
    names.write()
    assert len(told) == 1
    (tmp_path / "store").mkdir()
    names.write()
    assert (len(told), (tmp_path / "store" / NAMES_FILE).exists()) == (1, True)
    names.write()


def test_many_threads_meet_and_write(tmp_path: Path) -> None:
    names = NamespaceNames(tmp_path)

    def work(start: int) -> None:
        for number in range(start, start + 50):
            names.meet(TENANT, digest(number), b"", now_s=0.0)
            names.write()

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names.write()
    again = NamespaceNames(tmp_path)
    assert all(again.get(TENANT, 1000 * start + number) for start in range(1, 5) for number in range(50))
    assert [path.name for path in tmp_path.iterdir()] == [NAMES_FILE]
