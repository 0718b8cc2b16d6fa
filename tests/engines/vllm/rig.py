"""What the tests hold of an engine: a process of its own that they start, ask, end and kill."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.vllm.models import VOCABULARY

ROOT = Path(__file__).parents[3]
ANSWER_S = 300.0  # of one command, on a machine however busy
ANSWER_TOKENS = 6
MARGIN = 0.15  # what bfloat16 makes of another order of sums is less
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Output:
    """Of one request: its tokens, and how many of its prompt were not computed."""

    tokens: tuple[int, ...]
    cached: int  # from the engine's own memory and through the connector
    external: int  # through the connector: of all requests of the same batch
    finish: str
    margin: float  # in nats, between the chosen token and the next one, where it was closest


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and what a model answers, without any cache."""

    prompt: list[int]
    answer: tuple[int, ...]


def prompt(seed: int, *, tokens: int) -> list[int]:
    """A prompt of random tokens. The same seed gives the same first tokens at any length."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(tokens)]


def prompts(first_seed: int = 0, *, tokens: int = 410) -> Iterator[list[int]]:
    """As many prompts as are asked for."""
    return (prompt(seed, tokens=tokens) for seed in itertools.count(first_seed))


def hicache(
    target: str, *, name: str = "HiCacheConnector", module: str = "hicache.connectors.vllm", **extra: object
) -> Any:
    """The connector's part of the engine's configuration."""
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "l3": target,
            "l2_bytes": 32 << 20,
            "prefetch_mode": "wait_complete",
            "prefetch_hard_cap_s": 10,
            "read_policy": "always",  # these models compute faster than any store loads
        }
        | extra,
    }


class EngineProcess:
    """A process that has vLLM imported, and an engine between ``start`` and ``stop``."""

    def __init__(self, folder: Path, models: Path, *, in_process: bool = True, **environment: str) -> None:
        """Without ``in_process``, vLLM runs its scheduler and workers in processes of their own."""
        self._models = models
        self._log = folder / f"engine.{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.vllm.driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ
                | ENVIRONMENT
                | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process))}
                | environment,
                cwd=ROOT,
                start_new_session=True,  # so that one signal reaches all of its processes
            )
        self._answers = b""

    def start(
        self, model: str, connector: dict[str, Any] | None = None, *, seed: int = 0, **settings: object
    ) -> EngineProcess:
        """Start an engine in the process; settings are those of vLLM."""
        models = str(self._models)
        self._do("start", model=model, models=models, seed=seed, connector=connector, settings=settings)
        return self

    def generate(self, *prompts: list[int], salt: str | None = None, tokens: int = ANSWER_TOKENS) -> list[Output]:
        """All prompts in one batch."""
        requests = [{"prompt": each, "salt": salt} for each in prompts]
        answers = self._do("generate", requests=requests, max_tokens=tokens)
        return [Output(**each | {"tokens": tuple(each["tokens"])}) for each in answers]

    def ask(self, one: list[int], *, salt: str | None = None, tokens: int = ANSWER_TOKENS) -> Output:
        """One prompt by itself."""
        return self.generate(one, salt=salt, tokens=tokens)[0]

    def settled(self, prompts: Iterator[list[int]], *, tokens: int = ANSWER_TOKENS) -> Iterator[Asked]:
        """Those of ``prompts`` whose answer was never close.

        It does not hang on the order of sums, which differs with what is computed in one step.
        """
        for each in prompts:
            output = self.ask(each, tokens=tokens)
            if output.margin > MARGIN:
                yield Asked(each, output.tokens)

    def run(self, function: str, **arguments: object) -> Any:
        """Call ``function`` of tests/engines/vllm/inside.py in the engine's process."""
        return self._do("run", function=f"tests.engines.vllm.inside:{function}", **arguments)

    def flush(self) -> None:
        """Returns when everything that was saved has come to the store, or failed to."""
        assert self.run("flush", timeout_s=30.0), f"not flushed:\n{self._log_end()}"

    def make_model(self, model: str, *, seed: int = 0) -> str:
        """The folder of a model, made if it is missing."""
        return str(self._do("make_model", model=model, models=str(self._models), seed=seed))

    def reset(self, *, connector: bool = False) -> bool:
        return bool(self._do("reset", connector=connector))

    def stop(self) -> None:
        """Stop the engine; the process can start another one."""
        self._do("stop")

    def end(self) -> None:
        """Stop the engine and end the process, as a restart does."""
        self.stop()
        self.close()

    def close(self) -> None:
        """Leave no process behind."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _do(self, command: str, **arguments: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        answer = json.loads(self._line(command))
        assert "error" not in answer, f"{command} failed in the engine's process:\n{answer['error']}\n{self._log_end()}"
        return answer["result"]

    def _line(self, command: str) -> bytes:
        assert self.process.stdout is not None
        deadline = time.monotonic() + ANSWER_S
        while b"\n" not in self._answers:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer to {command} within {ANSWER_S} s; the log ends with\n{self._log_end()}"
            received = os.read(self.process.stdout.fileno(), 1 << 16)
            assert received, f"the engine's process ended in {command}; its log ends with\n{self._log_end()}"
            self._answers += received
        line, self._answers = self._answers.split(b"\n", 1)
        return line

    def _log_end(self) -> str:
        return "\n".join(self.log.splitlines()[-40:])
