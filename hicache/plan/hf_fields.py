"""Fields of a `config.json`, each checked where it is read: an error names the field, its value and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from hicache.errors import ConfigError

SIZE_MAX = 2**32  # above every size that a model has; products of such sizes stay exact

Config: TypeAlias = Mapping[str, Any]  # JSON: checked where it is read


def first(config: Config, *names: str) -> Any:
    """The first of several names of one field that the config has, else None. Any, as JSON is."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def whole(config: Config, *names: str, default: int | None = None, at_least: int = 1, at_most: int = SIZE_MAX) -> int:
    """A whole number under the first of the names that is there. Raises ConfigError where there is none, or another."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        raise ConfigError(f"config.{name}", shortened(value), f"a whole number from {at_least} to {at_most}")
    return value


def section(config: Config, name: str) -> Config:
    """The object under a name, empty where there is none. Raises ConfigError for anything else."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config.{name}", shortened(value), "an object of fields")
    return value or {}


def strings(config: Config, *names: str) -> list[str]:
    """A list of texts, empty where there is none. Raises ConfigError for anything else."""
    value = first(config, *names)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise ConfigError(f"config.{names[0]}", shortened(value), "a list of texts, one for each layer")
    return value or []


def layer_numbers(config: Config, name: str, *, start: int, layer_count: int) -> set[int]:
    """A list of layers, counted from ``start``. Raises ConfigError for one that the model does not have."""
    value = config.get(name)
    known = range(start, start + layer_count)
    if not isinstance(value, list) or not all(isinstance(layer, int) and layer in known for layer in value):
        raise ConfigError(f"config.{name}", shortened(value), f"a list of layers from {start} to {known[-1]}")
    return set(value)


def shortened(value: Any) -> Any:
    """A value as an error shows it: of a hostile file it may be a megabyte."""
    shown = repr(value)
    return value if len(shown) <= 80 else f"{shown[:77]}..."
