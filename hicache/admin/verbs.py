"""Every verb of the admin API in one table, for the daemon that serves them and for the client that asks.

A verb is added here as one row, with msgspec types for what is sent and what is answered; the daemon gives it a handler
with ``AdminApi.serve``, and a client asks it with ``Admin.ask``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import NoneType
from typing import Any, Generic, TypeVar

Body = TypeVar("Body")
Answer = TypeVar("Answer")

BODY_BYTES_MAX = 64 * 1024  # of a body that is JSON; streams say themselves what they take


class Stream:
    """In place of a message: bytes that come part by part."""


@dataclass(frozen=True, slots=True)
class Verb(Generic[Body, Answer]):
    """One thing that can be asked of a daemon.

    ``path`` has the names of its variable parts in braces; other names that a caller gives go into the query. The
    tenant that a verb is about is the name ``tenant`` in either, and None is all of them.
    """

    name: str  # what a caller is allowed, or not
    method: str
    path: str
    body: type[Body]  # NoneType: nothing is sent
    answer: type[Answer]
    is_public: bool = False  # GET only: answered at the address ``http`` whoever asks

    @property
    def path_names(self) -> list[str]:
        """The variable parts of the path."""
        return re.findall(r"{(\w+)}", self.path)


STATUS = Verb("status", "GET", "/v1/status", NoneType, dict, is_public=True)
HISTORY = Verb("history", "GET", "/v1/history", NoneType, dict, is_public=True)
EVENTS = Verb("events", "GET", "/v1/events", NoneType, Stream, is_public=True)

VERBS: tuple[Verb[Any, Any], ...] = (  # Any: each row has types of its own
    STATUS,
    HISTORY,
    EVENTS,
)
