"""What the disk tier of an engine says that it holds, for comparison with `du`."""

from typing import Any

from tests.engines.vllm.lab.driver import Driver
from tests.engines.vllm.lab.storm import manager_of


def accounts(driver: Driver) -> dict[str, Any]:
    """After a look at the directory: bytes of everything in it, and of this engine's part."""
    tier = manager_of(driver).hierarchy.levels[0].tier
    while hasattr(tier, "inner"):
        tier = tier.inner
    tier.refresh()
    keeper = tier._keeper
    with keeper.shape:
        keeper.ground.look()  # block maps of files come and go without a name changing
    stats = tier.stats()
    return {
        "root_bytes": stats["root_bytes"],
        "used_bytes": tier.used_bytes(),
        "capacity_bytes": tier.capacity_bytes,
        "chunks": stats["chunks"],
        "adopted": stats["adopted"],
    }
