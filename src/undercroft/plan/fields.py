"""Numbers out of a model's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from undercroft.errors import ConfigError

__all__ = ["BY_HAND", "NUM_LAYERS", "number", "number_of", "unknown"]

BY_HAND = "say what a token takes with --bytes-per-token (the first log lines of an engine tell)"
"""What is left to do where a config does not say enough."""
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive whole number, or what is to be taken where there is none.

    Raises:
        ConfigError: It is something else, or missing without a default.
    """
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        said = "is missing" if value is None else f"is {value!r}, but must be a number >= 1"
        raise ConfigError(f"{key} {said} in the model's config; {BY_HAND}")
    return value


def number_of(config: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int:
    """The same of a number that models of different makers call differently.

    Raises:
        ConfigError: See `number`; a missing one is called by its first name.
    """
    for key in keys:
        if config.get(key) is not None:
            return number(config, key)
    return number(config, keys[0], default)


def unknown(what: str) -> ConfigError:
    """A config says something that is not understood here.

    Args:
        what: A sentence that names the field.
    """
    return ConfigError(f"{what}; {BY_HAND}")
