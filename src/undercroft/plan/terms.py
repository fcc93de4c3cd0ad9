"""What the user says of sizes, drives and prices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from undercroft.errors import ConfigError
from undercroft.settings import parse_size

__all__ = [
    "BUDGET_SHARE",
    "DAYS_A_YEAR",
    "SECONDS_A_DAY",
    "Drive",
    "Endurance",
    "Prices",
    "parse_endurance",
    "parse_prices",
    "parse_sizes",
]

SECONDS_A_DAY, DAYS_A_YEAR = 86400.0, 365.0
BUDGET_SHARE = 0.9
"""Of what a drive is rated for, what may be planned with: it writes more than it is told to."""

_BUSY_SHARE = 0.5
"""Of what a drive moves in a second, what it may on average: traffic comes in bursts."""
_HOURS_A_MONTH = DAYS_A_YEAR * 24 / 12
_ENDURANCE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(DWPD|TBW)\s*", re.IGNORECASE)
_PRICE = re.compile(r"\s*(host|disk|engine)\s*=\s*(\d+(?:\.\d+)?)\s*/\s*([a-zA-Z]+)\s*")
_NUM_HALVINGS = 4


def parse_sizes(text: str, where: str) -> list[int]:
    """Sizes in bytes, smallest first: `16GiB..512GiB` in doublings, or `16GiB,64GiB`.

    A range that begins with 0 has 0, and four halvings of its end.

    Raises:
        ConfigError: One of them is no size, or the range goes down.
    """
    if ".." not in text:
        return sorted({_size(part, where) for part in text.split(",")})
    first, _, last = text.partition("..")
    lowest, highest = _size(first, where), _size(last, where)
    if highest < lowest:
        raise ConfigError(f"{where} is {text!r}, which goes down; write the smaller size first")
    if lowest == 0:
        sizes = {highest >> halvings for halvings in range(_NUM_HALVINGS + 1)}
        return sorted(sizes | {0})
    sizes = {highest}
    while lowest < highest:
        sizes.add(lowest)
        lowest *= 2
    return sorted(sizes)


def _size(text: str, where: str) -> int:
    return 0 if text.strip() == "0" else parse_size(text.strip(), where)


@dataclass(frozen=True, slots=True)
class Endurance:
    """What a drive is made for.

    Args:
        text: As the user wrote it.
        writes_a_day: Whole drive writes a day (DWPD), if that is what is rated.
        lifetime_bytes: Bytes in its lifetime (TBW), if that is.
        years: That it is to last.
        drive_bytes: How large it is; None: as large as what is planned.
    """

    text: str
    writes_a_day: float
    lifetime_bytes: float
    years: float
    drive_bytes: int | None = None

    def bytes_a_day(self, planned_bytes: int) -> float:
        """What may be written to it in a day."""
        if self.writes_a_day:
            return self.writes_a_day * (self.drive_bytes or planned_bytes)
        return self.lifetime_bytes / (self.years * DAYS_A_YEAR)


def parse_endurance(text: str, years: float, drive_bytes: int | None) -> Endurance:
    """What `1DWPD` or `1400TBW` says.

    Raises:
        ConfigError: It says neither.
    """
    match = _ENDURANCE.fullmatch(text)
    if not match or not float(match[1]):
        raise ConfigError(
            f"--endurance is {text!r}, but must be what the drive's data sheet says: drive writes "
            'a day ("1DWPD") or terabytes written ("1400TBW")'
        )
    number = float(match[1])
    is_daily = match[2].upper() == "DWPD"
    return Endurance(
        text.strip(),
        number if is_daily else 0.0,
        0.0 if is_daily else number * 1e12,
        years,
        drive_bytes,
    )


@dataclass(frozen=True, slots=True)
class Drive:
    """What a disk can do.

    Args:
        read_bytes_per_s: How fast it reads.
        write_bytes_per_s: How fast it writes.
        endurance: What may be written to it; None: that is not known.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    endurance: Endurance | None = None

    def wear(self, disk_bytes: int, written_a_day: float) -> float | None:
        """What is written, over what may be; None where nothing is known or there is no disk."""
        if self.endurance is None or not disk_bytes:
            return None
        return written_a_day / self.endurance.bytes_a_day(disk_bytes)

    def complaint(self, disk_bytes: int, written_a_day: float, read_per_s: float) -> str:
        """Why it would not do, in words that follow "would"; empty if it does.

        Args:
            disk_bytes: Of the disk; 0: there is none.
            written_a_day: Bytes.
            read_per_s: Bytes a second, on average.
        """
        wear = self.wear(disk_bytes, written_a_day)
        if wear is not None and self.endurance is not None and wear > BUDGET_SHARE:
            return f"be written {wear:.1f} times what {self.endurance.text} allows"
        written_per_s = written_a_day / SECONDS_A_DAY
        if written_per_s > _BUSY_SHARE * self.write_bytes_per_s:
            return (
                f"be written {written_per_s / 1e9:.2f} GB a second on average, of the "
                f"{self.write_bytes_per_s / 1e9:g} GB that it takes at most (--disk-write)"
            )
        if read_per_s > _BUSY_SHARE * self.read_bytes_per_s:
            return (
                f"be read {read_per_s / 1e9:.2f} GB a second on average, of the "
                f"{self.read_bytes_per_s / 1e9:g} GB that it gives at most (--disk-read)"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost, in whatever money.

    Args:
        host: A byte of host memory; None: it is not said.
        disk: A byte of disk; None the same.
        engine: A second of an engine, accelerators included; None the same.
        years: That what is bought is to be used.
    """

    host: float | None = None
    disk: float | None = None
    engine: float | None = None
    years: float = 3.0

    @property
    def are_told(self) -> bool:
        """Whether any is."""
        return any(price is not None for price in (self.host, self.disk, self.engine))

    @property
    def are_complete(self) -> bool:
        """Whether what is saved can be set against what it costs."""
        return None not in (self.host, self.disk, self.engine)

    def cost_a_month(self, host_bytes: int, disk_bytes: int) -> float:
        """Of that much, spread over the years."""
        bought = host_bytes * (self.host or 0.0) + disk_bytes * (self.disk or 0.0)
        return bought / (12 * self.years)

    def worth_a_month(self, engine_seconds_a_second: float) -> float:
        """Of engine time that is not spent."""
        return engine_seconds_a_second * (self.engine or 0.0) * 3600 * _HOURS_A_MONTH


def parse_prices(text: str, years: float) -> Prices:
    """What `host=4/GiB,disk=80/TiB,engine=2.50/h` says.

    Raises:
        ConfigError: A part of it is no price, or a thing has two.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _PRICE.fullmatch(part)
        if not match or match[1] in found:
            raise ConfigError(
                f"--prices has {part.strip()!r}, but takes each of host, disk and engine once, "
                'with what it is for: "host=4/GiB,disk=80/TiB,engine=2.50/h"'
            )
        found[match[1]] = float(match[2]) / _unit(match[1], match[3])
    return _prices(found, years)


def _prices(found: Mapping[str, float], years: float) -> Prices:
    return Prices(found.get("host"), found.get("disk"), found.get("engine"), years)


def _unit(thing: str, unit: str) -> float:
    if thing != "engine":
        return parse_size(f"1{unit}", f"the unit of {thing} in --prices")
    if unit != "h":
        raise ConfigError(
            f'--prices has an engine a {unit!r}, but takes it an hour: "engine=2.50/h"'
        )
    return 3600.0
