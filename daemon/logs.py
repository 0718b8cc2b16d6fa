"""Log lines of hicached: structured, on stderr, without secrets."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

SECRET_WORDS = ("token", "secret", "salt", "password")

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logs(*, level: str, style: str) -> None:
    """Sends the lines of structlog and of `logging` to stderr in one form: ``style`` is console or json."""
    renderer: structlog.typing.Processor
    if style == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        # Plain tracebacks: the pretty ones print local variables, and with them secrets and payloads.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        redact,
        *([structlog.processors.format_exc_info] if style == "json" else []),
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=max(_LEVELS[level], logging.INFO), handlers=[handler], force=True)


def redact(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:  # Any: structlog's type
    """Replaces values whose names speak of secrets, whoever logged them."""
    for name in event:
        if any(word in name.lower() for word in SECRET_WORDS):
            event[name] = "[redacted]"
    return event
