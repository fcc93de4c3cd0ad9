"""What the commands about a store on disk share: which store, which part of it, how old."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from undercroft.cli.output import Column, Output, printable
from undercroft.clock import SystemClock
from undercroft.errors import ConfigError
from undercroft.settings import format_bytes, load, parse_size
from undercroft.settings.sources import merge
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.stored import Store, StoredChunk, StoredNamespace

__all__ = [
    "add_capacity",
    "add_path",
    "capacity_of",
    "catalog_of",
    "columns",
    "counted",
    "find_chunks",
    "find_namespace",
    "has_prefix",
    "model_text",
    "parse_age",
    "say",
    "short_id",
    "size_text",
    "when_text",
    "words",
]

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_SHORT = 12
_MAX_NAMED = 8
_NUMBERS = frozenset({"CHUNKS", "VOID", "BYTES", "SHARE", "SEQUENCE", "SLOT"})
_HEX = re.compile(r"[0-9a-f]+")
_HUB_FOLDER = re.compile(r"models--([^/]+)/snapshots/")
_CUT = "..."


def add_path(parser: argparse.ArgumentParser) -> None:
    """`--path`, of every command about a store."""
    parser.add_argument(
        "--path",
        metavar="DIR",
        help="the directory of a disk tier; if left out, the one of the settings in the "
        "environment or in the file that UNDERCROFT_CONFIG names",
    )


def add_capacity(parser: argparse.ArgumentParser) -> None:
    """`--capacity`, of commands that hold a store against it."""
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="what the store may use, such as 1TiB; if left out, as --path",
    )


def catalog_of(args: argparse.Namespace) -> Catalog:
    """The store that the command line or the settings name.

    Raises:
        ConfigError: Neither names exactly one.
    """
    return Catalog(args.path or _from_settings()[0], SystemClock())


def capacity_of(args: argparse.Namespace) -> int | None:
    """What the store may use; None if nobody says."""
    if args.capacity is not None:
        return parse_size(args.capacity, "--capacity")
    return None if args.path else _from_settings()[1]


def _from_settings() -> tuple[str, int | None]:
    if not merge(environ=os.environ).values:
        raise ConfigError(
            "which store? Name the directory that the engine's disk tier has as its path: "
            "--path /nvme/kv"
        )
    tiers = [tier for tier in load(environ=os.environ).tiers if "path" in tier.options]
    if len(tiers) != 1:
        found = ", ".join(str(tier.options["path"]) for tier in tiers) or "none"
        raise ConfigError(f"which store? The settings have {found}: name one with --path")
    return str(Path(tiers[0].options["path"]).expanduser()), tiers[0].capacity_bytes


def has_prefix(text: str) -> bool:
    """Whether `text` can be the beginning of an id or a key."""
    return bool(_HEX.fullmatch(text.lower()))


def find_namespace(store: Store, prefix: str) -> StoredNamespace:
    """The one namespace whose id begins with `prefix`.

    Raises:
        ConfigError: None does, or several do.
    """
    found = [n for n in store.namespaces if n.namespace_id.startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(short_id(n.namespace_id) for n in found)
        raise ConfigError(f"{len(found)} namespaces begin with {prefix}: {ids}; write more digits")
    known = ", ".join(short_id(n.namespace_id) for n in store.namespaces) or "none"
    raise ConfigError(f"no namespace begins with {prefix}; there are: {known}")


def find_chunks(
    catalog: Catalog, store: Store, prefix: str, namespace: str | None = None
) -> list[tuple[StoredNamespace, StoredChunk]]:
    """All places of the one chunk whose key begins with `prefix`.

    Raises:
        ConfigError: `prefix` is not hex, or several keys begin with it.
    """
    if not has_prefix(prefix):
        raise ConfigError(f"{prefix!r} is not the beginning of a key: hex digits, as `ls` has them")
    prefix = prefix.lower()
    spaces = [find_namespace(store, namespace)] if namespace else store.namespaces
    found = [
        (space, chunk)
        for space in spaces
        for chunk in catalog.chunks(space)
        if chunk.key.hex().startswith(prefix)
    ]
    keys = sorted({chunk.key.hex() for _, chunk in found})
    if len(keys) > 1:
        some = ", ".join(keys[:_MAX_NAMED]) + (", ..." if len(keys) > _MAX_NAMED else "")
        raise ConfigError(f"{len(keys)} keys begin with {prefix}: {some}; write more digits")
    return found


def short_id(text: str) -> str:
    """Enough of an id or a key for people."""
    return text[:_SHORT]


def parse_age(text: str, where: str) -> float:
    """Seconds of `30d`, `12h`, `90m`, `45s`, `2w`, or of a plain number of days.

    Raises:
        ConfigError: It is none of these.
    """
    match = _AGE.fullmatch(text.strip().lower())
    if not match:
        raise ConfigError(f"{where} is {text!r}; write 30d, 12h, 90m, 45s or 2w")
    return float(match[1]) * _UNITS_S[match[2] or "d"]


def _age_text(seconds: float) -> str:
    for limit, unit in ((120, "s"), (7200, "m"), (2 * 86400, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / _UNITS_S[unit]:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def when_text(unix_s: float) -> str:
    """How long before now, in one unit."""
    return f"{_age_text(SystemClock().unix_s() - unix_s)} ago"


def columns(*titles: str) -> list[Column]:
    """Columns of a table; those of numbers go right, and models give way where lines are long."""
    return [
        Column(
            title,
            "right" if title in _NUMBERS else "left",
            model_text if title == "MODEL" else None,
        )
        for title in titles
    ]


def model_text(name: str, width: int) -> str:
    """A model's name in `width` characters: of a path its end, of a folder of the hub its name."""
    hub = _HUB_FOLDER.search(name)
    if len(name) > width and hub:
        name = hub[1].replace("--", "/")
    if len(name) <= width:
        return name
    last = name.rstrip("/").rpartition("/")[2]
    for text in (f"{_CUT}/{last}", last):
        if len(text) <= width:
            return text
    # Families are named at the beginning, sizes and variants at the end.
    num_last = (width - len(_CUT)) // 2
    return last[: width - len(_CUT) - num_last] + _CUT + last[len(last) - num_last :]


def size_text(num_bytes: int) -> str:
    """Bytes for people."""
    return format_bytes(num_bytes)


def say(output: Output, text: str = "") -> None:
    """A line for people, in which a name on disk cannot move the cursor."""
    output.say(printable(text))


def counted(number: int, noun: str) -> str:
    """`1 chunk`, `2 chunks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def words(items: Sequence[object], nothing: str = "-") -> str:
    """Items in one cell."""
    return ", ".join(map(str, items)) or nothing
