"""What the tests do within the engine's process: functions for `EngineProcess.run`."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

from tests.engines.vllm.driver import Answer, Engine, greedy, prompt_of
from tests.engines.vllm.rig import ANSWER_TOKENS

NOT_HELD = "not held"
BYTES_TOKENS = 8  # that ``bytes_of`` has the model answer


def bytes_of(engine: Engine, *, prompt: list[int], tokens: int, salt: str | None = None) -> list[list[str]]:
    """Digests of what each group keeps of the first ``tokens`` of a prompt, while a request for it runs.

    For attention of every block, NOT_HELD where a window has let go of one; for a state of the block at ``tokens``.
    """
    request_id = f"bytes-{tokens}-{salt}"
    core = engine.llm.llm_engine
    prompt_with_salt = prompt_of({"prompt": prompt, "salt": salt})
    core.add_request(request_id, prompt_with_salt, greedy(BYTES_TOKENS))
    held: list[list[int]] = []
    while core.has_unfinished_requests():
        core.step()
        request = next((r for r in engine.scheduler.running if r.request_id.startswith(request_id)), None)
        if not held and request is not None and request.num_output_tokens:
            held = [list(ids) for ids in engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)]
    return [_digests(engine, group, ids, tokens) for group, ids in enumerate(held)]


def _digests(engine: Engine, group: int, ids: list[int], tokens: int) -> list[str]:
    from vllm.v1.kv_cache_interface import MambaSpec

    kept = engine.scheduler.kv_cache_config.kv_cache_groups[group]
    count = tokens // kept.kv_cache_spec.block_size
    wanted = range(count - 1, count) if isinstance(kept.kv_cache_spec, MambaSpec) else range(count)
    tensors = [tensor for layer in kept.layer_names for tensor in _tensors_of(engine, layer)]
    return [NOT_HELD if not ids[index] else _digest(tensors, ids[index]) for index in wanted]


def _tensors_of(engine: Engine, layer: str) -> list[Any]:
    """Of attention one, of a state one for each of its parts; blocks first, no padding."""
    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    kept = runner.compilation_config.static_forward_context[layer].kv_cache
    return list(kept) if isinstance(kept, tuple | list) else [kept]


def _digest(tensors: list[Any], block: int) -> str:
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor[block].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def external_tokens_so_far(engine: Engine) -> int:
    return engine.external_tokens()


def holdings(engine: Engine) -> Answer:
    """What this process holds of what could leak."""
    descriptors = [_target(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return {
        "descriptors": len(descriptors),
        "memfds": sum("memfd:" in target for target in descriptors),
        "sockets": sum(target.startswith("socket:") for target in descriptors),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "shared_memory": sorted(path.name for path in Path("/dev/shm").iterdir()),  # of all processes
        "mapped": sorted({line.split(maxsplit=5)[5].strip() for line in _maps() if "/dev/shm/" in line}),
    }


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # the descriptor that lists the folder
        return ""


def failed_loads(engine: Engine) -> int:
    """Copies that a connector of `mutants.FailsLoads` has let fail."""
    return int(engine.scheduler.connector.loads_failed)


def flush(engine: Engine, *, timeout_s: float) -> bool:
    """Whether everything that was saved has come to the store within the time."""
    return bool(engine.scheduler.connector._side.cache.flush(timeout_s=timeout_s))


def storm(
    engine: Engine, *, seed: int, requests: int, abort_share: float, prompts: list[list[int]], tokens: int
) -> Answer:
    """Many requests at once, some of them given up at a random step; returns the tokens of the others, by prompt."""
    chance = random.Random(seed)
    core = engine.llm.llm_engine
    waiting = [(f"storm-{seed}-{number}", chance.randrange(len(prompts))) for number in range(requests)]
    doomed = {name: chance.randrange(12) for name, _ in waiting if chance.random() < abort_share}
    which = dict(waiting)
    finished: list[tuple[int, list[int]]] = []
    step = 0
    while waiting or core.has_unfinished_requests():
        for name, index in waiting[:3]:
            core.add_request(name, prompt_of({"prompt": prompts[index]}), greedy(tokens))
            doomed = {other: left + step if other == name else left for other, left in doomed.items()}
        del waiting[:3]
        for name in [name for name, due in doomed.items() if due <= step and name not in dict(waiting)]:
            core.abort_request([name])
            del doomed[name]
        ended = (output for output in core.step() if output.finished)
        finished += [(which[output.request_id], list(output.outputs[0].token_ids)) for output in ended]
        step += 1
    return {"finished": finished, "preemptions": _metric(engine, "vllm:num_preemptions")}


def make_adapter(engine: Engine, *, folder: str, seed: int) -> None:
    """A LoRA adapter for the tiny llama, with weights of its own for each seed."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    config = engine.llm.llm_engine.model_config.hf_config
    width, rank = config.hidden_size, 8
    weights = {}
    for layer in range(config.num_hidden_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, width)
        weights[f"{name}.lora_B.weight"] = torch.randn(config.num_attention_heads * config.head_dim, rank)
    Path(folder).mkdir(exist_ok=True)
    save_file(weights, f"{folder}/adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    Path(folder, "adapter_config.json").write_text(json.dumps(settings))


def ask_adapter(engine: Engine, *, prompt: list[int], folder: str, number: int) -> tuple[list[int], int]:
    """What the model with an adapter answers, and how many tokens came through the connector."""
    from vllm.lora.request import LoRARequest

    before = engine.external_tokens()
    [output] = engine.llm.generate(
        [prompt_of({"prompt": prompt})],
        greedy(ANSWER_TOKENS),
        use_tqdm=False,
        lora_request=LoRARequest(f"adapter-{number}", number, folder),
    )
    return list(output.outputs[0].token_ids), engine.external_tokens() - before


def samples(engine: Engine, *, prompt: list[int], count: int) -> list[list[int]]:
    """What several samples of one prompt are, each of the likeliest tokens: vLLM makes a request of each."""
    parameters = greedy(ANSWER_TOKENS)
    parameters.n, parameters.temperature, parameters.top_k = count, 1.0, 1
    [output] = engine.llm.generate([prompt_of({"prompt": prompt})], parameters, use_tqdm=False)
    return [list(each.token_ids) for each in output.outputs]


def metrics(engine: Engine, *, prefix: str) -> list[tuple[str, Answer, float]]:
    """Name, labels and value of vLLM's own metrics that have one."""
    found = [each for each in engine.llm.get_metrics() if each.name.startswith(prefix) and hasattr(each, "value")]
    return [(each.name, dict(each.labels), each.value) for each in found]


def _metric(engine: Engine, name: str) -> int:
    return int(sum(metric.value for metric in engine.llm.get_metrics() if metric.name == name))


def prefill_s(engine: Engine, *, start: int, end: int) -> float | None:
    """What the connector has learnt that computing ``[start, end)`` takes."""
    seconds = engine.scheduler.connector._side.cache._directory.costs.prefill_s(start, end)
    return None if seconds is None else float(seconds)
