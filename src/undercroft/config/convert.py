"""From an engine's own configuration objects to ours, and to JSON and back.

No engine is imported: objects are read by attribute. vLLM 0.32 and 0.33 are known.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from undercroft.config.boundary import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from undercroft.errors import ConfigError

__all__ = ["EngineConfig", "from_engine", "from_json", "to_json"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class EngineConfig:
    """What an engine said: the part we know, and the rest by name.

    Args:
        config: The fields this library knows.
        extras: Fields a newer engine added, as plain JSON values, by dotted path:
            `model.max_model_len`, `groups[3].sliding_window_size_in_chunks` (3 is the group id).
            Nothing is concluded from them; they are part of the namespace, so that two engines
            that differ in one never share a chunk.
    """

    config: OffloadingConfig
    extras: Mapping[str, Any] = field(default_factory=dict)


def from_engine(source: object) -> EngineConfig:
    """Read an engine's `OffloadingConfig` object, or ours.

    `extra_config` is copied, so that later changes on either side stay there.

    Raises:
        ConfigError: A field is missing or cannot be right, or an added field holds something
            that is not plain data.
    """
    extras: dict[str, Any] = {}
    groups = _attribute(source, "groups", "")
    if not isinstance(groups, list | tuple):
        raise ConfigError(f"groups is {groups!r}, but must be a sequence of groups")
    config = _build(
        OffloadingConfig,
        source,
        "",
        extras,
        {
            "groups": lambda value: tuple(_group(group, extras) for group in value),
            "extra_config": _copied,
            "model": lambda value: _build(OffloadingModelConfig, value, "model.", extras, {}),
            "cache": lambda value: _build(OffloadingCacheConfig, value, "cache.", extras, {}),
            "parallel": lambda value: _build(
                OffloadingParallelConfig, value, "parallel.", extras, {}
            ),
        },
    )
    return EngineConfig(config, extras)


def to_json(engine: EngineConfig) -> str:
    """The configuration as one line of JSON with sorted keys.

    Raises:
        ConfigError: `extra_config` or `extras` hold something that JSON cannot.
    """
    try:
        return json.dumps(dataclasses.asdict(engine), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"the configuration cannot be written as JSON: {exc}") from exc


def from_json(text: str) -> EngineConfig:
    """Read what `to_json` wrote.

    Raises:
        ConfigError: Not JSON, a field is missing, unknown, or cannot be right.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"the configuration is not JSON: {exc}") from exc
    whole = _fields(EngineConfig, document, "document")
    config = _fields(OffloadingConfig, whole["config"], "config")
    if not isinstance(config["groups"], list):
        raise ConfigError(f"groups is {config['groups']!r}, but must be a list")
    config["groups"] = tuple(_group_from(group) for group in config["groups"])
    for name, kind in (
        ("model", OffloadingModelConfig),
        ("cache", OffloadingCacheConfig),
        ("parallel", OffloadingParallelConfig),
    ):
        config[name] = kind(**_fields(kind, config[name], name))
    extras = whole.get("extras", {})
    if not isinstance(extras, dict):
        raise ConfigError(f"extras is {extras!r}, but must be an object")
    return EngineConfig(OffloadingConfig(**config), extras)


def _group_from(document: object) -> OffloadingGroupConfig:
    group = _fields(OffloadingGroupConfig, document, "groups[]")
    if isinstance(group["layer_names"], list):
        group["layer_names"] = tuple(group["layer_names"])
    return OffloadingGroupConfig(**group)


def _fields(kind: type[Any], document: object, where: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ConfigError(f"{where} is {document!r}, but must be an object")
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(document.keys() - known.keys())
    if unknown:
        raise ConfigError(f"{where} has unknown fields {', '.join(unknown)}")
    missing = [name for name, f in known.items() if name not in document and not _has_default(f)]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    return dict(document)


def _has_default(f: dataclasses.Field[Any]) -> bool:
    unset = dataclasses.MISSING
    return f.default is not unset or f.default_factory is not unset


def _group(source: object, extras: dict[str, Any]) -> OffloadingGroupConfig:
    group_id = _attribute(source, "group_id", "groups[].")
    return _build(
        OffloadingGroupConfig,
        source,
        f"groups[{group_id}].",
        extras,
        {"layer_names": lambda names: tuple(names) if isinstance(names, list) else names},
    )


def _build(
    kind: type[_T],
    source: object,
    prefix: str,
    extras: dict[str, Any],
    convert: Mapping[str, Callable[[Any], object]],
) -> _T:
    """One of our dataclasses from the engine's object; what we do not know goes to `extras`."""
    values: dict[str, Any] = {}
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type] # ours
    for name, f in known.items():
        if _has_default(f) and not hasattr(source, name):
            continue
        value = _attribute(source, name, prefix)
        values[name] = convert.get(name, _plain_number)(value)
    for name in _names(source):
        if name not in known:
            extras[prefix + name] = _plain(getattr(source, name), prefix + name)
    return kind(**values)


def _attribute(source: object, name: str, prefix: str) -> Any:  # noqa: ANN401 - judged later
    try:
        return getattr(source, name)
    except AttributeError as exc:
        raise ConfigError(
            f"{prefix}{name} is missing from the engine's {type(source).__name__}; "
            f"vLLM 0.32 and later have it"
        ) from exc


def _names(source: object) -> list[str]:
    """The fields the engine's object has, for dataclasses and plain objects alike."""
    if dataclasses.is_dataclass(source):
        return [f.name for f in dataclasses.fields(source)]
    return [name for name in getattr(source, "__dict__", {}) if not name.startswith("_")]


def _plain_number(value: object) -> object:
    """Integers of other libraries as `int`; anything else as it is, to be judged by validation."""
    if isinstance(value, bool | str) or value is None:
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type] # tried
    except TypeError:
        return value


def _copied(value: object) -> object:
    """A deep copy of mappings and lists; leaves are shared."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


def _plain(value: object, where: str) -> object:
    """`value` as JSON data: equal values give equal data, in every process."""
    if isinstance(value, Enum):
        return value.name
    value = _plain_number(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name), where) for name in _names(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item, where) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    return _plain_leaf(value, where)


def _plain_leaf(value: object, where: str) -> float | str:
    if isinstance(value, float) and math.isfinite(value):
        return value
    text = str(value)
    if " at 0x" in text:
        raise ConfigError(
            f"{where} of the engine's configuration is {text}, which means nothing in another "
            f"process; this version of the engine is not supported yet"
        )
    return text
