"""Values of an engine's configs, in a form that is the same in every process and unequal where they are."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path

from hicache.connectors.checkpoint import fingerprint_path
from hicache.errors import ConfigError
from hicache.keys import FieldValue

VALUE_CHARS_MAX = 200  # longer values stand as their digest: a descriptor travels with each hello

# Of a Hugging Face config, what says where it came from and not what it computes.
HF_PROVENANCE = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})

_DIGESTED = "blake2b "  # what a text begins with that stands for a longer one


def plain(name: str, value: object) -> object:
    """``value`` as JSON would have it, the same in every process; what JSON has no kind for begins with its kind.

    Unequal values are never alike: a number, its text and a list of its text differ.
    """
    match value:
        case Enum():  # before int and str, which many of them are
            return ["enum", type(value).__name__, value.name]
        case None | bool() | int() | str():
            return value
        case float():
            return ["float", repr(value)]
        case Fraction() | Path():
            return [type(value).__name__, str(value)]
        case bytes():
            return ["bytes", value.hex()]
        case Mapping():
            pairs = ([plain(name, key), plain(f"{name}.{key}", item)] for key, item in value.items())
            return ["map", *sorted(pairs, key=as_text)]
        case set() | frozenset():
            return ["set", *sorted((plain(name, item) for item in value), key=as_text)]
        case type():
            return ["type", f"{value.__module__}.{value.__qualname__}"]
        case Sequence():
            return ["list", *(plain(name, item) for item in value)]
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        fields = ([each, plain(f"{name}.{each}", getattr(value, each))] for each in names)
        return ["class", type(value).__name__, *fields]
    if type(value).__module__.split(".")[0] == "torch" and type(value).__name__ == "dtype":
        return ["dtype", str(value)]
    if callable(to_dict := getattr(value, "to_dict", None)):
        return ["config", type(value).__name__, _plain_config(name, to_dict())]
    raise ConfigError(name, value, "a value whose text is the same in every process (it is part of what is shared)")


def _plain_config(name: str, value: Mapping[str, object]) -> object:
    return plain(name, {key: item for key, item in value.items() if key not in HF_PROVENANCE})


def as_text(value: object) -> str:
    """One text for equal values, and others for others; of what ``plain`` gives."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def of_file(value: object) -> object:
    """What is in the file that ``value`` names; itself where it names none."""
    try:
        return ["file", fingerprint_path(Path(value))] if isinstance(value, str) and Path(value).is_file() else value
    except OSError as error:  # a text that is too long for a name is none; one that cannot be read says nothing
        return value if error.errno == errno.ENAMETOOLONG else ["file", str(error)]


def bounded(name: str, value: object) -> FieldValue:
    """The value itself where it is a plain one, else its JSON in bytes, which is like no text; long ones by digest."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value if len(value) <= VALUE_CHARS_MAX and not value.startswith(_DIGESTED) else _digest_of(value)
    text = as_text(value)
    return text.encode() if len(text) <= VALUE_CHARS_MAX else _digest_of(value)


def _digest_of(value: object) -> str:
    digest = blake2b(as_text(value).encode(), digest_size=16, person=b"vllm.identity")
    return f"{_DIGESTED}{digest.hexdigest()}"
