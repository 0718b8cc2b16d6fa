"""How long requests are: one length, a mix of lengths, or those of a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.slices import is_whole

TOKENS_MAX = 2**40  # of a request
WEIGHT_MAX = 1e12
Z_95 = 1.645  # of a normal distribution: 95 % of sums stay below mean + Z_95 deviations


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Requests as ``(input tokens, output tokens, weight)``.

    What runs at a moment is not what arrives: a request that decodes for longer is seen more often. Its weight is that
    of its arrivals times its output tokens.
    """

    requests: tuple[tuple[int, int, float], ...]

    def __post_init__(self) -> None:
        for input_tokens, output_tokens, weight in self.requests:
            whole = is_whole(input_tokens, at_least=1) and is_whole(output_tokens, at_least=0)
            if not whole or max(input_tokens, output_tokens) > TOKENS_MAX or not 0 < weight <= WEIGHT_MAX:
                expected = "input tokens of at least 1, output tokens of at least 0, a weight above 0, none too large"
                raise ConfigError("lengths", (input_tokens, output_tokens, weight), expected)
        if not self.requests:
            raise ConfigError("lengths", (), "one request or more")

    @classmethod
    def single(cls, *, input_tokens: int, output_tokens: int) -> LengthMix:
        """All requests alike."""
        return cls(((input_tokens, output_tokens, 1.0),))

    @classmethod
    def parse(cls, text: str, *, output_tokens: int) -> LengthMix:
        """``8192:0.6,32768:0.3,131072:0.1``: input tokens and their shares. Raises ConfigError."""
        try:
            parts = [part.split(":") for part in text.split(",")]
            return cls(tuple((int(tokens), output_tokens, float(weight)) for tokens, weight in parts))
        except ValueError as error:
            raise ConfigError("lengths", text, "TOKENS:SHARE,TOKENS:SHARE,...") from error

    @classmethod
    def of_requests(cls, lengths: Iterable[tuple[int, int]]) -> LengthMix:
        """Of requests that arrived, equal ones together."""
        counted: dict[tuple[int, int], float] = {}
        for length in lengths:
            counted[length] = counted.get(length, 0.0) + 1.0
        return cls(tuple((*length, weight) for length, weight in sorted(counted.items())))

    def scaled(self, factor: float) -> LengthMix:
        """The same mix of prompts that are ``factor`` times as long."""
        return LengthMix(tuple((max(1, round(i * factor)), o, weight) for i, o, weight in self.requests))

    def __str__(self) -> str:
        if len(self.requests) == 1:
            [(input_tokens, output_tokens, _)] = self.requests
            return f"{input_tokens:,} + {output_tokens:,} tokens"
        return f"{self.mean_input_tokens:,.0f} tokens of prompt on average, {self.longest_tokens:,} at most"

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request, at its end."""
        return max(input_tokens + output_tokens for input_tokens, output_tokens, _ in self.requests)

    @property
    def mean_input_tokens(self) -> float:
        """Over arrivals."""
        total = sum(weight for *_, weight in self.requests)
        return sum(input_tokens * weight for input_tokens, _, weight in self.requests) / total

    def held_tokens(self, *, page_tokens: int, at_most: int | None = None) -> tuple[float, float]:
        """Mean and deviation of the tokens that one running request holds at its end, in whole pages.

        ``at_most`` is the window of a sliding window, where there is one.
        """
        held = [
            (-(-min(i + o, at_most or i + o) // page_tokens) * page_tokens, weight * max(1, o))
            for i, o, weight in self.requests
        ]
        total = sum(weight for _, weight in held)
        mean = sum(tokens * weight for tokens, weight in held) / total
        return mean, math.sqrt(sum((tokens - mean) ** 2 * weight for tokens, weight in held) / total)


def requests_that_fit(tokens: int, mean: float, deviation: float) -> int:
    """The most requests whose tokens fit with 95 % certainty: mean x n + Z_95 x deviation x sqrt(n) <= tokens."""
    if mean <= 0:
        return 0
    root = (-Z_95 * deviation + math.sqrt((Z_95 * deviation) ** 2 + 4 * mean * max(0, tokens))) / (2 * mean)
    count = int(root * root)
    while tokens_needed(count + 1, mean, deviation) <= tokens:  # what rounding took
        count += 1
    while count and tokens_needed(count, mean, deviation) > tokens:
        count -= 1
    return count


def tokens_needed(count: int, mean: float, deviation: float) -> float:
    """Tokens that ``count`` requests hold, not exceeded in 95 of 100 moments."""
    return mean * count + Z_95 * deviation * math.sqrt(count)
