"""A child leaves the store of its parent alone, whatever it closes, and holds nothing of it when it lives longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.backends.open import open_store
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload

ROOT = Path(__file__).parents[2]
CAPACITY_BYTES = 16 << 20

CLOSED_IN_A_CHILD = """
import os, sys
from hicache.backends.open import open_backend
from hicache.backends.store import ObjectStore
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put
backend = open_backend(sys.argv[1], capacity_bytes=16 << 20)
store = ObjectStore(backend, object_bytes_max=1 << 20, free_space_floor_bytes=0)
assert put(store, (key(1), payload(1, 1000)), (key(2), payload(2, 1000))) == [Outcome.OK] * 2
assert store.delete([key(2)]) == [Outcome.OK]  # files: its file waits in the writer's folder
store.lookup([key(1)])
child = os.fork()
if child == 0:
    store.close()
    backend.close()
    sys.exit(0)  # through the end of the interpreter, too
assert os.waitpid(child, 0)[1] == 0
for number in range(2, 6):
    assert put(store, (key(number), payload(number, 1000))) == [Outcome.OK], number
    assert get(store, key(number), 1000) == (Outcome.OK, payload(number, 1000))
print(b'"is_clean":true' in open(sys.argv[2] + "/hicache.store", "rb").read())
store.close()
"""

OUTLIVED_BY_A_CHILD = """
import os, sys, time
from hicache.backends.open import open_backend
from tests.backends.payloads import key, payload, put
backend = open_backend(sys.argv[1], capacity_bytes=16 << 20)
put(backend, (key(1), payload(1, 1000)))
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("scheme", ["lmdb", "file"])
def test_a_child_that_closes_what_it_inherited_costs_its_parent_nothing(scheme: str, tmp_path: Path) -> None:
    store_at = str(tmp_path / "store")
    command = [sys.executable, "-c", CLOSED_IN_A_CHILD, f"{scheme}://{store_at}", store_at]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False", "a store that is written is not marked as closed"


@pytest.mark.parametrize("scheme", ["lmdb", "file"])
def test_a_child_that_outlives_its_parent_holds_nothing(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path / 'store'}"
    command = [sys.executable, "-c", OUTLIVED_BY_A_CHILD, url]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.communicate()
        for _ in range(2):
            store = open_store(url, capacity_bytes=CAPACITY_BYTES, object_bytes_max=1 << 20, free_space_floor_bytes=0)
            assert store.lookup([key(1)])[0] == [Outcome.OK]
            assert get(store, key(1), 1000) == (Outcome.OK, payload(1, 1000))
            store.close()
        assert [path.name for path in (tmp_path / "store").glob("unfinished/*")] == []
    finally:
        os.kill(child, signal.SIGKILL)
