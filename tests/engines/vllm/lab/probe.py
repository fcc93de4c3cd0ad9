"""Watches one in-process engine at its seams, whatever offloading backend sits behind them.

Counts what crossed between engine blocks and the backend, how often a request was looked up, and,
when told to, zeroes every block right after it was loaded: the negative control.
"""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any


class WorkerProbe:
    """Stands before the backend's `OffloadingWorker`; everything else goes straight through."""

    def __init__(self, worker: Any, kv_caches: Any, probe: "Probe") -> None:
        self._worker = worker
        self._kv_caches = kv_caches
        self._probe = probe
        self._loads: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._probe.counts["blocks_stored"] += int((src_spec.block_ids != 0).sum())
        return bool(self._worker.submit_store(job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._probe.counts["blocks_loaded"] += len(dst_spec.block_ids)
        self._probe.counts["loads"] += 1
        self._loads[job_id] = dst_spec
        return bool(self._worker.submit_load(job_id, src_spec, dst_spec))

    def get_finished(self) -> Any:
        results = list(self._worker.get_finished())
        for result in results:
            blocks = self._loads.pop(result.job_id, None)
            if blocks is not None and self._probe.zero_loads:
                self._zero(blocks)
        return results

    def _zero(self, blocks: Any) -> None:
        first = 0
        for refs, num_blocks in zip(
            self._kv_caches.group_data_refs, blocks.group_sizes, strict=True
        ):
            ids = blocks.block_ids[first : first + num_blocks]
            first += num_blocks
            for ref in refs:
                tensor = self._kv_caches.tensors[ref.tensor_idx].tensor
                for block in ids:
                    tensor[int(block), : ref.page_size_bytes] = 0
                    self._probe.counts["pages_zeroed"] += 1


class Probe:
    """What the driver knows about its engine beyond vLLM's public answers."""

    def __init__(self) -> None:
        self.zero_loads = False
        self.counts: Counter[str] = Counter()
        self.lookups: dict[str, int] = {}
        self.external_tokens: dict[str, int] = {}
        self.answered_at: dict[str, float] = {}
        self.loaded_at: dict[str, float] = {}

    def install(self) -> None:
        """Patch vLLM's connector classes in this process, before an engine is made."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler, worker

        probe = self
        init_worker = worker.OffloadingConnectorWorker._init_worker
        matched = scheduler.OffloadingConnectorScheduler.get_num_new_matched_tokens
        update = scheduler.OffloadingConnectorScheduler.update_connector_output

        def watched_init(self: Any, kv_caches: Any) -> None:
            init_worker(self, kv_caches)
            self.worker = WorkerProbe(self.worker, kv_caches, probe)

        def watched_matched(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            answer = matched(self, request, *args, **kwargs)
            took_us = int((time.perf_counter() - started) * 1e6)
            probe.counts["lookup_us_max"] = max(probe.counts["lookup_us_max"], took_us)
            name = request.request_id
            probe.lookups[name] = probe.lookups.get(name, 0) + 1
            if answer[0] is not None:
                probe.external_tokens[name] = answer[0]
                probe.answered_at[name] = time.perf_counter()
            return answer

        def watched_update(self: Any, output: Any) -> None:
            for request_id in output.finished_recving or ():
                probe.loaded_at[request_id] = time.perf_counter()
            update(self, output)

        worker.OffloadingConnectorWorker._init_worker = watched_init
        scheduler.OffloadingConnectorScheduler.get_num_new_matched_tokens = watched_matched
        scheduler.OffloadingConnectorScheduler.update_connector_output = watched_update


def process_io() -> dict[str, int]:
    """Bytes this process and its children asked to read and write so far, page cache included."""
    read = written = 0
    children = Path("/proc/self/task").glob("*/children")
    pids = ["self", *(pid for each in children for pid in each.read_text().split())]
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # a child that has just ended
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            fields = dict(line.split(": ") for line in lines)
            read, written = read + int(fields["rchar"]), written + int(fields["wchar"])
    return {"read_bytes": read, "written_bytes": written}
