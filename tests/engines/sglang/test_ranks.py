"""Two TP ranks in two processes, with the engine's own reductions between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.client.hicached import HicachedProcess
from tests.engines.sglang.devices import PAGE_TOKENS


def test_ranks_agree_on_what_is_restored_and_restore_their_own(tmp_path: Path) -> None:
    process = HicachedProcess(tmp_path)
    process.start()
    module = "tests.engines.sglang.rank_process"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(tmp_path), process.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=200)
            assert rank.returncode == 0, output.decode()[-8000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        process.end()
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert zero["gdn"] == one["gdn"] == 16 * PAGE_TOKENS
    assert zero["mla"] == [8, 8 * PAGE_TOKENS]
    assert one["mla"] == [0, 8 * PAGE_TOKENS]
    assert zero["missing state"] == [16, 8 * PAGE_TOKENS]
    assert one["missing state"] == [8, 8 * PAGE_TOKENS]
