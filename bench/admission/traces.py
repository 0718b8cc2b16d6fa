"""Request traces as one form, whatever file they come from: requests that name the prefixes of their prompts."""

from __future__ import annotations

import csv
import itertools
import random
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zstandard

from hicache.errors import ConfigError
from hicache.traces import MOONCAKE_BLOCK_TOKENS, text_lines

SESSION_GAP_S = 30.0  # mean time between the starts of sessions whose trace does not tell them
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SECOND_MS = 1000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. ``blocks`` are prefix ids, root first; the last one may stand for a part of a block."""

    at_s: float
    tokens: int  # of the prompt
    output_tokens: int
    blocks: Sequence[int]
    tenant: str = ""
    session: str | None = None
    turn: int | None = None
    kind: str | None = None
    output_blocks: Sequence[int] = ()  # prefix ids of what decode has completed, behind ``blocks``
    think_s: float | None = None  # from the end of the answer before it, in the same session


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival. Block ids count from 0, and are equal where the prefixes up to there are."""

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]
    block_count: int

    @property
    def references(self) -> int:
        """Blocks of all prompts together."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.tokens for request in self.requests)


def load_trace(
    path: str | Path, *, limit: int | None = None, seed: int = 0, session_gap_s: float = SESSION_GAP_S
) -> Trace:
    """Read a trace, of the form that its first line has: Mooncake's JSONL, sessions of Claude Code, or Azure's CSV.

    Sessions without an arrival time start in the file's order, ``session_gap_s`` apart on average, as ``seed`` draws.
    ``limit`` counts requests, of Claude Code sessions. Raises ConfigError for what cannot be read, with its line.
    """
    try:
        with closing(text_lines(path)) as every:
            lines = itertools.islice(every, None if limit is None else limit + _has_header(path))
            trace = _read(Path(path).name.split(".")[0], lines, str(path), random.Random(seed), session_gap_s)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, zstandard.ZstdError) as error:
        raise ConfigError("trace", str(path), f"a readable text file, plain, .zst or .gz ({error})") from error
    if not trace.requests:
        raise ConfigError("trace", str(path), "a trace with at least one request")
    return trace


def _read(name: str, lines: Iterator[str], path: str, rng: random.Random, session_gap_s: float) -> Trace:
    first = next(lines, None)
    if first is None:
        raise ConfigError("trace", path, "a trace with at least one request")
    lines = itertools.chain((first,), lines)
    if not first.lstrip().startswith("{"):
        return _read_azure(name, lines, path)
    if '"requests"' in first:
        return _read_sessions(name, lines, path, rng, session_gap_s)
    return _read_mooncake(name, lines, path)


def _has_header(path: str | Path) -> int:
    return int(".csv" in Path(path).name)


class Prefixes:
    """Gives each prefix a number, whether the ids of a file name prefixes or only the content of a block."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Any], int] = {}
        self._latest: tuple[Sequence[Any], array[int]] = ((), array("I"))
        self.count = 0

    def numbers(self, ids: Sequence[Any], *, behind: int = -1) -> array[int]:
        """The number of each of ``ids``, which follow each other, the first one after the prefix ``behind``."""
        numbers = array("I")
        if behind < 0:
            numbers = self._latest[1][: common(ids, self._latest[0])]
            behind = numbers[-1] if numbers else -1
        known = self._numbers
        for block in itertools.islice(ids, len(numbers), None):
            place = (behind, block)
            behind = known.get(place, self.count)
            if behind == self.count:
                known[place] = behind
                self.count += 1
            numbers.append(behind)
        self._latest = (ids, numbers)
        return numbers

    def forget(self) -> None:
        """What comes from here on shares nothing with what was before: the ids of the file have another scope."""
        self._numbers.clear()
        self._latest = ((), array("I"))


def common(some: Sequence[Any], others: Sequence[Any]) -> int:
    """How many leading elements are equal: O(n) of C speed."""
    length = min(len(some), len(others))
    if some[:length] == others[:length]:
        return length
    return bisect_left(range(1, length), x=True, key=lambda end: some[:end] != others[:end])


# -- Mooncake ----------------------------------------------------------------------------------------------------------


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _Line(msgspec.Struct):
    """Mooncake's fields, and those that other traces of the form add to them. ``timestamp`` in ms."""

    timestamp: _Time
    input_length: _Size
    output_length: _Count
    hash_ids: list[int | str]
    block_size: _Size | None = None
    block_tokens: _Size | None = None
    tenant: str = ""
    session_id: str | int | None = None
    chat_id: str | int | None = None
    parent_chat_id: str | int | None = None
    turn: int | None = None
    type: str | None = None
    output_hash_ids: list[int | str] = []


def _read_mooncake(name: str, lines: Iterable[str], path: str) -> Trace:
    prefixes = Prefixes()
    decoder = msgspec.json.Decoder(_Line)
    requests: list[TraceRequest] = []
    sessions: dict[str | int, str] = {}  # by chat: the first one that it goes on from
    block_tokens: int | None = None
    for place, text in _numbered(lines, path):
        line = _decode(decoder, text, place, "timestamp, input_length, output_length and hash_ids")
        size = line.block_size or line.block_tokens or block_tokens or MOONCAKE_BLOCK_TOKENS
        if block_tokens not in (None, size):
            raise ConfigError(f"{place}: block_size", size, f"{block_tokens}, as in the lines before it")
        block_tokens = size
        if len(line.hash_ids) != -(-line.input_length // size):
            wanted = f"one for each {size} tokens begun, {-(-line.input_length // size)} of them, or another block_size"
            raise ConfigError(f"{place}: hash_ids", len(line.hash_ids), wanted)
        blocks = prefixes.numbers(line.hash_ids)
        outputs = prefixes.numbers(line.output_hash_ids, behind=blocks[-1]) if line.output_hash_ids else ()
        requests.append(
            TraceRequest(
                line.timestamp / _SECOND_MS,
                line.input_length,
                line.output_length,
                blocks,
                line.tenant,
                _session(line, sessions),
                line.turn,
                line.type,
                outputs,
            )
        )
    requests.sort(key=lambda request: request.at_s)
    return Trace(name, block_tokens or MOONCAKE_BLOCK_TOKENS, requests, prefixes.count)


def _session(line: _Line, sessions: dict[str | int, str]) -> str | None:
    if line.session_id is not None or line.chat_id is None:
        return None if line.session_id is None else str(line.session_id)
    session = sessions.get(line.parent_chat_id, str(line.chat_id)) if line.parent_chat_id else str(line.chat_id)
    sessions[line.chat_id] = session
    return session


# -- Claude Code -------------------------------------------------------------------------------------------------------


class _Call(msgspec.Struct):
    """A call of the model, or of a sub-agent with calls of its own, which count from its start."""

    t: _Time
    in_: _Count = msgspec.field(default=0, name="in")
    out: _Count = 0
    hash_ids: list[int] = []
    input_types: list[str] = []
    think_time: _Time | None = None
    agent_id: str | None = None
    requests: list[_Call] = []


class _Session(msgspec.Struct):
    id: str
    block_size: _Size
    requests: list[_Call]
    hash_id_scope: str = "local"


def _read_sessions(name: str, lines: Iterable[str], path: str, rng: random.Random, gap_s: float) -> Trace:
    prefixes = Prefixes()
    decoder = msgspec.json.Decoder(_Session)
    requests: list[TraceRequest] = []
    start_s = 0.0
    block_tokens: int | None = None
    for place, text in _numbered(lines, path):
        session = _decode(decoder, text, place, "id, block_size and requests of one session")
        if block_tokens not in (None, session.block_size):
            raise ConfigError(f"{place}: block_size", session.block_size, f"{block_tokens}, as in the lines before it")
        block_tokens = session.block_size
        if session.hash_id_scope == "local":
            prefixes.forget()
        requests += _calls(session.requests, session.id, start_s, prefixes)
        start_s += rng.expovariate(1 / gap_s)
    requests.sort(key=lambda request: request.at_s)
    return Trace(name, block_tokens or 64, requests, prefixes.count)


def _calls(calls: Sequence[_Call], session: str, start_s: float, prefixes: Prefixes) -> Iterator[TraceRequest]:
    turn = 0
    for call in calls:
        if call.requests:
            yield from _calls(call.requests, f"{session}/{call.agent_id}", start_s + call.t, prefixes)
        elif call.hash_ids:
            kind = "+".join(sorted(call.input_types)) or None
            blocks = prefixes.numbers(call.hash_ids)
            at_s, think_s = start_s + call.t, call.think_time
            yield TraceRequest(at_s, call.in_, call.out, blocks, "", session, turn, kind, (), think_s)
            turn += 1


# -- Azure -------------------------------------------------------------------------------------------------------------


def _read_azure(name: str, lines: Iterable[str], path: str) -> Trace:
    """Arrivals and lengths alone: no prompt shares a prefix with another one."""
    rows = csv.reader(lines)
    header = tuple(next(rows, ()))
    if header != _AZURE_COLUMNS:
        raise ConfigError(
            f"{path}:1", ",".join(header)[:80], f"a JSON object, or the columns {','.join(_AZURE_COLUMNS)}"
        )
    requests: list[TraceRequest] = []
    count, first_s = 0, None
    for number, row in enumerate(rows, start=2):
        try:
            time_s, tokens, output_tokens = datetime.fromisoformat(row[0][:26]).timestamp(), int(row[1]), int(row[2])
            if not (1 <= tokens <= 1 << 40 and output_tokens >= 0):
                raise ValueError("no tokens")
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{path}:{number}", ",".join(row)[:80], "a time and two numbers of tokens") from error
        first_s = time_s if first_s is None else first_s
        blocks = range(count, count + -(-tokens // MOONCAKE_BLOCK_TOKENS))
        count = blocks.stop
        requests.append(TraceRequest(time_s - first_s, tokens, output_tokens, blocks))
    requests.sort(key=lambda request: request.at_s)
    return Trace(name, MOONCAKE_BLOCK_TOKENS, requests, count)


def _numbered(lines: Iterable[str], path: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path}:{number}", line


def _decode(decoder: msgspec.json.Decoder[Any], text: str, place: str, fields: str) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(place, text.strip()[:80], f"a JSON object with {fields} ({error})") from error
