"""The limits of the process, raised as far as they may be, and compared with what the settings may need."""

from __future__ import annotations

import resource

import structlog

from hicache.daemon.acceptor import STRANGERS_MAX
from hicache.daemon.config import DaemonConfig
from hicache.daemon.sessions import REGIONS_PER_SESSION_MAX
from hicache.errors import ConfigError
from hicache.wire.bulk import BULK_CONNECTIONS_PER_SESSION_MAX

OWN_FILES = 128  # listening sockets, the store, libraries, and some to spare
FILES_MIN = OWN_FILES + 8 * STRANGERS_MAX  # below that, strangers alone would take all

log = structlog.get_logger("hicache.daemon")


def files_needed(config: DaemonConfig) -> int:
    """Descriptors when every session has all that it may have, and strangers at every socket, too.

    A session has a connection, connections of the bulk socket and regions; the file backend opens one for each thread.
    """
    per_session = 1 + BULK_CONNECTIONS_PER_SESSION_MAX + REGIONS_PER_SESSION_MAX
    return FILES_MIN + config.sessions_max * per_session + 4 * config.io_threads


def locked_bytes_needed(config: DaemonConfig) -> int:
    """Memory that a network card writes to has to be locked; nothing else is."""
    if config.backend != "mooncake" or config.mooncake_protocol != "rdma":
        return 0
    return config.mooncake_segment_bytes + max(1 << 30, 4 * config.object_bytes_max)


def check_limits(config: DaemonConfig) -> None:
    """Raises the soft limit on open files; says which limit is too low, for what, and how to raise it.

    Raises ConfigError where the daemon could not serve even a few.
    """
    files, needed = _raise_open_files(), files_needed(config)
    if files < FILES_MIN:
        expected = f"at least {FILES_MIN}, and {needed} for sessions_max = {config.sessions_max}: LimitNOFILE={needed}"
        raise ConfigError("limit on open files", files, f"{expected} in the unit, or ulimit -n {needed}")
    if files < needed:
        log.warning(
            "the limit on open files is below what the sessions may need: LimitNOFILE= in the unit, or ulimit -n",
            limit=files,
            needed=needed,
            sessions_max=config.sessions_max,
        )
    locked, locked_needed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], locked_bytes_needed(config)
    if locked != resource.RLIM_INFINITY and locked < locked_needed:
        log.warning(
            "the limit on locked memory is below what rdma needs: LimitMEMLOCK= in the unit, or ulimit -l",
            limit_bytes=locked,
            needed_bytes=locked_needed,
        )


def _raise_open_files() -> int:
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
