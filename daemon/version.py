"""The version that clients, metrics and `hicached --version` are told."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def daemon_version() -> str:
    """Version of the installed distribution; ``unknown`` when it runs from a bare source tree."""
    try:
        return version("hicache")
    except PackageNotFoundError:
        return "unknown"
