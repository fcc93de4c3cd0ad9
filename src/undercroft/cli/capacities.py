"""Capacities of a simulation, as they are typed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from undercroft.errors import ConfigError
from undercroft.settings import parse_size
from undercroft.traces import Trace

__all__ = ["Capacity", "parse_capacities", "parse_percent"]

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_BLOCKS = re.compile(r"\s*(\d[\d_]*)\s*blocks?\s*")
_FORMS = (
    'a share of the trace\'s blocks ("1%"), a number of them ("5000blocks") or a size ("64GiB")'
)


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity to replay at.

    Args:
        text: As it was asked for.
        num_blocks: What fits, in blocks of the trace.
        num_bytes: The same in bytes, if those of a token are known.
    """

    text: str
    num_blocks: int
    num_bytes: int | None


def parse_percent(text: str, where: str) -> float:
    """The ratio that `"12.5%"` is.

    Raises:
        ConfigError: It is no percentage.
    """
    match = _PERCENT.fullmatch(text)
    if not match:
        raise ConfigError(f'{where} is {text!r}, which is no percentage, such as "10%"')
    return float(match[1]) / 100


def parse_capacities(
    text: str, trace: Trace, token_bytes: int | None, where: str = "--capacity"
) -> list[Capacity]:
    """Capacities separated by commas.

    Args:
        text: As typed.
        trace: What shares are of.
        token_bytes: Bytes of a token's KV cache; None: sizes in bytes mean nothing.
        where: The flag, for messages.

    Raises:
        ConfigError: One of them is none, or not even a block; the message says what is accepted.
    """
    block_bytes = None if token_bytes is None else token_bytes * trace.block_tokens
    found = []
    for part in (part.strip() for part in text.split(",")):
        num_blocks = _num_blocks(part, trace, block_bytes, where)
        if num_blocks < 1:
            raise ConfigError(
                f"{where} {part!r} is less than one block of the trace, which has "
                f"{trace.num_blocks} of {trace.block_tokens} tokens; give more"
            )
        num_bytes = None if block_bytes is None else num_blocks * block_bytes
        found.append(Capacity(part, num_blocks, num_bytes))
    return found


def _num_blocks(text: str, trace: Trace, block_bytes: int | None, where: str) -> int:
    if _PERCENT.fullmatch(text):
        # Rounded first: 0.07 of 100 is 7 and not 6.
        return int(round(parse_percent(text, where) * trace.num_blocks, 6))
    if blocks := _BLOCKS.fullmatch(text):
        return int(blocks[1])
    try:
        num_bytes = parse_size(text, where)
    except ConfigError:
        raise ConfigError(f"{where} {text!r} is not a capacity: give {_FORMS}") from None
    if block_bytes is None:
        raise ConfigError(
            f"{where} {text!r} is a size, so --bytes-per-token has to say what a token takes "
            '("128KiB" for Llama 3.1 8B); or give a share, as "1%"'
        )
    return num_bytes // block_bytes
