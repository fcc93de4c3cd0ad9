"""Which configurations this version serves; the others are refused, never half-served."""

from __future__ import annotations

from undercroft.config.boundary import OffloadingConfig
from undercroft.errors import ConfigError

__all__ = ["check_served", "unserved"]


def unserved(config: OffloadingConfig) -> tuple[str, ...]:
    """What `config` asks for that this version does not do yet: `field = value`, one each.

    With one rank, a replicated page is that rank's page and a canonical page equals the page, so
    both flags are served there. `is_parallelism_agnostic` asks for nothing with one rank.
    """
    parallel = config.parallel
    sizes = [
        (f"parallel.{name}", getattr(parallel, name))
        for name in ("pp_size", "pcp_size", "dcp_size", "tp_size", "world_size")
    ]
    found = [f"{name} = {size}" for name, size in sizes if size != 1]
    if parallel.world_size != 1:
        flags = (
            ("replicated_layout", config.replicated_layout),
            ("canonical_layout", config.canonical_layout),
        )
        found.extend(f"{name} = {flag}" for name, flag in flags if flag)
    return tuple(found)


def check_served(config: OffloadingConfig) -> None:
    """Refuse what this version does not serve.

    Raises:
        ConfigError: `unserved(config)` is not empty; the message names each field.
    """
    found = unserved(config)
    if found:
        raise ConfigError(
            f"not served yet: {', '.join(found)}; this version keeps the KV cache of engines with "
            f"one rank per replica (set the parallel sizes to 1, data parallel replicas are fine, "
            f"or run without this connector)"
        )
