"""The command `hicached`: reads settings, and turns what can go wrong at start into one line and an exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click

from hicache.daemon.config import FIELDS, DaemonConfig, describe, load_config, to_toml
from hicache.daemon.logs import configure_logs
from hicache.daemon.version import daemon_version
from hicache.errors import BackendError, ConfigError

EXIT_STOPPED = 0
EXIT_FAILED = 1  # the storage or the socket cannot be used, or the stop was not clean
EXIT_CONFIG = 2

# gRPC has no setting for a version of TLS. This suite of TLS 1.2 needs a key that both sides share beforehand, which
# no client has: what is left is TLS 1.3.
GRPC_CIPHER_SUITES = "ECDHE-PSK-AES128-CBC-SHA"

# By these prometheus_client keeps every metric in files of a folder that it shares with other processes, engines say.
# They are inherited where an engine and hicached start from one environment, and hicached is one process.
MULTIPROCESS_SETTINGS = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")

Command = TypeVar("Command", bound=Callable[..., Any])  # Any: what click decorates


def _settings_as_options(command: Command) -> Command:
    for name, field in reversed(FIELDS.items()):
        shown = f"{describe(name)} [default: {field.default!r}]"
        command = click.option(f"--{name.replace('_', '-')}", name, metavar="VALUE", help=shown)(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(daemon_version(), prog_name="hicached")
@click.option("--config", "config_file", metavar="FILE", help="TOML file with the settings below; flags override it")
@click.option("--print-config", is_flag=True, help="print all settings as TOML, after checking them, and exit")
@_settings_as_options
def main(config_file: str | None, print_config: bool, **flags: str | None) -> None:
    """Serve the stored tier of a KV cache to the engines of this node.

    Exits with 0 after a clean stop (SIGTERM), 2 for a wrong setting, 1 when the storage or the socket cannot be used.
    """
    try:
        config = load_config(config_file, flags, os.environ)
        if print_config:
            click.echo(to_toml(config), nl=False)
            return
        stopped_clean = _run(config, partial(load_config, config_file, flags, os.environ))
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    except BackendError as error:
        _fail(str(error), EXIT_FAILED)
    else:
        if not stopped_clean:
            _leave_at_once(EXIT_FAILED)


def _run(config: DaemonConfig, reread: Callable[[], DaemonConfig]) -> bool:
    # Read by gRPC when it is imported, below: its own lines would bury the one that explains a failed start.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ["GRPC_SSL_CIPHER_SUITES"] = GRPC_CIPHER_SUITES
    for name in MULTIPROCESS_SETTINGS:
        os.environ.pop(name, None)
    from prometheus_client import disable_created_metrics

    from hicache.daemon.process import serve

    disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client has none here
    configure_logs(level=config.log_level, style=config.log_format)
    return asyncio.run(serve(config, environment=os.environ, reread=reread))


def _fail(message: str, code: int) -> None:
    click.echo(f"hicached: {message}", err=True)
    sys.exit(code)


def _leave_at_once(code: int) -> None:
    """Ends the process without waiting for threads that may never come back."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
