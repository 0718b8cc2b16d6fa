"""Log lines of hicached: structured, on stderr, without secrets."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO, cast

import structlog

from hicache.daemon.log_stream import LogStream

STDERR = 2
SECRET_WORDS = ("token", "secret", "salt", "password")

_LIBRARIES = ("aiohttp", "grpc")
_INPUT_ERRORS = ("aiohttp", "google")  # packages of the exceptions that bad input raises in them

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_LEVEL_OF = _LEVELS | {"exception": logging.ERROR, "critical": logging.CRITICAL}  # by the method that is called


def configure_logs(*, level: str, style: str) -> None:
    """Sends the lines of structlog and of `logging` to stderr in one form: ``style`` is console or json."""
    stream = cast(TextIO, LogStream(STDERR))
    renderer: structlog.typing.Processor
    if style == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        # Plain tracebacks: the pretty ones print local variables, and with them secrets and payloads.
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        redact,
        *([structlog.processors.format_exc_info] if style == "json" else []),
    ]
    structlog.configure(
        processors=[LevelFilter(), *shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    handler.addFilter(LibraryLines())
    logging.basicConfig(handlers=[handler], force=True)
    set_log_level(level)


class LevelFilter:
    """Drops lines below a level that can be changed: loggers keep the list of processors that they began with."""

    level = logging.INFO

    def __call__(
        self,
        _: object,
        method: str,
        event: MutableMapping[str, Any],  # Any: structlog's type
    ) -> MutableMapping[str, Any]:
        if _LEVEL_OF[method] < self.level:
            raise structlog.DropEvent
        return event


def set_log_level(level: str) -> None:
    """From now on lines of ``level`` and above are written, after ``configure_logs``."""
    for processor in structlog.get_config()["processors"]:
        if isinstance(processor, LevelFilter):
            processor.level = _LEVELS[level]
    logging.getLogger().setLevel(max(_LEVELS[level], logging.INFO))


class LibraryLines(logging.Filter):
    """Lines of the libraries that read what strangers send: one of each logger per interval, so that none fills a log.

    An exception that only says that the input was no message is told in one line, any other with its traceback.
    """

    def __init__(self, *, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._said_at_s: dict[str, float] = {}  # by logger, of which libraries have a few

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        if record.name.partition(".")[0] not in _LIBRARIES:
            return True
        now_s = self._clock()
        if now_s - self._said_at_s.get(record.name, -math.inf) < self._interval_s:
            return False
        self._said_at_s[record.name] = now_s
        error = record.exc_info[1] if record.exc_info else None
        if type(error).__module__.partition(".")[0] in _INPUT_ERRORS:
            record.msg, record.args, record.exc_info = "what was sent is no message: %r", (error,), None
        return True


def redact(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:  # Any: structlog's type
    """Replaces values whose names speak of secrets, whoever logged them."""
    for name in event:
        if any(word in name.lower() for word in SECRET_WORDS):
            event[name] = "[redacted]"
    return event
