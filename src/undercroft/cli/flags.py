"""The flags that say what to keep where, and how they become settings and vLLM's JSON.

`serve` and `doctor` take them, with vLLM's own options beside. There are two `--host`: ours is a
size, vLLM's an address, so the value decides whose it is.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from undercroft.cli.output import CommandFailed, Exit
from undercroft.errors import ConfigError
from undercroft.settings import Settings, load
from undercroft.settings.schema import ENGINE_KEYS
from undercroft.settings.sources import assignments

__all__ = ["CONNECTOR", "Asked", "add_settings_flags", "asked_for"]

CONNECTOR: Mapping[str, Any] = {
    "kv_connector": "UndercroftConnector",
    "kv_connector_module_path": "undercroft.engines.vllm",
    "kv_role": "kv_both",
}
"""What names Undercroft to vLLM, beside the extra configuration."""
_TRANSFER_FLAG = "--kv-transfer-config"
_HOST_NAME = re.compile(r"[A-Za-z]|\[|.*:")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks for.

    Args:
        model: The model, as given to vLLM, or None.
        extra: `kv_connector_extra_config`, as it will be written.
        rest: vLLM's options, in their order; no `--kv-transfer-config` among them.
        transfer: The whole `--kv-transfer-config` that the user wrote, or None.
    """

    model: str | None
    extra: Mapping[str, Any]
    rest: tuple[str, ...]
    transfer: Mapping[str, Any] | None = None

    def settings(self) -> Settings:
        """As the engine will read them: this, the environment and the file it names.

        Raises:
            ConfigError: Something is missing or wrong.
        """
        return load(self.extra, environ=os.environ)

    def transfer_config(self) -> dict[str, Any]:
        """The value of vLLM's `--kv-transfer-config`."""
        if self.transfer is not None:
            return dict(self.transfer)
        return {**CONNECTOR, "kv_connector_extra_config": dict(self.extra)}

    def vllm_words(self, *, with_transfer: bool = True) -> list[str]:
        """What follows `vllm serve`.

        Args:
            with_transfer: False to leave Undercroft out.
        """
        model = [] if self.model is None else [self.model]
        ours = [_TRANSFER_FLAG, json.dumps(self.transfer_config())] if with_transfer else []
        return [*model, *self.rest, *ours]


def add_settings_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--host`, `--disk` and `--set`."""
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="SIZE",
        help="host memory of one replica, such as 32GiB; an address here is vLLM's own --host",
    )
    parser.add_argument(
        "--disk",
        action="append",
        default=[],
        metavar="PATH:SIZE",
        help="a folder on a local disk and how much it may hold, such as /nvme/kv:1TiB; may be "
        "given several times, nearest first",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other setting, such as policy=arc (see `undercroft config`)",
    )


def asked_for(args: argparse.Namespace) -> Asked:
    """Read the flags of `add_settings_flags`, `args.model` and `args.rest`.

    Raises:
        ConfigError: A flag contradicts another one, or is not what it should be.
    """
    rest = list(args.rest)
    _refuse_swallowed(args.model, args.words, rest)
    sizes = [value for value in args.host if not _is_address(value)]
    for value in args.host:
        if _is_address(value):
            rest += ["--host", value]
    if len(sizes) > 1:
        raise ConfigError(f"--host is given {len(sizes)} sizes, {' and '.join(sizes)}; keep one")
    extra: dict[str, Any] = {
        name: ENGINE_KEYS[name].kind(value, f"--set {name}") if name in ENGINE_KEYS else value
        for name, value in assignments(args.set).items()
    }
    given = {
        **({"host": sizes[0]} if sizes else {}),
        **({"tiers": [_disk(value) for value in args.disk]} if args.disk else {}),
    }
    for name in given:
        if name in extra:
            raise ConfigError(f"{name} is given twice, by --set and by a flag of its own; keep one")
    transfer = _take_transfer(rest)
    if transfer is not None:
        if extra or given:
            raise ConfigError(
                f"{_TRANSFER_FLAG} is given beside --host, --disk or --set, which write it; keep "
                f"the one or the others"
            )
        extra = transfer.get("kv_connector_extra_config") or {}
        if not isinstance(extra, dict):
            raise ConfigError(
                f"kv_connector_extra_config in {_TRANSFER_FLAG} is {extra!r}, but must be an object"
            )
        return Asked(args.model, dict(extra), tuple(rest), transfer)
    return Asked(args.model, {**extra, **given}, tuple(rest))


def _refuse_swallowed(model: str | None, words: Sequence[str], rest: Sequence[str]) -> None:
    """Refuse a model behind an option of vLLM's: it may be that option's value."""
    if model is None:
        return
    before = [w for w in words[: words.index(model)] if w.startswith("-") and w in rest]
    if before:
        raise CommandFailed(
            f"{model!r} may be the value of {before[-1]} or the model; write the model before "
            f"vLLM's options",
            Exit.USAGE,
        )


def _is_address(value: str) -> bool:
    """Whether a value of `--host` is meant for vLLM's server."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return _HOST_NAME.match(value) is not None
    return "." in value or ":" in value


def _disk(value: str) -> dict[str, str]:
    path, colon, size = value.rpartition(":")
    if not colon or not path or not size:
        raise ConfigError(
            f"--disk is {value!r}, but must be a folder and how much it may hold, such as "
            f"/nvme/kv:1TiB"
        )
    return {"type": "disk", "path": path, "capacity": size}


def _take_transfer(rest: list[str]) -> dict[str, Any] | None:
    """Take `--kv-transfer-config` out of vLLM's options."""
    found: list[str] = []
    index = 0
    while index < len(rest):
        word = rest[index]
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag.startswith(f"{_TRANSFER_FLAG}."):
            # vLLM would make a second one of these, and take only the last.
            raise ConfigError(
                f"{word} sets a part of {_TRANSFER_FLAG}, which is written as a whole: use --host, "
                f"--disk and --set, or give all of it as JSON"
            )
        if flag != _TRANSFER_FLAG:
            index += 1
            continue
        found.append(value if equals else "".join(rest[index + 1 : index + 2]))
        del rest[index : index + (1 if equals else 2)]
    if len(found) > 1:
        raise ConfigError(f"{_TRANSFER_FLAG} is given {len(found)} times; keep one")
    return _decoded(found[0]) if found else None


def _decoded(value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{_TRANSFER_FLAG} is not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{_TRANSFER_FLAG} is {value}, but must be an object")
    return found
