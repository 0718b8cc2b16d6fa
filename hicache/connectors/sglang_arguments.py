"""The arguments of a running SGLang server, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt import runtime_context

_GROUPS = ("model", "spec", "lora", "mm", "memory", "observability")
_EXEC_PARTS = ("features", "kernel", "mamba", "comm", "moe", "dllm", "deterministic")


class Arguments:
    """As SGLang has resolved them, whichever of its groups they are in."""

    def __getattr__(self, name: str) -> Any:
        for group in _groups():
            try:
                return getattr(group, name)
            except AttributeError:
                continue
        raise AttributeError(name)


def _groups() -> Iterator[Any]:  # Any: SGLang's, of which a release may lack some
    for name in _GROUPS:
        if (get := getattr(runtime_context, f"get_{name}", None)) is not None:
            yield get()
    yield runtime_context.get_context().config_bag("parallel")
    for part in _EXEC_PARTS:
        if (group := getattr(runtime_context.get_exec(), part, None)) is not None:
            yield group
