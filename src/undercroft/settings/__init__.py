"""What a user writes, read once into frozen values.

`load` merges the four places a setting can come from; `stock` translates stock vLLM's keys;
`limits` says whether the sizes can work on this machine.
"""

from __future__ import annotations

from undercroft.settings.limits import (
    Bound,
    HostLimits,
    check_host_bytes,
    check_sizes,
    host_limits,
    with_capacity,
)
from undercroft.settings.model import Settings, TierSettings
from undercroft.settings.sizes import format_bytes, parse_size
from undercroft.settings.sources import load

__all__ = [
    "Bound",
    "HostLimits",
    "Settings",
    "TierSettings",
    "check_host_bytes",
    "check_sizes",
    "format_bytes",
    "host_limits",
    "load",
    "parse_size",
    "with_capacity",
]
