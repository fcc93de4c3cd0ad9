"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercroft.errors import ConfigError
from undercroft.settings import format_bytes, parse_size


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (4096, 4096),
        (10737418240.0, 10737418240),
        ("4096", 4096),
        ("1_000", 1000),
        ("300B", 300),
        ("10GB", 10 * 1000**3),
        ("8GiB", 8 * 1024**3),
        ("1.5TiB", 3 * 1024**4 // 2),
        (" 32 gib ", 32 * 1024**3),
        ("1kB", 1000),
        ("2PiB", 2 * 1024**5),
        ("0.1MB", 100_000),
    ],
)
def test_accepted(written: object, num_bytes: int) -> None:
    """Decimal and binary units, fractions, spaces, any case, and plain bytes."""
    assert parse_size(written, "host") == num_bytes


@pytest.mark.parametrize(
    "written",
    ["", "GiB", "ten", "10 XB", "-1GB", "1e9", -5, 0, "0", "0.1B", True, None, [], float("nan")],
)
def test_refused_with_what_is_accepted(written: object) -> None:
    """The message names the setting, the value, and shows sizes that work."""
    with pytest.raises(ConfigError, match=r"host is .*a number of bytes, or a size such as"):
        parse_size(written, "host")


@pytest.mark.parametrize("written", ["9000PiB", "9" * 5000, 1 << 63, 1e30])
def test_more_than_any_machine_has(written: object) -> None:
    """Refused at once: nothing later has to count so far."""
    with pytest.raises(ConfigError, match=r"host is .{1,50} more than any machine has"):
        parse_size(written, "host")


@pytest.mark.parametrize("written", ["32G", "512m", "2 T"])
def test_a_bare_letter_is_unclear(written: str) -> None:
    """G is neither GB nor GiB: both are offered."""
    with pytest.raises(ConfigError, match=r'is unclear: write "[\d]+[GMT]iB".* or "[\d]+[GMT]B"'):
        parse_size(written, "host")


@given(st.integers(1, 2**62))
def test_plain_numbers_are_themselves(num_bytes: int) -> None:
    """As a number and as text."""
    assert parse_size(num_bytes, "x") == parse_size(str(num_bytes), "x") == num_bytes


@given(st.integers(1, 2**62))
def test_printed_sizes_read_back_nearly(num_bytes: int) -> None:
    """What we print, we accept, to the two decimals printed."""
    printed = format_bytes(num_bytes).replace(" bytes", "")
    assert abs(parse_size(printed, "x") - num_bytes) <= num_bytes * 0.006
