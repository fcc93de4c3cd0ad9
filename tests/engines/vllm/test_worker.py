import threading
import time
from typing import Any

import numpy as np
import pytest
from kv_fixtures import (
    block_bytes,
    kv_caches,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
from worker_bench import Bench

from undercroft.engines.vllm import slot_worker
from undercroft.engines.vllm import worker as worker_module
from undercroft.engines.vllm.rank_layout import direct_groups
from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.engines.vllm.worker import CpuWorker
from undercroft.errors import Bug, KvError, LayoutMismatch


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    before = set(threading.enumerate())
    yield
    ends = time.monotonic() + 60
    while not set(threading.enumerate()) <= before:
        assert time.monotonic() < ends, threading.enumerate()
        time.sleep(0.005)


def _failing(after: Any, error: Any) -> Any:
    """A copy that fails after so many calls."""
    calls = [0]

    def copy(*_: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise error
        yield 0

    return copy


def test_a_store_whose_copy_fails_is_reported_and_acknowledged(monkeypatch: Any) -> None:
    """The engine sees success, the hierarchy the store id; later jobs work again."""
    with Bench() as bench:
        with monkeypatch.context() as patch:
            patch.setattr(worker_module, "copy_pages", _failing(0, MemoryError("no room")))
            bench.worker.submit_store(1, bench.blocks([3]), bench.slots([1], store_id=10))
            (result,) = bench.finish(1)
        assert result.success
        assert bench.failed == [10]
        bench.worker.submit_store(2, bench.blocks([3]), bench.slots([1], store_id=11))
        bench.finish(2)
        assert bench.failed == [10]


def test_a_load_whose_copy_fails_is_done_page_by_page(monkeypatch: Any) -> None:
    """One failure of the fast way costs time only: the right bytes arrive."""
    with Bench(bpc=2) as bench:
        bench.worker.submit_store(1, bench.blocks([5, 6], [7, 8]), bench.slots([0], [1]))
        bench.finish(1)
        wanted = block_bytes(bench.caches, 0, 6), block_bytes(bench.caches, 1, 8)
        monkeypatch.setattr(worker_module, "copy_pages", _failing(1, RuntimeError("odd")))
        bench.worker.submit_load(2, bench.slots([0], [1]), bench.blocks([20, 21], [22, 23]))
        (result,) = bench.finish(2)
        assert result.success
        assert result.transfer_size == sum(bench.payload[:2])
        got = block_bytes(bench.caches, 0, 21), block_bytes(bench.caches, 1, 23)
        assert got == wanted


def test_submitting_never_waits_and_each_job_is_reported_once(monkeypatch: Any) -> Any:
    """A slow copy holds up neither `submit_*` nor `get_finished`; waiting is exact."""
    gate = threading.Event()
    real = worker_module.copy_pages

    def slow(*what: Any) -> Any:
        gate.wait(60)
        yield from real(*what)

    monkeypatch.setattr(worker_module, "copy_pages", slow)
    with Bench() as bench:
        for job_id in range(5):
            bench.worker.submit_store(job_id, bench.blocks([job_id + 1]), bench.slots([job_id]))
        assert bench.worker.get_finished() == []
        bench.worker.wait({400, 401})  # unknown ids: other ranks', long finished ones
        gate.set()
        bench.worker.wait({0, 1, 2, 3, 4, 99})
        bench.worker.wait({0, 1})
        assert sorted(result.job_id for result in bench.worker.get_finished()) == [0, 1, 2, 3, 4]
        assert bench.worker.get_finished() == []


def _stepping(order: Any, gate: Any, started: Any) -> Any:
    """A copy in two steps that notes the first slot offset of each; waits between, once."""

    def copy(target: Any, to: Any, source: Any, of: Any, page_bytes: Any) -> Any:
        del target, source, page_bytes
        order.append((int(to.min()), int(of.min()), "begin"))
        started.set()
        if not gate.is_set():
            gate.wait(60)
        yield 1
        order.append((int(to.min()), int(of.min()), "end"))

    return copy


@pytest.mark.parametrize("shared", ["nothing", "block", "slot"])
def test_a_load_goes_before_stores_it_shares_nothing_with(monkeypatch: Any, shared: Any) -> None:
    """It interrupts the running store, too; sharing a block or a slot keeps it behind."""
    order, gate, started = [], threading.Event(), threading.Event()
    monkeypatch.setattr(worker_module, "copy_pages", _stepping(order, gate, started))
    with Bench("big") as bench:
        bench.worker.submit_store(1, bench.blocks([1]), bench.slots([1]))
        started.wait(60)
        bench.worker.submit_store(2, bench.blocks([2]), bench.slots([2]))
        block, slot = (1 if shared == "block" else 9), (2 if shared == "slot" else 20)
        bench.worker.submit_load(3, bench.slots([slot]), bench.blocks([block]))
        gate.set()
        results = [result.job_id for result in bench.finish(1, 2, 3)]
    assert results == {"nothing": [3, 1, 2], "block": [1, 3, 2], "slot": [1, 2, 3]}[shared]
    assert len(order) == 6


def test_what_is_waited_for_goes_first(monkeypatch: Any) -> None:
    """A store that the engine waits for overtakes the loads and stores it shares nothing with."""
    order, gate, started = [], threading.Event(), threading.Event()
    monkeypatch.setattr(worker_module, "copy_pages", _stepping(order, gate, started))
    with Bench("big") as bench:
        bench.worker.submit_load(1, bench.slots([1]), bench.blocks([1]))
        started.wait(60)
        bench.worker.submit_load(2, bench.slots([2]), bench.blocks([2]))
        bench.worker.submit_store(3, bench.blocks([3]), bench.slots([3]))
        waiter = threading.Thread(target=bench.worker.wait, args=({3},))
        waiter.start()
        deadline = time.monotonic() + 60
        while not any(job.is_urgent for job in bench.worker._mover._waiting):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        gate.set()
        waiter.join(60)
        results = [result.job_id for result in bench.finish(1, 2, 3)]
    assert results == [3, 1, 2]


def test_shutdown_is_bounded_and_fails_what_was_not_stored(monkeypatch: Any) -> None:
    """Stores not done are reported failed, nothing hangs, and twice is fine."""
    order, gate, started = [], threading.Event(), threading.Event()
    monkeypatch.setattr(worker_module, "copy_pages", _stepping(order, gate, started))
    monkeypatch.setattr(slot_worker, "SHUTDOWN_S", 0.05)
    bench = Bench("big")
    bench.worker.submit_store(1, bench.blocks([1]), bench.slots([1], store_id=101))
    bench.worker.submit_store(2, bench.blocks([2]), bench.slots([2], store_id=102))
    bench.worker.submit_load(3, bench.slots([3]), bench.blocks([3]))
    started.wait(60)
    bench.worker.shutdown()  # a copy that does not end is left behind
    assert bench.failed == []
    gate.set()
    monkeypatch.setattr(slot_worker, "SHUTDOWN_S", 10.0)
    bench.worker.shutdown()
    bench.worker.shutdown()
    assert sorted(bench.failed) == [101, 102]
    with pytest.raises(Bug, match="stopped"):
        bench.worker.submit_store(4, bench.blocks([1]), bench.slots([1]))


def test_a_mover_that_breaks_down_keeps_nobody_waiting(monkeypatch: Any) -> None:
    """Stores are reported failed, loads raise, waiters return, and later jobs are refused."""
    bench = Bench("big")
    order, gate, started = [], threading.Event(), threading.Event()
    monkeypatch.setattr(worker_module, "copy_pages", _stepping(order, gate, started))
    bench.worker.submit_store(1, bench.blocks([1]), bench.slots([1], store_id=101))
    started.wait(60)
    monkeypatch.setattr(bench.worker._mover, "_take", lambda: 1 / 0)
    bench.worker.submit_load(2, bench.slots([2]), bench.blocks([2]))
    gate.set()
    bench.worker.wait({1, 2})
    assert bench.failed == [101]
    with pytest.raises(KvError, match="load job 2"):
        bench.worker.get_finished()
    assert [result.job_id for result in bench.worker.get_finished()] == [1]
    with pytest.raises(Bug, match="stopped"):
        bench.worker.submit_load(3, bench.slots([2]), bench.blocks([2]))
    bench.worker.shutdown()


def test_tensors_that_cannot_be_copied_are_refused_at_construction() -> None:
    """A ref beyond its tensor's row, and a region that cannot be written, are named."""
    caches = kv_caches("overlaid")
    caches.group_data_refs[0][0].page_size_bytes = 513
    with pytest.raises(LayoutMismatch, match="513"):
        direct_groups(caches, 1)
    good, readonly = kv_caches("overlaid"), memoryview(bytes(8192))
    groups = direct_groups(good, 1)
    with pytest.raises(LayoutMismatch, match="read-only"):
        CpuWorker(good, region=readonly, groups=groups, report_failed=lambda _: None)
    narrow = CanonicalKVCaches(good.tensors, good.group_data_refs)
    narrow.tensors[1].page_size_bytes = 1024
    with pytest.raises(LayoutMismatch, match="tensor 1"):
        CpuWorker(narrow, region=bytearray(8192), groups=groups, report_failed=lambda _: None)


def test_a_job_without_our_slots_is_refused() -> None:
    """Another backend's spec is a wiring mistake, not a failed store."""
    with Bench() as bench, pytest.raises(Bug, match="GPULoadStoreSpec"):
        bench.worker.submit_store(1, bench.blocks([1]), bench.blocks([1]))


def test_shutdown_lets_go_of_the_region() -> None:
    """Afterwards the shared memory can be closed: no view of it is left."""
    memory = bytearray(64 << 10)
    view = memoryview(memory)
    caches = kv_caches("overlaid")
    groups = direct_groups(caches, 1)
    worker = CpuWorker(caches, region=view, groups=groups, report_failed=lambda _: None)
    worker.submit_store(1, GPULoadStoreSpec([1], [1, 0, 0], [0] * 3), SlotSpec([0], [1, 0, 0], 1))
    worker.wait({1})
    worker.get_finished()
    worker.shutdown()
    view.release()
    memory.clear()


def test_a_failed_report_does_not_stop_the_worker() -> None:
    """A `report_failed` that raises is logged; the job still ends."""

    def refuse(store_id: Any) -> None:
        raise OSError(store_id)

    caches = kv_caches("overlaid")
    region, groups = np.zeros(8192, np.uint8), direct_groups(caches, 1)
    worker = CpuWorker(caches, region=region, groups=groups, report_failed=refuse)
    worker.submit_store(
        1, GPULoadStoreSpec([1], [1, 0, 0], [0] * 3), SlotSpec([9000], [1, 0, 0], 4)
    )
    worker.wait({1})
    assert [result.job_id for result in worker.get_finished()] == [1]
    worker.shutdown()
