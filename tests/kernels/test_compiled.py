"""What the kernels compile to for a GPU that is not here: wide loads, and no offset in 32 bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import json
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hicache.kernels.fp8_pages import _convert_kernel
from hicache.kernels.tile_copies import OPTIONS, _copy_tiles_kernel
from hicache.kernels.tiles import TILE_FIELDS

COPY = {"WORD": tl.int64, "ALIGNMENT": 2, "IS_CLEAR": False}
SCATTER = {**COPY, "READS_BLOCK": True, "WRITES_BLOCK": False}
GATHER = {**COPY, "READS_BLOCK": False, "WRITES_BLOCK": True}
FLOAT8 = {"ELEMENT": tl.bfloat16, "ALIGNMENT": 8, "LARGEST": 3e38, "SCALE_BIASED_MIN": 17}
POINTERS = {"tiles": "*i64", "slots": "*i64", "piece_starts": "*i64"}
COUNTS = {"pair_count": "i32", "tile_count": "i32", "piece_count": "i32"}


def ptx(kernel, constants, *, rows, run):
    constants = {**constants, "TILE_ROWS": rows, "TILE_RUN": run, "TILE_FIELDS": TILE_FIELDS}
    types = {**dict.fromkeys(constants, "constexpr"), **POINTERS, **COUNTS}
    signature = {name: types.get(name, "i64") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS).asm["ptx"]


print(json.dumps({
    "one run": ptx(_copy_tiles_kernel, SCATTER, rows=1, run=2048),
    "rows": ptx(_copy_tiles_kernel, GATHER, rows=16, run=128),
    "quantise": ptx(_convert_kernel, {**FLOAT8, "QUANTISES": True}, rows=1, run=8192),
    "dequantise": ptx(_convert_kernel, {**FLOAT8, "QUANTISES": False}, rows=1, run=8192),
}))
"""


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PTX for sm_90 by the name of the kernel."""
    cache: Path = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    ended = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:triton.knobs", "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, str] = json.loads(ended.stdout)
    return found


def widths(ptx: str, kind: str) -> set[str]:
    """Of loads or stores of more than a single number: those are of slots, of the table, and of scales."""
    return set(re.findall(rf"{kind}\.global\.(v\d\.b\d+)", ptx))


def test_every_thread_moves_16_bytes_at_a_time(assembly: dict[str, str]) -> None:
    for name in ("one run", "rows"):
        assert widths(assembly[name], "ld") == widths(assembly[name], "st") == {"v2.b64"}
    assert widths(assembly["quantise"], "ld") == widths(assembly["dequantise"], "st") == {"v4.b32"}
    assert widths(assembly["quantise"], "st") == widths(assembly["dequantise"], "ld") == {"v2.b32"}


def test_br_005_no_offset_is_computed_in_32_bits(assembly: dict[str, str]) -> None:
    for ptx in assembly.values():
        assert re.search(r"mul\.lo\.s64|mad\.lo\.s64", ptx)
        assert not re.search(r"m(?:ul|ad)\.lo\.[su]32", ptx)
