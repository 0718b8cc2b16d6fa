"""Says whether two checkpoints are the same by what is in their files, at a cost that does not grow with their size."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from hicache.errors import ConfigError
from hicache.keys import FieldValue, digest_fields

Depth: TypeAlias = Literal["sampled", "full"]

DEPTHS: tuple[Depth, ...] = ("sampled", "full")
CHUNK_BYTES = 4096
WHOLE_BYTES_MAX = (
    3 * CHUNK_BYTES
)  # tensors up to this are read whole: scales, norms, biases, most of what a patch edits
TENSOR_STRIDE_BYTES = 16 << 20  # one more chunk of a tensor for each of these
OPAQUE_STRIDE_BYTES = 4 << 20  # files whose tensors cannot be told apart
OPAQUE_TAIL_BYTES = 1 << 20  # a PyTorch file ends with a directory that holds a CRC of each tensor
HEADER_BYTES_MAX = 100 << 20  # the limit that safetensors itself sets
READS_PER_TASK = 2048

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".npz", ".ckpt")
_NEVER_COMPUTED_WITH = re.compile(  # config.json reaches the namespace parsed, with what the engine changed in it
    r"config\.json|generation_config\.json|.*token.*\.json|vocab\.json|chat_template\.json|"
    r"trainer_state\.json|all_results\.json|training_args\.bin|optimizer\.(pt|bin)|scheduler\.pt|rng_state.*\.pth"
)
_HUB_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[offset, offset + size_bytes)`` of a file."""

    offset: int
    size_bytes: int


def fingerprint_checkpoint(folder: Path, *, depth: Depth = "sampled", threads: int = 8) -> str:
    """A hex digest of the weights in ``folder``, wherever it lies and however the folder is called.

    Of every weight file: its name, its size, the SHA-256 under which the Hugging Face cache keeps it, if it does, and
    content: of safetensors the whole header and some of every tensor, small ones whole; of others some of every 4 MiB.
    JSON and Python files count whole. With ``full``, every byte counts: that reads the checkpoint once, and equals what
    the hub's cache gives for free.

    ``sampled`` can be fooled by an edit that touches less than a tensor's sampled chunks (a few rows of an embedding),
    in files that are not of the hub's cache; and by a cached file that was edited in place.

    Raises ConfigError where no weight file is.
    """
    if depth not in DEPTHS:
        raise ConfigError("weights", depth, f"one of {', '.join(DEPTHS)}")
    files = sorted(path for path in _files(folder) if not _NEVER_COMPUTED_WITH.fullmatch(path.name))
    weights = [path for path in files if path.suffix in _WEIGHTS]
    if not weights:
        raise ConfigError(
            "model", str(folder), f"a folder with weight files ({' '.join(_WEIGHTS)}), or weights_revision set by hand"
        )
    fields: list[tuple[str, FieldValue]] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="hicache-checkpoint") as pool:
        known = {path: _hub_sha256(path) for path in weights}
        whole = {path: pool.submit(_sha256, path) for path in weights if depth == "full" and known[path] is None}
        for path in files:
            if path.suffix in (".json", ".py"):
                fields.append((path.name, _sha256(path)))
            elif path in known:
                fields += _sampled_fields(path, pool)
                fields.append((f"{path.name}.sha256", whole[path].result() if path in whole else known[path]))
    return digest_fields(fields).hex()


def fingerprint_adapter(folder: Path) -> bytes:
    """32 bytes that stand for every byte of every file in ``folder``: adapters are small. Raises OSError."""
    fields: list[tuple[str, FieldValue]] = []
    for path in sorted(_files(folder)):
        with path.open("rb") as file:
            digest = blake2b(digest_size=32)
            while part := file.read(1 << 20):
                digest.update(part)
        fields.append((path.name, digest.digest()))
    return digest_fields(fields)


def fingerprint_path(path: Path) -> str:
    """A hex digest of what is in a file, or in a folder of weights. Raises OSError where there is neither."""
    return fingerprint_checkpoint(path) if path.is_dir() else _sha256(path)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else iter(())


def _sampled_fields(path: Path, pool: ThreadPoolExecutor) -> Iterator[tuple[str, FieldValue]]:
    file = os.open(path, os.O_RDONLY)
    try:
        size_bytes = os.fstat(file).st_size
        yield f"{path.name}.size", size_bytes
        yield f"{path.name}.sampled", _sampled(file, size_bytes, path.suffix, pool)
    finally:
        os.close(file)


def _hub_sha256(path: Path) -> str | None:
    """The content hash by which the Hugging Face cache names a large file; None for a file that is not of it."""
    target = path.resolve()
    is_of_hub = path.is_symlink() and target.parent.name == "blobs" and _HUB_SHA256.fullmatch(target.name)
    return target.name if is_of_hub else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled(file: int, size_bytes: int, suffix: str, pool: ThreadPoolExecutor) -> bytes:
    header = _safetensors_header(file, size_bytes) if suffix == ".safetensors" else None
    extents = _opaque_extents(size_bytes) if header is None else _tensor_extents(header, size_bytes)
    digest = blake2b(digest_size=32)
    for part in pool.map(lambda reads: _read_digest(file, reads), _batched(extents, READS_PER_TASK)):
        digest.update(part)
    return digest.digest()


def _batched(extents: Iterator[Extent], count: int) -> Iterator[tuple[Extent, ...]]:
    while batch := tuple(islice(extents, count)):
        yield batch


def _read_digest(file: int, extents: tuple[Extent, ...]) -> bytes:
    digest = blake2b(digest_size=32)
    for extent in extents:
        digest.update(os.pread(file, extent.size_bytes, extent.offset))
    return digest.digest()


def _safetensors_header(file: int, size_bytes: int) -> bytes | None:
    """Length and JSON as they lie in the file; None for a file that is not what its name says."""
    header_bytes = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 0 < header_bytes <= min(HEADER_BYTES_MAX, size_bytes - 8):
        return None
    return os.pread(file, 8 + header_bytes, 0)


def _tensor_extents(header: bytes, size_bytes: int) -> Iterator[Extent]:
    """The header, and of each tensor its ends and one chunk in each stride, at a place that its name decides."""
    yield Extent(0, len(header))
    try:
        tensors = json.loads(header[8:])
        places = sorted((name, *entry["data_offsets"]) for name, entry in tensors.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError):
        yield from _opaque_extents(size_bytes)
        return
    for name, begin, end in places:
        yield from _extents(len(header) + begin, end - begin, seed=name.encode(), stride_bytes=TENSOR_STRIDE_BYTES)


def _opaque_extents(size_bytes: int) -> Iterator[Extent]:
    yield from _extents(0, size_bytes, seed=b"", stride_bytes=OPAQUE_STRIDE_BYTES)
    tail_bytes = min(size_bytes, OPAQUE_TAIL_BYTES)
    yield Extent(size_bytes - tail_bytes, tail_bytes)


def _extents(begin: int, size_bytes: int, *, seed: bytes, stride_bytes: int) -> Iterator[Extent]:
    if size_bytes <= WHOLE_BYTES_MAX:
        yield Extent(begin, size_bytes)
        return
    yield Extent(begin, CHUNK_BYTES)
    for start in range(0, size_bytes, stride_bytes):
        room_bytes = min(stride_bytes, size_bytes - start) - CHUNK_BYTES
        if room_bytes > 0:
            draw = blake2b(seed + start.to_bytes(8, "little"), digest_size=8).digest()
            yield Extent(begin + start + int.from_bytes(draw, "little") % room_bytes, CHUNK_BYTES)
    yield Extent(begin + size_bytes - CHUNK_BYTES, CHUNK_BYTES)
