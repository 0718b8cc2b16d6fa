"""A trace as the planner needs it: when requests came, how long they were, and which prefix blocks they had."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from hicache.errors import ConfigError
from hicache.plan.lengths import LengthMix
from hicache.traces import MOONCAKE_BLOCK_TOKENS, read_mooncake_trace, text_lines

DECODE_TOKENS_PER_S = 50.0  # of one request, where a trace does not say how long it took

Blocks: TypeAlias = npt.NDArray[np.int64]  # [blocks of a prompt], numbered from 0 over the whole trace


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """``blocks`` number prefixes of ``block_tokens`` each, the last one perhaps partial; None where none are told."""

    at_s: float
    input_tokens: int
    output_tokens: int
    service_s: float
    blocks: Blocks | None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they came. ``sessions`` of a trace without a common clock follow one another."""

    requests: tuple[ServedRequest, ...]
    block_tokens: int
    block_count: int = 0
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
        return _sessions(path, block_tokens=int(json.loads(first)["block_size"]))
    return _mooncake(path)


def _mooncake(path: str | Path) -> Workload:
    numbers: dict[int, int] = {}
    requests = [
        ServedRequest(
            request.timestamp_ms / 1000,
            request.input_length,
            request.output_length,
            request.output_length / DECODE_TOKENS_PER_S,
            np.array([numbers.setdefault(block, len(numbers)) for block in request.hash_ids], dtype=np.int64),
        )
        for request in read_mooncake_trace(path)
    ]
    return Workload(tuple(sorted(requests, key=lambda r: r.at_s)), MOONCAKE_BLOCK_TOKENS, len(numbers))


def _azure(path: str | Path) -> Iterator[ServedRequest]:
    for row in csv.DictReader(text_lines(path)):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        output = int(row["GeneratedTokens"])
        yield ServedRequest(at, int(row["ContextTokens"]), output, output / DECODE_TOKENS_PER_S, None)


class _SessionRequest(msgspec.Struct):
    """A line's request, or a sub-agent with requests of its own."""

    t: float
    input_tokens: int = msgspec.field(name="in", default=0)
    out: int = 0
    hash_ids: list[int] = []
    api_time: float | None = None
    requests: list[_SessionRequest] | None = None


class _Session(msgspec.Struct):
    requests: list[_SessionRequest]


def _sessions(path: str | Path, *, block_tokens: int) -> Workload:
    """Sessions one after the other, as one user would have them: figures are per session that is open."""
    found: list[ServedRequest] = []
    start_s, first_block = 0.0, 0
    decoder = msgspec.json.Decoder(_Session)
    for line in text_lines(path):
        end_s = start_s
        for offset_s, requests in _conversations(decoder.decode(line).requests):
            served = [_served(request, start_s + offset_s, first_block) for request in requests]
            found += served
            end_s = max([end_s, *(request.at_s + request.service_s for request in served)])
            first_block = 1 + max(
                [first_block, *(int(r.blocks.max()) for r in served if r.blocks is not None and len(r.blocks))]
            )
        start_s = end_s
    found.sort(key=lambda request: request.at_s)
    return Workload(tuple(found), block_tokens, first_block, one_session_at_a_time=True)


def _conversations(requests: list[_SessionRequest]) -> Iterator[tuple[float, list[_SessionRequest]]]:
    """A session's own requests, and those of each of its sub-agents, whose block ids are their own."""
    yield 0.0, [request for request in requests if request.requests is None]
    for agent in requests:
        if agent.requests is not None:
            yield agent.t, agent.requests


def _served(request: _SessionRequest, start_s: float, first_block: int) -> ServedRequest:
    service_s = request.api_time or request.out / DECODE_TOKENS_PER_S
    blocks = np.array(request.hash_ids, dtype=np.int64) + first_block
    return ServedRequest(start_s + request.t, request.input_tokens, request.out, service_s, blocks)
