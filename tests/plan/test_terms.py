"""Sizes, drives and prices as people write them."""

from __future__ import annotations

import pytest

from undercroft.errors import ConfigError
from undercroft.plan.terms import parse_endurance, parse_prices, parse_sizes

GIB, TIB = 1 << 30, 1 << 40


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("16GiB..128GiB", [16 * GIB, 32 * GIB, 64 * GIB, 128 * GIB]),
        ("16GiB..100GiB", [16 * GIB, 32 * GIB, 64 * GIB, 100 * GIB]),
        ("0..8TiB", [0, TIB // 2, TIB, 2 * TIB, 4 * TIB, 8 * TIB]),
        ("64GiB, 16GiB,64GiB", [16 * GIB, 64 * GIB]),
        ("32GiB", [32 * GIB]),
        ("32GiB..32GiB", [32 * GIB]),
        ("0", [0]),
        ("0,1TiB", [0, TIB]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    """Ranges in doublings, lists, and none at all."""
    assert parse_sizes(text, "--host") == sizes


@pytest.mark.parametrize("text", ["", "x", "64GiB..16GiB", "16GiB..", "..", "16GiB;32GiB", "-1GiB"])
def test_what_is_no_size(text: str) -> None:
    """A line that names the flag."""
    with pytest.raises(ConfigError, match="--host"):
        parse_sizes(text, "--host")


def test_endurance() -> None:
    """By the drive's own size, by what is planned, and by terabytes over the years."""
    daily = parse_endurance(" 3 dwpd", 5.0, None)
    assert daily.bytes_a_day(2 * TIB) == 6 * TIB
    assert parse_endurance("0.5DWPD", 5.0, 4 * TIB).bytes_a_day(TIB) == 2 * TIB
    written = parse_endurance("1400TBW", 5.0, None)
    assert written.bytes_a_day(TIB) == pytest.approx(1400e12 / (5 * 365))
    for text in ("", "1", "DWPD", "0DWPD", "0TBW", "-1DWPD", "1 PBW", "1DWPDx"):
        with pytest.raises(ConfigError, match="--endurance"):
            parse_endurance(text, 5.0, None)


def test_prices() -> None:
    """By the byte and the second, spread over the years."""
    prices = parse_prices("host=4/GiB, disk=96/TB,engine=2.50/h", 4.0)
    assert prices.are_complete
    assert prices.cost_a_month(12 * GIB, 10**12) == pytest.approx((12 * 4 + 96) / 48)
    assert prices.worth_a_month(0.5) == pytest.approx(0.5 * 2.5 * 730)
    only = parse_prices("disk=96/TB", 1.0)
    assert only.are_told
    assert not only.are_complete
    assert only.cost_a_month(GIB, 10**12) == pytest.approx(96 / 12)
    for text in ("", "host=4", "host=4/x", "host=/GiB", "tape=1/TiB", "host=1/GiB,host=2/GiB"):
        with pytest.raises(ConfigError, match="--prices"):
            parse_prices(text, 5.0)
    with pytest.raises(ConfigError, match="takes it an hour"):
        parse_prices("engine=2/GiB", 5.0)
