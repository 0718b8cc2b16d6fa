"""Seals and the keys that they are made with: what they are bound to, and what damage does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hicache.backends.sealing import SEAL_BYTES, Sealing
from hicache.backends.tenant_keys import MasterKeys, TenantKeys
from hicache.errors import ConfigError
from hicache.tenancy import physical_key
from tests.security.master_keys import ALICE, BOB, disk_full, random_masters


class TestSealing:
    """The seal itself."""

    @pytest.fixture
    def keys(self, tmp_path: Path) -> TenantKeys:
        return TenantKeys(tmp_path / "keys", MasterKeys.read(random_masters(tmp_path)))

    def sealed(self, keys: TenantKeys, key: bytes, text: bytes) -> tuple[bytes, bytes]:
        sealer = Sealing(keys).sealer(key, len(text))
        stored = bytearray(len(text))
        sealer.encrypt_into(memoryview(text), memoryview(stored))
        return bytes(stored), sealer.seal()

    def opened(self, keys: TenantKeys, key: bytes, size_bytes: int, stored: bytes, seal: bytes) -> bytes | None:
        opener = Sealing(keys).opener(key, size_bytes, seal)
        target = bytearray(len(stored))
        if opener is None:
            return None
        opener.decrypt_into(memoryview(stored), memoryview(target))
        return bytes(target) if opener.is_genuine() else None

    def test_nothing_that_a_seal_is_bound_to_can_be_exchanged(self, keys: TenantKeys) -> None:
        key, other = physical_key(ALICE, b"key"), physical_key(ALICE, b"other")
        stored, seal = self.sealed(keys, key, b"text" * 8)
        keys.find_or_make(BOB)
        assert self.opened(keys, key, 32, stored, seal) == b"text" * 8
        assert self.opened(keys, other, 32, stored, seal) is None
        assert self.opened(keys, physical_key(BOB, b"key"), 32, stored, seal) is None
        assert self.opened(keys, key, 33, stored, seal) is None
        assert self.opened(keys, key, 32, stored, seal[:-1]) is None
        for at in range(SEAL_BYTES):
            assert self.opened(keys, key, 32, stored, seal[:at] + bytes([seal[at] ^ 1]) + seal[at + 1 :]) is None
        for at in range(len(stored)):
            assert self.opened(keys, key, 32, stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :], seal) is None

    def test_the_same_object_never_looks_the_same(self, keys: TenantKeys) -> None:
        seen = {self.sealed(keys, physical_key(ALICE, b"key"), b"text" * 8) for _ in range(1000)}
        assert len({stored for stored, _ in seen}) == len({seal[:24] for _, seal in seen}) == 1000

    def test_a_drop_that_failed_is_done_to_its_end_by_the_next(
        self, keys: TenantKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("rename", "unlink"):
            keys.find_or_make(ALICE)
            monkeypatch.setattr(Path, name, disk_full)
            with pytest.raises(OSError, match="No space"):
                keys.drop(ALICE)
            assert keys.find(ALICE) is None
            monkeypatch.undo()
            assert keys.drop(ALICE)
            assert list((tmp_path / "keys").iterdir()) == []
        assert not keys.drop(ALICE)

    def test_many_threads_make_one_key(self, keys: TenantKeys) -> None:
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda: found.append(keys.find_or_make(ALICE))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1

    def test_a_damaged_key_file_stops_the_start_with_what_it_costs(self, keys: TenantKeys, tmp_path: Path) -> None:
        keys.find_or_make(ALICE)
        [file] = (tmp_path / "keys").iterdir()
        whole = file.read_bytes()
        for raw in (b"", b"{}", b"\xff" * 40, whole[:-3], whole.replace(b'wrapped":"', b'wrapped":"00'), bytes(600)):
            file.write_bytes(raw)
            with pytest.raises(ConfigError, match="removing the file gives up"):
                TenantKeys(tmp_path / "keys", MasterKeys.read(str(tmp_path / "random")))
        file.write_bytes(whole)
        assert TenantKeys(tmp_path / "keys", MasterKeys.read(str(tmp_path / "random"))).find(ALICE) == keys.find(ALICE)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "k1\n",
            "k1 abc\n",
            "k1 " + "g" * 64,
            "k1 " + "0" * 64,
            "\xff",
            "k 1 " + "ab" * 32,
            ("k1 " + "0123456789abcdef" * 4 + "\n") * 2,
        ],
    )
    def test_master_keys_that_are_none_are_refused_without_being_quoted(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "m"
        file.write_text(text, encoding="latin-1")
        file.chmod(0o600)
        with pytest.raises(ConfigError) as caught:
            MasterKeys.read(str(file))
        assert not [word for word in text.split() if len(word) > 8 and word in str(caught.value)]

    def test_master_keys_that_everybody_can_read_are_refused(self, tmp_path: Path) -> None:
        file = random_masters(tmp_path)
        MasterKeys.read(file)
        os.chmod(file, 0o644)
        with pytest.raises(ConfigError, match="chmod"):
            MasterKeys.read(file)
