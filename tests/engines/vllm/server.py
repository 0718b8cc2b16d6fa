"""vLLM's HTTP server as a process, and its clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.daemon.rig import wait_until
from tests.engines.vllm.rig import ANSWER_TOKENS, ENVIRONMENT, ROOT

START_S = 300.0
ANSWER_S = 180.0


class Server:
    """The OpenAI-compatible server over one model; several processes, which end with it."""

    def __init__(self, folder: Path, model: str, connector: dict[str, Any]) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        self._log = folder / f"server.{time.monotonic_ns()}.log"
        host, port = self.address.split(":")
        flags = {
            "model": model,
            "served-model-name": "tiny",
            "dtype": "float32",
            "max-model-len": 512,
            "block-size": 32,
            "max-num-seqs": 4,
            "kv-cache-memory-bytes": 64 << 20,
            "prefix-caching-hash-algo": "sha256_cbor",
            "kv-transfer-config": json.dumps(connector),
            "host": host,
            "port": port,
        }
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--skip-tokenizer-init",
            "--enforce-eager",
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *(f"--{name}={value}" for name, value in flags.items())],
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"},
                cwd=ROOT,
                start_new_session=True,
            )

    def wait_ready(self) -> Server:
        wait_until(self.is_healthy, what=f"the server is up; its log:\n{self._log.read_text()}", within_s=START_S)
        return self

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self._log.read_text(errors="replace")[-8000:]
        try:
            return self._request("/health").status == 200
        except OSError:
            return False

    def complete(self, prompt: list[int], *, salt: str | None = None, tokens: int = ANSWER_TOKENS) -> tuple[int, ...]:
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        answer = json.loads(self._request("/v1/completions", body).read())
        return tuple(answer["choices"][0]["token_ids"])

    def reset(self) -> None:
        """Forget the prefixes in the engine's own memory."""
        self._request("/reset_prefix_cache", {})

    def metrics(self) -> dict[str, float]:
        """All samples, by name with labels as they are written."""
        lines = self._request("/metrics").read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def external_tokens(self) -> int:
        samples = self.metrics().items()
        return int(sum(value for name, value in samples if name.startswith("vllm:external_prefix_cache_hits_total")))

    def stop(self) -> int:
        """Ends it as an operator does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(ANSWER_S)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[int]:
        """Whatever of it runs."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    if os.getpgid(int(entry.name)) == self.process.pid:
                        found.append(int(entry.name))
        return found

    def shared_memory(self) -> set[Path]:
        """The files in shared memory that its processes have mapped, and no other engine's."""
        found = set()
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                for line in Path(f"/proc/{number}/maps").read_text().splitlines():
                    if "/dev/shm/" in line and not line.endswith("(deleted)"):
                        found.add(Path(line.split(maxsplit=5)[5]))
        return found

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:  # Any: what urlopen returns
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(f"http://{self.address}{path}", payload, headers), timeout=ANSWER_S
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
