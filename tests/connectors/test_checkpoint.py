"""Checkpoints are the same when what is in their files is, and only then."""

from __future__ import annotations

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.connectors.checkpoint import (
    OPAQUE_STRIDE_BYTES,
    TENSOR_STRIDE_BYTES,
    WHOLE_BYTES_MAX,
    fingerprint_adapter,
    fingerprint_checkpoint,
)
from hicache.errors import ConfigError

SIZES = {"embed": 200_000, "layers.0.q": 60_000, "layers.0.k_scale": 4, "norm": WHOLE_BYTES_MAX}


def write_safetensors(path: Path, tensors: dict[str, bytes], **metadata: str) -> dict[str, int]:
    """Returns where each tensor begins in the file."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    begins = {}
    for name, payload in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [offset, offset + len(payload)]}
        begins[name] = offset
        offset += len(payload)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(tensors.values()))
    return {name: 8 + len(raw) + begin for name, begin in begins.items()}


def tensors(seed: int = 0) -> dict[str, bytes]:
    return {name: bytes((i * 31 + seed + len(name)) % 251 for i in range(size)) for name, size in SIZES.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_safetensors(folder / "model-1.safetensors", tensors())
    write_safetensors(folder / "model-2.safetensors", tensors(seed=9))
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def flip(path: Path, offset: int, count: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        changed = bytes(byte ^ 0xFF for byte in file.read(count))
        file.seek(offset)
        file.write(changed)


def test_a_copy_elsewhere_with_other_times_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "another name"
    shutil.copytree(checkpoint, copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    assert fingerprint_checkpoint(copy) == fingerprint_checkpoint(checkpoint)
    assert fingerprint_checkpoint(copy, threads=1) == fingerprint_checkpoint(checkpoint)


@pytest.mark.parametrize("name", SIZES)
def test_another_content_of_any_one_tensor_is_another_checkpoint(checkpoint: Path, name: str) -> None:
    before = fingerprint_checkpoint(checkpoint)
    changed = {**tensors(), name: bytes(SIZES[name])}
    write_safetensors(checkpoint / "model-1.safetensors", changed)
    assert fingerprint_checkpoint(checkpoint) != before


@settings(max_examples=40, deadline=None)
@given(
    offset=st.integers(0, SIZES["norm"] + SIZES["layers.0.k_scale"] - 1), shard=st.sampled_from(["model-1", "model-2"])
)
def test_a_flipped_byte_of_a_small_tensor_is_another_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, offset: int, shard: str
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    small = {name: payload for name, payload in tensors().items() if len(payload) <= WHOLE_BYTES_MAX}
    for name in ("model-1", "model-2"):
        begins = write_safetensors(folder / f"{name}.safetensors", small)
    before = fingerprint_checkpoint(folder)
    flip(folder / f"{shard}.safetensors", min(begins.values()) + offset)
    assert fingerprint_checkpoint(folder) != before


def test_what_is_in_the_header_counts(checkpoint: Path) -> None:
    seen = {fingerprint_checkpoint(checkpoint)}
    first = checkpoint / "model-1.safetensors"
    write_safetensors(first, tensors(), format="pt")
    seen.add(fingerprint_checkpoint(checkpoint))
    write_safetensors(first, {name[::-1]: payload for name, payload in tensors().items()})
    seen.add(fingerprint_checkpoint(checkpoint))
    assert len(seen) == 3


def test_a_file_more_or_less_or_renamed_is_another_checkpoint(checkpoint: Path) -> None:
    seen = {fingerprint_checkpoint(checkpoint)}
    (checkpoint / "model-2.safetensors").rename(checkpoint / "model-3.safetensors")
    seen.add(fingerprint_checkpoint(checkpoint))
    (checkpoint / "model-3.safetensors").unlink()
    seen.add(fingerprint_checkpoint(checkpoint))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("hf_quant_config.json", True),
        ("kv_cache_scales.json", True),
        ("modeling_own.py", True),
        ("tokenizer.json", False),
        ("generation_config.json", False),
        ("README.md", False),
        ("config.json", False),  # reaches the namespace parsed
    ],
)
def test_other_files_count_when_bytes_depend_on_them(checkpoint: Path, name: str, counts: bool) -> None:
    before = fingerprint_checkpoint(checkpoint)
    (checkpoint / name).write_text("{}")
    assert (fingerprint_checkpoint(checkpoint) != before) is counts


@pytest.mark.parametrize("place", [0, OPAQUE_STRIDE_BYTES * 2 - 1])
def test_a_file_without_a_header_counts_by_its_parts(tmp_path: Path, place: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(OPAQUE_STRIDE_BYTES * 2))
    before = fingerprint_checkpoint(tmp_path)
    flip(path, place)
    assert fingerprint_checkpoint(tmp_path) != before


def test_a_broken_header_is_read_as_a_file_of_unknown_form(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    seen = set()
    for content in (b"", b"short", (1 << 60).to_bytes(8, "little") + b"x" * 100, (2).to_bytes(8, "little") + b"[]zz"):
        path.write_bytes(content)
        seen.add(fingerprint_checkpoint(tmp_path))
    assert len(seen) == 4


def test_sampling_misses_a_byte_of_a_large_tensor_that_full_finds(tmp_path: Path) -> None:
    payload = bytes(TENSOR_STRIDE_BYTES)
    begins = write_safetensors(tmp_path / "model.safetensors", {"w": payload})
    sampled = fingerprint_checkpoint(tmp_path)
    full = fingerprint_checkpoint(tmp_path, depth="full")
    missed = 0
    for place in (5_000, 700_000, 8_000_000):
        flip(tmp_path / "model.safetensors", begins["w"] + place)
        missed += fingerprint_checkpoint(tmp_path) == sampled
        assert fingerprint_checkpoint(tmp_path, depth="full") != full
        flip(tmp_path / "model.safetensors", begins["w"] + place)
    assert missed  # what decision 35 says of it is so
    assert fingerprint_checkpoint(tmp_path) == sampled


def to_hub(folder: Path, cache: Path) -> Path:
    """The same files as the Hugging Face cache holds them: links to blobs that are named by content."""
    snapshot = cache / "snapshots" / "abc"
    blobs = cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        name = sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blobs / name)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", name))
    return snapshot


def test_the_hub_cache_tells_a_byte_apart_without_reading_it(checkpoint: Path, tmp_path: Path) -> None:
    begins = write_safetensors(checkpoint / "model-1.safetensors", {"w": bytes(100_000)})
    before = to_hub(checkpoint, tmp_path / "before")
    local = fingerprint_checkpoint(checkpoint)
    flip(checkpoint / "model-1.safetensors", begins["w"] + 30_000)
    after = to_hub(checkpoint, tmp_path / "after")
    assert fingerprint_checkpoint(before) != fingerprint_checkpoint(after)
    assert fingerprint_checkpoint(checkpoint, depth="full") == fingerprint_checkpoint(after)
    assert fingerprint_checkpoint(checkpoint) != fingerprint_checkpoint(after)  # a miss: the copy knows less of itself
    assert local != fingerprint_checkpoint(before)


def test_a_folder_without_weights_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="weights_revision"):
        fingerprint_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="weights_revision"):
        fingerprint_checkpoint(tmp_path / "nothing here")
    with pytest.raises(ConfigError, match="sampled, full"):
        fingerprint_checkpoint(tmp_path, depth="deep")  # type: ignore[arg-type]  # as a user would write it


def test_an_adapter_counts_to_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(bytes(3 << 20))
    before = fingerprint_adapter(tmp_path)
    flip(path, (2 << 20) + 77)
    changed = fingerprint_adapter(tmp_path)
    flip(path, (2 << 20) + 77)
    assert before == fingerprint_adapter(tmp_path) != changed
