"""Whether all ranks of a replica are on one host. Slots are in its memory, so they must be."""

from __future__ import annotations

from vllm.config import VllmConfig, get_current_vllm_config_or_none

from undercroft.config import OffloadingConfig
from undercroft.errors import ConfigError

__all__ = ["check_one_host"]


def check_one_host(config: OffloadingConfig, engine: VllmConfig | None = None) -> None:
    """Refuse a replica whose ranks are spread over hosts, as far as the engine tells.

    It tells the workers only, and not for Ray; then the scheduler waits for the missing ranks, and
    its error at the deadline names them.

    Args:
        config: The replica.
        engine: The engine's whole configuration; None: what a worker finds of it.

    Raises:
        ConfigError: The ranks are on several hosts.
    """
    engine = engine or get_current_vllm_config_or_none()
    parallel = getattr(engine, "parallel_config", None)
    num_hosts = getattr(parallel, "nnodes_within_dp", 1)
    if config.parallel.world_size > 1 and isinstance(num_hosts, int) and num_hosts > 1:
        sizes = config.parallel
        raise ConfigError(
            f"the {sizes.world_size} ranks of one replica (tp {sizes.tp_size}, pp {sizes.pp_size}, "
            f"pcp {sizes.pcp_size}) are on {num_hosts} hosts: they keep chunks in memory that all "
            "of them map, so a replica must be on one host; make tp, pp and pcp fit one host, and "
            "spread data parallel replicas over hosts, or run without this connector"
        )
