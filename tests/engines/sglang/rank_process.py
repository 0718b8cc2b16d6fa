"""One of two TP ranks of a SGLang server, each in a process of its own, that reduce over gloo as the engine does.

python -m tests.engines.sglang.rank_process RANK FOLDER ADDRESS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed

from tests.engines.sglang import conftest  # noqa: F401  # SGLang on a CPU, before anything of it is imported
from tests.engines.sglang.devices import gdn, mla
from tests.engines.sglang.rig import Engine, assert_equal, extra_config, server, tokens

SIZE = 2


def main(rank: int, folder: Path, address: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE)
    group = torch.distributed.new_group(ranks=list(range(SIZE)), backend="gloo")
    found = {"gdn": states(rank, address, group), "mla": latents(rank, address, group)}
    found["missing state"] = missing_state(rank, address, group)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def start(rank: int, address: str, group: object, model: object, revision: str) -> tuple[object, Engine]:
    arguments = server(extra_config(address, model_revision=revision), tp_rank=rank, tp_size=SIZE)
    engine = Engine(arguments.__enter__(), model, tp_cache_group=group, attn_tp_cache_group=group)
    engine.connect()
    return arguments, engine


def states(rank: int, address: str, group: object) -> int:
    """Each rank has its own heads and states, and they agree on what is restored."""
    _, first = start(rank, address, group, gdn(), "states")
    computed = first.compute(tokens(16))
    first.settle()
    torch.distributed.barrier()
    _, second = start(rank, address, group, gdn(), "states")
    loaded = second.prefetch(tokens(16))
    assert_equal(second.load(tokens(16)), computed)
    first.close()
    second.close()
    return loaded


def latents(rank: int, address: str, group: object) -> list[int]:
    """One rank writes; both read the same bytes."""
    torch.manual_seed(7)
    _, first = start(rank, address, group, mla(), "latents")
    computed = first.compute(tokens(8))
    first.settle()
    torch.distributed.barrier()
    written = sum(first.storage.get_stats().backup_pgs)
    _, second = start(rank, address, group, mla(), "latents")
    loaded = second.prefetch(tokens(8))
    assert_equal(second.load(tokens(8)), computed)
    first.close()
    second.close()
    return [written, loaded]


def missing_state(rank: int, address: str, group: object) -> list[int]:
    """Rank 1 has stored no state at the end of the longer prompt: both stop at the end of the shorter one."""
    _, first = start(rank, address, group, gdn(), "missing")
    first.compute(tokens(8))
    first.settle()
    if rank == 1:
        first.storage.batch_set_v2 = lambda transfers, extra_info=None: {  # type: ignore[method-assign]
            each.name: [True] * len(each.keys or ()) for each in transfers
        }
    first.extend(tokens(8), tokens(16))
    first.settle()
    torch.distributed.barrier()
    _, second = start(rank, address, group, gdn(), "missing")
    slots = second.host_slots()
    own = second.stored(tokens(16))
    loaded = second.prefetch(tokens(16))
    second.cache.reset()
    assert second.host_slots() == slots
    first.close()
    second.close()
    return [own, loaded]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
