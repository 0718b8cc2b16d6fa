"""An engine process of the kill loop: serves prompts and checks every byte until it is killed, or told to end."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection

from bench.daemon_process import TOKEN
from tests.core.small_engine import PAGE, SmallEngine
from tests.simulation.engine_life import check_moment, what_is_held

PROMPTS, PAGES_MAX, SLOTS = 12, 8, 24
REST_S_MAX = 60.0  # a failure, never the usual case


def run_engine(told: Connection, address: str, seed: int) -> None:
    """Sends ``"serving"`` after its first request. Whatever comes over ``told`` ends it: then it settles, checks its
    accounts, and sends its counts; or the text of what went wrong."""
    try:
        told.send(_serve(told, address, random.Random(seed)))
    except Exception as error:
        told.send(f"{type(error).__name__}: {error}")


def _serve(told: Connection, address: str, rng: random.Random) -> dict[str, int]:
    engine = SmallEngine(l1=SLOTS, l2=SLOTS, address=address, token=TOKEN)
    l3 = engine.cache.l3
    assert l3 is not None
    l3.wait_ready(timeout_s=10)  # type: ignore[attr-defined]  # of a DaemonL3
    served = from_l3 = 0
    while not (served and told.poll()):
        tokens = [10_000 * rng.randrange(PROMPTS) + number for number in range(rng.randint(1, PAGES_MAX) * PAGE + 1)]
        restored = engine.serve(tokens)
        check_moment(engine)
        from_l3 += restored.by_source["l3"]
        served += 1
        if served == 1:
            told.send("serving")
    engine.settle()
    until_s = time.monotonic() + REST_S_MAX
    while (held := what_is_held(engine)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not held, f"without a request the engine still has {held}"
    check_moment(engine)
    engine.close()
    return {"served": served, "from_l3": from_l3}
