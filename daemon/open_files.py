"""The limit on open file descriptors, raised as far as it may be: clients and the file backend both need many."""

from __future__ import annotations

import resource

import structlog

log = structlog.get_logger("hicache.daemon")


def raise_open_files_limit() -> int:
    """Raises the soft limit of this process to the hard one; returns it. A limit that cannot be raised stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit on open files stays", limit=soft, reason=str(error))
        return soft
    log.info("raised the limit on open files", before=soft, limit=hard)
    return hard
