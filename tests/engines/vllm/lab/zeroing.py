"""The negative control in engines of several processes: zeroes what was loaded, on demand.

`--worker-extension-cls tests.engines.vllm.lab.zeroing.Zeroing` has vLLM import this module in each
of its workers; while the file named by `$LAB_ZEROING_FILE` exists, loaded blocks are zeroed.
"""

import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker

from tests.engines.vllm.lab.probe import Probe, WorkerProbe

VARIABLE = "LAB_ZEROING_FILE"


class Zeroing:
    """What vLLM mixes into its worker: nothing."""


class _OnDemand(Probe):
    @property
    def zero_loads(self) -> bool:
        return Path(os.environ[VARIABLE]).exists()

    @zero_loads.setter
    def zero_loads(self, value: bool) -> None:
        """The file decides."""


def _watch() -> None:
    init_worker = worker.OffloadingConnectorWorker._init_worker
    probe = _OnDemand()

    def watched_init(self: Any, kv_caches: Any) -> None:
        init_worker(self, kv_caches)
        self.worker = WorkerProbe(self.worker, kv_caches, probe)

    worker.OffloadingConnectorWorker._init_worker = watched_init


_watch()
