"""The keys a user may write: their kinds, meanings and defaults, and what a wrong one is told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from undercroft.errors import ConfigError
from undercroft.settings.sizes import SIZE_FORMS, parse_size

__all__ = [
    "DEFAULT_CAPACITY",
    "ENGINE_KEYS",
    "FAULTY",
    "KEYS",
    "TIER_KEYS",
    "TIER_OPTIONS",
    "Key",
    "Kind",
    "an_object",
    "anything",
    "at_least_one",
    "capacity",
    "chosen",
    "count",
    "flag",
    "locality",
    "objects",
    "positive",
    "ratio",
    "record_size",
    "refuse_unknown",
    "seconds",
    "size",
    "size_or_zero",
    "text",
]

Kind = Callable[[object, str], Any]
"""Turns what a user wrote, text included, into a value; the second argument names it."""

DEFAULT_CAPACITY = object()
"""Stands for the capacity of stock's `fs` tier, which has none; nobody can write it."""

_LOCALITIES = ("LOCAL", "REMOTE")
_NO_DEFAULT = "none"
_LEAST_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class Key:
    """One key.

    Args:
        name: As written.
        kind: Its parser.
        default: For people; what happens when it is left out.
        meaning: One line for people.
    """

    name: str
    kind: Kind
    default: str
    meaning: str


def size(value: object, where: str) -> int:
    """A size in bytes, > 0."""
    return parse_size(value, where)


def size_or_zero(value: object, where: str) -> int:
    """A size in bytes, 0 included."""
    return 0 if value in (0, "0") else parse_size(value, where)


def record_size(value: object, where: str) -> int:
    """A size in bytes, >= 1 MiB: less is too little for several files."""
    num_bytes = parse_size(value, where)
    if num_bytes < _LEAST_RECORD_BYTES:
        raise ConfigError(f"{where} is {value!r}, but must be at least 1MiB")
    return num_bytes


def capacity(value: object, where: str) -> int | None:
    """A size in bytes, or the stated default."""
    return None if value is DEFAULT_CAPACITY else parse_size(value, where)


def text(value: object, where: str) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} is {value!r}, but must be non-empty text")
    return value


def flag(value: object, where: str) -> bool:
    """True or false, in the usual words."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    found = words.get(str(value).strip().lower())
    if found is None or isinstance(value, float):
        raise ConfigError(f"{where} is {value!r}, but must be true or false")
    return found


def count(value: object, where: str) -> int:
    """A whole number, 0 included."""
    number = _number(value)
    if number is None or number < 0 or not number.is_integer():
        raise ConfigError(f"{where} is {value!r}, but must be a whole number >= 0")
    return int(number)


def positive(value: object, where: str) -> int:
    """A whole number, > 0."""
    number = _number(value)
    if number is None or number < 1 or not number.is_integer():
        raise ConfigError(f"{where} is {value!r}, but must be a whole number >= 1")
    return int(number)


def seconds(value: object, where: str) -> float:
    """Seconds, > 0."""
    number = _number(value)
    if number is None or number <= 0:
        raise ConfigError(f"{where} is {value!r}, but must be a number of seconds > 0")
    return number


def at_least_one(value: object, where: str) -> float:
    """A factor, >= 1."""
    number = _number(value)
    if number is None or number < 1:
        raise ConfigError(f"{where} is {value!r}, but must be a number >= 1")
    return number


def ratio(value: object, where: str) -> float:
    """A share, in (0, 1]."""
    number = _number(value)
    if number is None or not 0 < number <= 1:
        raise ConfigError(f"{where} is {value!r}, but must be a ratio above 0 and up to 1")
    return number


def locality(value: object, where: str) -> str:
    """`LOCAL` or `REMOTE`."""
    if value not in _LOCALITIES:
        raise ConfigError(f"{where} is {value!r}, but must be {' or '.join(_LOCALITIES)}")
    return str(value)


def objects(value: object, where: str) -> list[dict[str, Any]]:
    """A list of objects, or its JSON text; copied one level deep."""
    if isinstance(value, str):
        value = _decoded(value, where)
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"{where} is {value!r}, but must be a list of objects such as "
            f'[{{"type": "disk", "path": "/nvme/kv", "capacity": "1TiB"}}]'
        )
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise ConfigError(f"{where}[{index}] is {item!r}, but must be an object")
    return [dict(item) for item in value]


def an_object(value: object, where: str) -> dict[str, Any]:
    """One object; copied one level deep."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}, but must be an object")
    return dict(value)


def anything(value: object, _where: str) -> object:
    """Whatever was written."""
    return value


def chosen(value: object, where: str) -> tuple[str, Mapping[str, Any]]:
    """A plug-in's name, or an object (or its JSON text) with `type` and the plug-in's options."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _decoded(value, where)
    if isinstance(value, Mapping):
        options = dict(value)
        if "type" not in options:
            raise ConfigError(f'{where} lacks type: which one, such as "frequency"')
        return text(options.pop("type"), f"type of {where}"), options
    return text(value, where), {}


def _decoded(value: str, where: str) -> object:
    try:
        decoded: object = json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{where} is text but not JSON: {exc}") from exc
    return decoded


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _table(*keys: Key) -> Mapping[str, Key]:
    return {key.name: key for key in keys}


KEYS: Mapping[str, Key] = _table(
    Key("host", size, "required", "Host memory of one replica, all its ranks together."),
    Key("policy", text, "lru", "Eviction policy of host memory."),
    Key("admission", chosen, "always", "Which chunks may enter host memory."),
    Key("tiers", objects, "[]", "Tiers below host memory, nearest first."),
    Key("model_id", text, "found out", "Says which weights these are, instead of a fingerprint."),
    Key("offload_prompt_only", flag, "true", "Keep prompts only, not generated tokens."),
    Key("keep_across_sleep", flag, "false", "Drop nothing when the engine sleeps or pauses."),
    Key(
        "self_describing_kv_events",
        flag,
        "false",
        "KV cache events carry token ids and parent hashes, if the engine sends events at all.",
    ),
    Key("lookup_deadline_s", seconds, "0.02", "Longest wait for a remote tier to answer a lookup."),
    Key("promote_deadline_s", seconds, "2", "Longest wait for a chunk to come up from a tier."),
    Key(
        "load_only_if_faster",
        flag,
        "true",
        "Compute what a tier is predicted to bring up more slowly than the engine computes it.",
    ),
    Key("load_margin", at_least_one, "1.5", "How many times more slowly, before that is done."),
    Key("drain_deadline_s", seconds, "1", "Longest wait for lower levels to take a reset."),
    Key("shutdown_deadline_s", seconds, "3", "Longest wait for transfers under way at the end."),
    Key("open_deadline_s", seconds, "60", "Longest wait for a tier to open at the start."),
    Key("join_deadline_s", seconds, "60", "Longest wait for all ranks to join host memory."),
    Key(
        "restore_share_ratio", ratio, "1", "Share of host memory that promotions may hold at once."
    ),
    Key(
        "max_queued_write_bytes",
        size,
        "a quarter of host",
        "Bytes that may wait to be written to tiers; what exceeds it is not cascaded.",
    ),
    Key("record", text, _NO_DEFAULT, "Folder to record a trace of the requests in: numbers only."),
    Key("record_max_bytes", record_size, "64MiB", "Bytes of all traces in that folder."),
    Key("record_block_tokens", positive, "128", "Tokens of a block of the trace, about."),
)
"""What may be written at the top, by name."""

TIER_KEYS: Mapping[str, Key] = _table(
    Key("type", text, "required", "Which tier."),
    Key("name", text, "its type", "What metrics and log lines call it; unique."),
    Key("capacity", capacity, "required", "Bytes it may hold; never exceeded."),
    Key("policy", text, "lru", "Eviction policy of this tier."),
    Key("admission", chosen, "always", "Which chunks may enter this tier."),
    Key("events", flag, "true", "Report what it stores and removes, if the engine sends events."),
    Key("locality", locality, _NO_DEFAULT, "LOCAL or REMOTE, as its events say."),
    Key("write_rate", size, _NO_DEFAULT, "Bytes a second that may be written to it."),
)
"""What may be written in an entry of `tiers`, whatever its type."""

FAULTY = "faulty"
"""The type that stands round a tier to make it go wrong; it has none of `TIER_KEYS` but `type`."""

TIER_OPTIONS: Mapping[str, Mapping[str, Key]] = {
    "memory": {},
    "disk": _table(
        Key("path", text, "required", "Folder on a local disk; several engines may share it."),
        Key(
            "free_space_floor",
            size_or_zero,
            "1GiB",
            "Bytes of the file system left to others.",
        ),
        Key(
            "num_threads",
            positive,
            "8 for chunks below 1 MiB, else 4",
            "Threads that read and write.",
        ),
        Key(
            "write_budget",
            size,
            _NO_DEFAULT,
            "Bytes a day that may be written to it, by all engines on the path together.",
        ),
        Key(
            "direct", flag, "where possible", "Bypass the page cache where the file system lets us."
        ),
        Key(
            "mover_process",
            flag,
            "false",
            "Read and write in a process of the tier's own, rather than in the engine's.",
        ),
    ),
    FAULTY: _table(
        Key("control", text, "required", "File that says what goes wrong on purpose."),
        Key("inner", an_object, "required", "The tier that goes wrong, written as by itself."),
    ),
}
"""What else may be written, by type. A type that is not here takes its options unchecked."""

ENGINE_KEYS: Mapping[str, Key] = _table(
    Key("block_size", positive, "the engine's", "Tokens per chunk."),
    Key("blocks_per_chunk", positive, "1", "Blocks per chunk."),
    Key("canonical_layout", flag, "false", "Store pages as if there were one rank."),
    Key("spec_name", text, _NO_DEFAULT, "The class vLLM loads."),
    Key("spec_module_path", text, _NO_DEFAULT, "The module vLLM loads it from."),
)
"""Keys the engine reads itself, from `kv_connector_extra_config` only."""

_SIZES = (size, size_or_zero, capacity, record_size)
_MEANT = {
    "host_bytes": "host",
    "ram": "host",
    "memory": "host",
    "cpu_bytes": "host",
    "root_dir": "path",
    "rootdir": "path",
    "dir": "path",
    "directory": "path",
    "folder": "path",
    "max_bytes": "capacity",
    "max_size": "capacity",
    "size": "capacity",
    "quota": "capacity",
    "capacity_bytes": "capacity",
    "capacity_gb": "capacity",
    "max_capacity_gb": "capacity",
    "threads": "num_threads",
}


def refuse_unknown(written: Iterable[str], valid: Mapping[str, Key], where: str) -> None:
    """Refuse keys that nobody reads.

    Raises:
        ConfigError: One line with the first unknown key, where it is, the nearest valid key and
            what that one takes.
    """
    for key in written:
        if key in valid:
            continue
        meant = _MEANT.get(key, key)
        near = [meant] if meant in valid else get_close_matches(key, valid, n=1, cutoff=0.6)
        if not near:
            raise ConfigError(
                f"{where} has an unknown key {key!r}; valid are {', '.join(sorted(valid))}"
            )
        nearest = valid[near[0]]
        takes = f", {SIZE_FORMS}" if nearest.kind in _SIZES else ""
        raise ConfigError(
            f"{where} has an unknown key {key!r}; did you mean {nearest.name!r}{takes}?"
        )
