"""Sizes as people write them: `"32GiB"`, `"10GB"`, `"1.5TiB"`, or a plain number of bytes."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from undercroft.errors import ConfigError

__all__ = ["SIZE_FORMS", "format_bytes", "parse_size"]

SIZE_FORMS = 'a number of bytes, or a size such as "512MiB", "10GB", "1.5TiB"'
"""What every message about a bad size says is accepted."""

_LETTERS = "kmgtp"
_MOST = (1 << 63) - 1
"""What file systems and address spaces count up to."""
_UNITS = (
    {"": 1, "b": 1}
    | {f"{letter}b": 1000 ** (n + 1) for n, letter in enumerate(_LETTERS)}
    | {f"{letter}ib": 1024 ** (n + 1) for n, letter in enumerate(_LETTERS)}
)
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: object, where: str) -> int:
    """Bytes of `value`, a fraction of a byte cut off.

    Args:
        value: A number, or text with an optional unit: B, kB, MB, GB, TB, PB are powers of 1000,
            KiB, MiB, GiB, TiB, PiB powers of 1024; case does not matter.
        where: What the message calls the value.

    Raises:
        ConfigError: Not a size, below one byte, or more than any machine has; the message says
            what is accepted.
    """
    size = _bytes_of(value, where)
    if size < 1:
        raise ConfigError(f"{where} is {value!r}, but must be at least one byte: {SIZE_FORMS}")
    if size > _MOST:
        raise ConfigError(f"{where} is {str(value)[:40]}, which is more than any machine has")
    return size


def _bytes_of(value: object, where: str) -> int:
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        factor = _UNITS.get(match[2].lower()) if match else None
        if match and factor:
            return int(Decimal(match[1].replace("_", "")) * factor)
        if match and f"{match[2].lower()}ib" in _UNITS:
            number, letter = match[1], match[2].upper()
            raise ConfigError(
                f'{where} is {value!r}, which is unclear: write "{number}{letter}iB" (powers of '
                f'1024) or "{number}{letter}B" (powers of 1000)'
            )
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return int(value)
    raise ConfigError(f"{where} is {value!r}, which is not a size: {SIZE_FORMS}")


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for people: `"32 GiB"`, `"1.50 TiB"`, `"300 bytes"`."""
    if num_bytes < 1024:  # noqa: PLR2004 - bytes in a KiB
        return f"{num_bytes} bytes"
    power = min(len(_LETTERS), (num_bytes.bit_length() - 1) // 10)
    unit = f"{_LETTERS[power - 1].upper()}iB"
    whole, rest = divmod(num_bytes, 1024**power)
    return f"{whole} {unit}" if rest == 0 else f"{num_bytes / 1024**power:.2f} {unit}"
