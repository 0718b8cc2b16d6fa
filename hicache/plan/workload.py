"""A trace as the planner needs it: when requests came, how long they were, and which prefix blocks they had."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import zstandard

from hicache.errors import ConfigError
from hicache.plan.lengths import LengthMix
from hicache.traces import MOONCAKE_BLOCK_TOKENS, read_mooncake_trace, text_lines

DECODE_TOKENS_PER_S = 50.0  # of one request, where a trace does not say how long it took

Block = int | tuple[int, int]  # an id of the whole trace, or of one session


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """``blocks`` name prefixes of ``block_tokens`` each, the last one perhaps partial; None where none are told."""

    at_s: float
    input_tokens: int
    output_tokens: int
    service_s: float
    blocks: tuple[Block, ...] | None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they came. ``sessions`` of a trace without a common clock follow one another."""

    requests: tuple[ServedRequest, ...]
    block_tokens: int
    one_session_at_a_time: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether it tells what was reused."""
        return self.requests[0].blocks is not None

    @property
    def lengths(self) -> LengthMix:
        """The lengths of its requests."""
        return LengthMix.of_requests((r.input_tokens, r.output_tokens) for r in self.requests if r.input_tokens)


def read_workload(path: str | Path) -> Workload:
    """A trace of Mooncake's form, of Claude Code sessions, or of Azure's (.csv), packed or not. Raises ConfigError."""
    if not Path(path).is_file():
        raise ConfigError("trace", str(path), "a file: .jsonl or .csv, perhaps packed as .zst or .gz")
    try:
        workload = _read(path)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error, zstandard.ZstdError) as error:
        expected = f"a trace of Mooncake's form, of Claude Code sessions, or of Azure's ({error!r})"
        raise ConfigError("trace", str(path), expected) from error
    if not workload.requests:
        raise ConfigError("trace", str(path), "one request or more")
    return workload


def _read(path: str | Path) -> Workload:
    with closing(text_lines(path)) as opened:
        first = next(opened, "")
    if first.startswith("TIMESTAMP"):
        return Workload(tuple(_azure(path)), 1)
    if "requests" in json.loads(first):
        block_tokens = int(json.loads(first)["block_size"])
        return Workload(tuple(sorted(_sessions(path), key=lambda r: r.at_s)), block_tokens, one_session_at_a_time=True)
    requests = (
        ServedRequest(
            request.timestamp_ms / 1000,
            request.input_length,
            request.output_length,
            request.output_length / DECODE_TOKENS_PER_S,
            request.hash_ids,
        )
        for request in read_mooncake_trace(path)
    )
    return Workload(tuple(sorted(requests, key=lambda r: r.at_s)), MOONCAKE_BLOCK_TOKENS)


def _azure(path: str | Path) -> Iterator[ServedRequest]:
    for row in csv.DictReader(text_lines(path)):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        output = int(row["GeneratedTokens"])
        yield ServedRequest(at, int(row["ContextTokens"]), output, output / DECODE_TOKENS_PER_S, None)


def _sessions(path: str | Path) -> Iterator[ServedRequest]:
    """Sessions one after the other, as one user would have them: figures are per session that is open."""
    start, scope = 0.0, 0
    for line in text_lines(path):
        end = start
        for offset_s, requests in _conversations(json.loads(line)["requests"]):
            for request in requests:
                served = _served(request, at_s=start + offset_s + float(request["t"]), scope=scope)
                end = max(end, served.at_s + served.service_s)
                yield served
            scope += 1
        start = end


def _conversations(requests: list[dict[str, Any]]) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """A session's own requests, and those of each of its sub-agents, whose block ids are their own."""
    yield 0.0, [request for request in requests if "requests" not in request]
    for agent in requests:
        if "requests" in agent:
            yield float(agent["t"]), agent["requests"]


def _served(request: Mapping[str, Any], *, at_s: float, scope: int) -> ServedRequest:
    output = int(request["out"])
    service_s = float(request.get("api_time") or output / DECODE_TOKENS_PER_S)
    blocks = tuple((scope, int(block)) for block in request["hash_ids"])
    return ServedRequest(at_s, int(request["in"]), output, service_s, blocks)
