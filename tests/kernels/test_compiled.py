"""What the kernels compile to for a GPU that is not here: wide loads, and no offset in 32 bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import sys
import triton.language as tl
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hicache.kernels.tile_copies import _copy_tiles_kernel as kernel
from hicache.kernels.tiles import TILE_FIELDS

arguments = {"tiles": "*i64", "slots": "*i64", "pair_count": "i32", "tile_count": "i32",
             "block_address": "i64", "block_stride": "i64"}
constants = {"WORD": tl.int64, "ALIGNMENT": 2, "TILE_ROWS": int(sys.argv[1]), "TILE_RUN": int(sys.argv[2]),
             "TILE_FIELDS": TILE_FIELDS, "IS_CLEAR": False, "READS_BLOCK": True, "WRITES_BLOCK": False}
signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"])
"""


@pytest.mark.parametrize(("rows", "run"), [(1, 2048), (16, 128)])
def test_the_copy_kernel_loads_and_stores_16_bytes_a_thread(rows: int, run: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(rows), str(run)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    ptx = ended.stdout
    widths = re.findall(r"(ld|st)\.global\.(v\d\.b\d+|b\d+)", ptx)
    payload = [width for width in widths if width[1] != "b64"]  # b64: slots and columns of the table
    assert payload == [("ld", "v2.b64")] * 4 + [("st", "v2.b64")] * 4
    assert not re.findall(r"m(?:ul|ad)\.lo\.[su]32", ptx)
