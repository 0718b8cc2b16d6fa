"""A process with a vLLM engine in it, told what to do by lines of JSON; see `rig.EngineProcess` for the other side.

Each line is ``{"do": name of a method of Engine, ...its arguments}``, each answer ``{"result": ...}`` or
``{"error": ...}``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from tests.engines.vllm.models import MODELS, folder_of

PUSH_S_MAX = 60.0

Answer = dict[str, Any]  # Any: JSON


class Engine:
    """At most one ``LLM`` at a time; started, asked and stopped as often as the other side wants."""

    def __init__(self) -> None:
        self.llm: Any = None  # Any: vllm.LLM, which has no types here

    def start(self, *, model: str, models: str, seed: int, connector: Answer | None, settings: Answer) -> Answer:
        """``connector`` becomes KVTransferConfig; without one the engine has no cache of prefixes at all.

        ``settings`` are those of ``LLM``; a "path" among them takes the place of the model's own folder.
        """
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        assert self.llm is None, "stop the engine before"
        facts = MODELS[model]
        folder = folder_of(facts.name, Path(models), seed=seed)
        if model == "nemotron-h":
            leave_checkpoints_to_step_ends()
        arguments: Answer = {
            "model": settings.pop("path", str(folder)),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": facts.dtype,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": False,
            "enable_prefix_caching": connector is not None,
            "prefix_caching_hash_algo": "sha256_cbor",
            "seed": 0,
        }
        if facts.block_size is not None:
            arguments["block_size"] = facts.block_size
        if connector is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(**connector)
        if events := settings.pop("kv_events_config", None):
            arguments["kv_events_config"] = KVEventsConfig(**events)
        self.llm = LLM(**(arguments | settings))
        return {}

    def make_model(self, *, model: str, models: str, seed: int) -> str:
        return str(folder_of(model, Path(models), seed=seed))

    def generate(self, *, requests: list[Answer], max_tokens: int) -> list[Answer]:
        """All requests in one batch; ``external`` is how many tokens of the whole batch came through the connector."""
        before = self.external_tokens()
        outputs = self.llm.generate([prompt_of(request) for request in requests], greedy(max_tokens), use_tqdm=False)
        external = self.external_tokens() - before
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "finish": output.outputs[0].finish_reason,
                "cached": output.num_cached_tokens,
                "external": external,
                "margin": margin(output.outputs[0].logprobs),
            }
            for output in outputs
        ]

    def external_tokens(self) -> int:
        """Tokens of prompts that a connector has brought, so far."""
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:prompt_tokens_by_source" and metric.labels["source"] == "external_kv_transfer":
                return int(metric.value)
        raise AssertionError("vLLM no longer counts prompt tokens by their source")

    def reset(self, *, connector: bool = False) -> bool:
        """Forget the prefixes in the engine's own memory."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def run(self, *, function: str, **arguments: Any) -> Any:
        """Call ``module:name`` in this process, with the engine first."""
        module, name = function.split(":")
        return getattr(import_module(module), name)(self, **arguments)

    def stop(self) -> Answer:
        """End the engine as an operator would, some time after its last request, and leave nothing of it here."""
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._push()
        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()
        gc.collect()
        return {}

    def _push(self) -> None:
        """Step on while the connector has something to store, as an engine does that has a process of its own."""
        from vllm.v1.engine.core_client import InprocClient

        core = self.llm.llm_engine.engine_core
        until_s = time.monotonic() + PUSH_S_MAX
        while isinstance(core, InprocClient) and self.scheduler.connector is not None and time.monotonic() < until_s:
            if not self.scheduler.connector.has_pending_push_work():
                return
            core.get_output()

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, where the engine is in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler


def prompt_of(request: Answer) -> Answer:
    prompt: Answer = {"prompt_token_ids": request["prompt"]}
    if request.get("salt") is not None:
        prompt["cache_salt"] = request["salt"]
    return prompt


def greedy(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False, ignore_eos=True, logprobs=2)


def margin(steps: list[dict[int, Any]]) -> float:
    """By how much the token that was chosen was likelier than the next one, in nats, at the closest of all steps."""
    ranked = (sorted((each.logprob for each in step.values()), reverse=True) for step in steps)
    return min(first - second for first, second, *_ in ranked)


def leave_checkpoints_to_step_ends() -> None:
    """vLLM's CPU kernel of Mamba2 gives no states from within a step, which the layer asks for (0.32: IndexError)."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def serve(engine: Engine, commands: TextIO, answers: TextIO) -> None:
    for line in commands:
        command = json.loads(line)
        do: Callable[..., Any] = getattr(engine, command.pop("do"))
        try:
            answer = {"result": do(**command)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log
    serve(Engine(), sys.stdin, answers)


if __name__ == "__main__":  # vLLM starts its own processes by importing this file again
    main()
