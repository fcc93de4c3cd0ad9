"""`undercroft config`: every setting, its default, its value, and where that comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercroft.cli.output import Column, Exit, Output, Subparsers, add_command, output_for
from undercroft.engines.assemble import check_plugins
from undercroft.errors import ConfigError
from undercroft.settings import Settings, TierSettings, format_bytes
from undercroft.settings.model import build
from undercroft.settings.schema import (
    ENGINE_KEYS,
    FAULTY,
    KEYS,
    TIER_KEYS,
    TIER_OPTIONS,
    Key,
    capacity,
    size,
    size_or_zero,
)
from undercroft.settings.sources import ENVIRONMENT_PREFIX, FILE_VARIABLE, Merged, merge

__all__ = ["Row", "add_parser", "rows", "run"]

_DESCRIPTION = f"""\
Prints every setting with its default, its value, and where the value comes from: the default, a
TOML file (--file, or {FILE_VARIABLE}), the environment ({ENVIRONMENT_PREFIX}*), vLLM's JSON
(--kv-transfer-config), or --set. Exit code 2: with these settings nothing would start, and the line
on standard error says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One setting.

    Args:
        key: `host`, or `tiers[0].path`.
        value: What counts now; None if nothing does.
        default: For people.
        source: `default`, or where it was written.
        meaning: One line.
    """

    key: str
    value: Any
    default: str
    source: str
    meaning: str


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "config",
        "print every setting, its default, its value and where that comes from",
        description=_DESCRIPTION,
    )
    parser.add_argument("--file", type=Path, metavar="TOML", help="a settings file")
    parser.add_argument(
        "--kv-transfer-config",
        metavar="JSON",
        help="as given to vLLM, or @FILE; or only its kv_connector_extra_config",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting"
    )


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    output = output_for(args)
    merged = merge(
        _extra(args.kv_transfer_config), environ=os.environ, file=args.file, cli=args.set
    )
    settings: Settings | None = None
    problem: ConfigError | None = None
    try:
        settings = build(merged.values, merged.origins, merged.engine, merged.notes)
        check_plugins(settings)
    except ConfigError as exc:
        problem = exc
    found = list(rows(merged, settings))
    _show(output, found, merged.notes)
    output.data(
        {
            "settings": [
                {"key": r.key, "value": r.value, "default": r.default, "source": r.source}
                for r in found
            ],
            "notes": list(merged.notes),
            "error": None if problem is None else str(problem),
        }
    )
    if problem is not None:
        output.error(str(problem))
        return Exit.USAGE
    return Exit.FINE


def _extra(written: str | None) -> Mapping[str, Any] | None:
    """`kv_connector_extra_config` out of what the user gave."""
    if written is None:
        return None
    try:
        text = Path(written[1:]).read_text(encoding="utf-8") if written.startswith("@") else written
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--kv-transfer-config is not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"--kv-transfer-config is {text}, but must be an object")
    inner = found.get("kv_connector_extra_config", {} if "kv_connector" in found else found)
    if not isinstance(inner, dict):
        raise ConfigError(f"kv_connector_extra_config is {inner!r}, but must be an object")
    return inner


def rows(merged: Merged, settings: Settings | None) -> Iterator[Row]:
    """Every setting, in the order of the reference page.

    Args:
        merged: What was written.
        settings: What it became; None if it is wrong, and then values are as written.
    """
    for name, key in KEYS.items():
        value: Any = merged.values.get(name)
        if settings is not None:
            value = _parsed(settings, name)
        if name == "tiers":
            value = _tier_names(value, settings)
        yield _row(name, key, value, merged.origins.get(name))
    for index, tier in enumerate(settings.tiers if settings is not None else ()):
        yield from _tier_rows(f"tiers[{index}]", tier, merged)
    for name, value in merged.engine.items():
        yield _row(name, ENGINE_KEYS[name], value, "kv_connector_extra_config or the command line")


def _tier_names(written: object, settings: Settings | None) -> object:
    if settings is not None:
        return [tier.name for tier in settings.tiers]
    if isinstance(written, list):
        return [entry.get("name", entry.get("type")) for entry in written]
    return written


def _row(name: str, key: Key, value: object, origin: str | None) -> Row:
    return Row(name, value, key.default, origin or "default", key.meaning)


def _parsed(settings: Settings, name: str) -> Any:  # noqa: ANN401 - any kind of setting
    if name == "host":
        return settings.host_bytes
    if name == "admission":
        return _chosen(settings.admission, settings.admission_options)
    return getattr(settings, name)


def _chosen(name: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401 - name, or with options
    return {"type": name, **options} if options else name


_IN_BYTES = {"capacity": "capacity_bytes", "write_rate": "write_rate_bytes"}
"""Keys of a tier whose values are kept under the name of their unit."""


def _tier_rows(prefix: str, tier: TierSettings, merged: Merged) -> Iterator[Row]:
    origin = merged.origins["tiers"]
    written = merged.values["tiers"]
    entry = written[int(prefix[6:-1])] if isinstance(written, list) else {}
    if tier.faults is not None:
        yield _row(f"{prefix}.control", TIER_OPTIONS[FAULTY]["control"], tier.faults, origin)
        entry = entry.get("inner", {})
    for name, key in TIER_KEYS.items():
        value = getattr(tier, _IN_BYTES.get(name, name))
        if name == "admission":
            value = _chosen(tier.admission, tier.admission_options)
        is_written = name in entry or not isinstance(written, list)
        yield _row(f"{prefix}.{name}", key, value, origin if is_written else None)
    for name, key in TIER_OPTIONS.get(tier.type, {}).items():
        yield _row(
            f"{prefix}.{name}",
            key,
            tier.options.get(name),
            origin if name in tier.options else None,
        )
    for name in tier.options.keys() - TIER_OPTIONS.get(tier.type, {}).keys():
        own = Key(name, lambda value, _: value, "the plug-in's", "An option of the plug-in.")
        yield _row(f"{prefix}.{name}", own, tier.options[name], origin)


def _show(output: Output, found: list[Row], notes: tuple[str, ...]) -> None:
    output.table(
        [Column("setting"), Column("value"), Column("default"), Column("from")],
        [
            [
                output.paint(row.key, "bold") if row.source != "default" else row.key,
                _text(row),
                row.default,
                row.source if row.source == "default" else output.paint(row.source, "cyan"),
            ]
            for row in found
        ],
    )
    for line in notes:
        output.say(f"note: {line}")


def _text(row: Row) -> str:
    if row.value is None:
        return "not set" if row.default == "required" else row.default
    if isinstance(row.value, bool):
        return str(row.value).lower()
    if isinstance(row.value, int) and row.key.rpartition(".")[2] in _SIZES:
        return format_bytes(row.value)
    if isinstance(row.value, float):
        return f"{row.value:g}"
    if isinstance(row.value, str):
        return row.value
    return json.dumps(row.value, default=str)


_SIZES = frozenset(
    key.name
    for table in (KEYS, TIER_KEYS, *TIER_OPTIONS.values())
    for key in table.values()
    if key.kind in (size, size_or_zero, capacity)
)
