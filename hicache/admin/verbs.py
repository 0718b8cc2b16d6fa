"""Every verb of the admin API in one table, for the daemon that serves them and for the client that asks.

A verb is added here as one row, with msgspec types for what is sent and what is answered; the daemon gives it a handler
with ``AdminApi.serve``, and a client asks it with ``Admin.ask``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import NoneType
from typing import Any, Generic, TypeVar

from hicache.admin.lifecycle import DrainAnswer, DrainRequest, ReloadAnswer
from hicache.admin.status import History, Status
from hicache.admin.store_messages import ImportAnswer, Namespaces, TraceRequest, VerifyRequest

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


STATUS = Verb("status", "GET", "/v1/status", NoneType, Status, is_public=True)
HISTORY = Verb("history", "GET", "/v1/history", NoneType, History, is_public=True)
EVENTS = Verb("events", "GET", "/v1/events", NoneType, Stream, is_public=True)
DRAIN = Verb("drain", "POST", "/v1/drain", DrainRequest, DrainAnswer)
RELOAD = Verb("reload", "POST", "/v1/reload", NoneType, ReloadAnswer)

NAMESPACES = Verb("namespaces", "GET", "/v1/namespaces", NoneType, Namespaces)
NAMESPACE_DROP = Verb("namespace_drop", "DELETE", "/v1/namespaces/{namespace}", NoneType, Stream)
EXPORT = Verb("export", "GET", "/v1/namespaces/{namespace}/export", NoneType, Stream)
IMPORT = Verb("import", "POST", "/v1/import", Stream, ImportAnswer)
VERIFY = Verb("verify", "POST", "/v1/verify", VerifyRequest, Stream)
TRACE = Verb("trace", "POST", "/v1/trace", TraceRequest, Stream)

VERBS: tuple[Verb[Any, Any], ...] = (  # Any: each row has types of its own
    STATUS,
    HISTORY,
    EVENTS,
    DRAIN,
    RELOAD,
    NAMESPACES,
    NAMESPACE_DROP,
    EXPORT,
    IMPORT,
    VERIFY,
    TRACE,
)
