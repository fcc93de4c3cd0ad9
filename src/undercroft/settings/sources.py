"""The four places a setting can come from, and which of them wins.

The command line wins over `kv_connector_extra_config`, that over the environment, that over the
file. Each key is taken whole from the strongest source that has it: lists are not merged.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undercroft.errors import ConfigError
from undercroft.settings.model import Settings, build
from undercroft.settings.schema import ENGINE_KEYS
from undercroft.settings.stock import Written, translate

__all__ = [
    "ENVIRONMENT_PREFIX",
    "FILE_VARIABLE",
    "Merged",
    "assignments",
    "load",
    "merge",
    "parse_file",
]

ENVIRONMENT_PREFIX = "UNDERCROFT_"
FILE_VARIABLE = "UNDERCROFT_CONFIG"
"""Environment variable that names the TOML file."""

_MAX_FILE_BYTES = 1 << 20
_KUBERNETES = re.compile(r"UNDERCROFT_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
"""What Kubernetes adds to every container beside a service `undercroft`, or `undercroft-chat`."""
_TESTS = ENVIRONMENT_PREFIX + "TEST_"
"""Variables of our own test suite, such as the seed of a run that is to be replayed."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What all places say together, before it is judged as a whole.

    Args:
        values: Our keys that were written, as written.
        origins: Where each was written.
        engine: Keys the engine reads itself, parsed.
        notes: What the translation of stock's keys had to say.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    engine: Mapping[str, Any]
    notes: tuple[str, ...]


def load(
    extra_config: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    cli: Sequence[str] = (),
) -> Settings:
    """Read the settings from all four places.

    Args:
        extra_config: vLLM's `kv_connector_extra_config`; not changed.
        environ: The process's environment: `UNDERCROFT_HOST=32GiB` and so on, other names are
            not looked at; `UNDERCROFT_CONFIG` names the file if `file` is None.
        file: A TOML file with the same keys at its top and `[[tiers]]` tables.
        cli: `key=value` words of a command line.

    Raises:
        ConfigError: A key is unknown or a value wrong, in any of the places; the file cannot be
            read.

    Cost: reads `file` once.
    """
    merged = merge(extra_config, environ=environ, file=file, cli=cli)
    return build(merged.values, merged.origins, merged.engine, merged.notes)


def merge(
    extra_config: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    cli: Sequence[str] = (),
) -> Merged:
    """What the four places say, the strongest of them for each key; see `load`.

    Raises:
        ConfigError: A key is unknown, or the file cannot be read. Most values are judged later.
    """
    environ = environ or {}
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    places = [
        (f"the file {file}", _read(file) if file is not None else {}),
        (f"the environment ({ENVIRONMENT_PREFIX}*)", _from_environment(environ)),
        ("kv_connector_extra_config", extra_config or {}),
        ("the command line", assignments(cli)),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    engine: dict[str, Any] = {}
    notes: list[str] = []
    for index, (where, source) in enumerate(places):
        written = translate(source, where)
        if index <= 1:
            _refuse_engine_keys(written, where)
        values.update(written.values)
        origins.update(dict.fromkeys(written.values, where))
        engine.update(written.engine)
        notes.extend(written.notes)
    return Merged(values, origins, engine, tuple(notes))


def assignments(words: Sequence[str]) -> dict[str, str]:
    """`key=value` words as a mapping; the last of equal keys wins.

    Raises:
        ConfigError: A word has no `=`.
    """
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} on the command line is not key=value")
        found[key.strip()] = value
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as open_file:
            data = open_file.read(_MAX_FILE_BYTES + 1)
        return parse_file(data, str(file))
    except OSError as exc:
        raise ConfigError(f"the settings file {file} cannot be read: {exc}") from exc


def parse_file(data: bytes, file: str) -> dict[str, Any]:
    """What the bytes of the settings file `file` say.

    Raises:
        ConfigError: They are not TOML, or more than any settings are.
    """
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"the settings file {file} has more than {_MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(data.decode().replace("\r\n", "\n"))
    except UnicodeDecodeError as exc:
        raise ConfigError(f"the settings file {file} cannot be read: {exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"the settings file {file} is not TOML: {exc}") from exc


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX)
        and name != FILE_VARIABLE
        and not name.startswith(_TESTS)
        and not _KUBERNETES.fullmatch(name)
    }


def _refuse_engine_keys(written: Written, where: str) -> None:
    for name in written.engine:
        raise ConfigError(
            f"{where} has {name} ({ENGINE_KEYS[name].meaning}), which the engine reads only from "
            f"kv_connector_extra_config; write it there"
        )
