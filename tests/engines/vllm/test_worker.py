import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_fixtures import (
    KINDS,
    NUM_BLOCKS,
    all_bytes,
    block_bytes,
    chunk_page,
    kv_caches,
    scramble,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

from undercroft.engines.vllm import worker as worker_module
from undercroft.engines.vllm.transfer_spec import SlotSpec
from undercroft.engines.vllm.worker import CpuWorker, chunk_payload_bytes
from undercroft.errors import Bug, KvError, LayoutMismatch

OS_PAGE = 4096


class Bench:
    """A worker over fresh caches and a region, with what it reported."""

    def __init__(
        self, kind: Any = "overlaid", bpc: Any = 1, num_slots: Any = 40, *, partial: Any = True
    ) -> None:
        self.caches = kv_caches(kind)
        self.bpc = bpc
        self.payload = chunk_payload_bytes(self.caches, bpc)
        self.slot_bytes = -(-max(self.payload) // OS_PAGE) * OS_PAGE
        self.region = np.full(self.slot_bytes * num_slots, 0xAA, np.uint8)
        self.failed, self.partial = [], []
        self.worker = CpuWorker(
            self.caches,
            region=self.region,
            blocks_per_chunk=bpc,
            report_failed=self.failed.append,
            report_partial=(lambda *what: self.partial.append(what)) if partial else None,
        )

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()

    def slots(self, *indices: Any, store_id: Any = 0) -> Any:
        """A `SlotSpec` from one list of slot numbers per group."""
        groups = [list(group) for group in indices]
        groups += [[]] * (len(self.payload) - len(groups))
        flat = [index * self.slot_bytes for group in groups for index in group]
        return SlotSpec(flat, [len(group) for group in groups], store_id)

    def blocks(self, *groups: Any, first: Any = ()) -> Any:
        """The engine's spec from one list of block ids per group."""
        filled = [list(group) for group in groups]
        filled += [[]] * (len(self.payload) - len(filled))
        firsts = list(first) + [0] * (len(filled) - len(first))
        flat = [block for group in filled for block in group]
        return GPULoadStoreSpec(flat, [len(group) for group in filled], firsts)

    def chunk(self, group: Any, slot: Any) -> Any:
        return self.region[slot * self.slot_bytes :][: self.payload[group]]

    def finish(self, *job_ids: Any) -> Any:
        self.worker.wait(set(job_ids))
        return self.worker.get_finished()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@st.composite
def _round_trips(draw: Any) -> Any:
    """Some chunks of some groups, in any blocks and slots, and the part of them to load."""
    kind, bpc = draw(st.sampled_from(KINDS)), draw(st.integers(1, 4))
    num_groups = len(kv_caches(kind).group_data_refs)
    counts = [draw(st.integers(0, 3)) for _ in range(num_groups)]
    parts = []
    for count in counts:
        first = draw(st.integers(0, bpc - 1)) if count else 0
        least = max(1, (count - 1) * bpc - first + 1)
        blocks = draw(st.integers(least, count * bpc - first)) if count else 0
        parts.append((draw(st.integers(0, 9)) * bpc + first, blocks))
    return kind, bpc, counts, parts, draw(st.integers(0, 2**32))


@settings(max_examples=60, deadline=None)
@given(_round_trips())
def test_what_was_stored_comes_back_wherever_it_is_loaded(case: Any) -> None:
    """Store, scramble all engine memory, load a part elsewhere: those bytes, and no others."""
    kind, bpc, counts, parts, seed = case
    rng = np.random.default_rng(seed)
    with Bench(kind, bpc) as bench:
        ids = iter((rng.permutation(NUM_BLOCKS - 1) + 1).tolist())
        sources = [[next(ids) for _ in range(count * bpc)] for count in counts]
        slots_free = iter(rng.permutation(40).tolist())
        slots = [[next(slots_free) for _ in range(count)] for count in counts]
        assert bench.worker.submit_store(1, bench.blocks(*sources), bench.slots(*slots)) is True
        (stored,) = bench.finish(1)
        expected_bytes = sum(c * p for c, p in zip(counts, bench.payload, strict=True))
        assert stored.success
        assert stored.transfer_size == expected_bytes
        assert type(stored.transfer_size) is int
        wanted = [[block_bytes(bench.caches, g, b) for b in s] for g, s in enumerate(sources)]
        for group, (blocks, group_slots) in enumerate(zip(wanted, slots, strict=True)):
            for index, pages in enumerate(blocks):
                chunk = bench.chunk(group, group_slots[index // bpc])
                assert chunk_page(bench.caches, group, chunk, index % bpc, bpc) == pages
        untouched = [s for s in range(40) if s not in {i for group in slots for i in group}]
        for slot in untouched:
            assert (bench.region[slot * bench.slot_bytes :][: bench.slot_bytes] == 0xAA).all()
        for group, group_slots in enumerate(slots):
            for slot in group_slots:
                end = slot * bench.slot_bytes + bench.payload[group]
                assert (bench.region[end : (slot + 1) * bench.slot_bytes] == 0xAA).all()

        scramble(bench.caches, seed + 1)
        ids = iter((rng.permutation(NUM_BLOCKS - 1) + 1).tolist())
        targets = [[next(ids) for _ in range(blocks)] for _, blocks in parts]
        before = all_bytes(bench.caches)
        spec = bench.blocks(*targets, first=[first for first, _ in parts])
        assert bench.worker.submit_load(2, bench.slots(*slots), spec) is True
        (loaded,) = bench.finish(2)
        assert loaded.success
        assert loaded.job_id == 2
        changed = 0
        for group, (first, blocks) in enumerate(parts):
            for index in range(blocks):
                got = block_bytes(bench.caches, group, targets[group][index])
                assert got == wanted[group][first % bpc + index]
                changed += sum(len(page) for page in got)
        after = all_bytes(bench.caches)
        assert sum((a != b).sum() for a, b in zip(after, before, strict=True)) <= changed
        assert loaded.transfer_size == changed
        assert bench.failed == []
        assert bench.partial == []


def test_the_null_block_is_not_written_by_a_load() -> None:
    """Blocks that the request never reads (id 0) are passed over, the others keep their place."""
    with Bench(bpc=2) as bench:
        bench.worker.submit_store(1, bench.blocks([5, 6, 7, 8]), bench.slots([0, 1]))
        bench.finish(1)
        null, wanted = block_bytes(bench.caches, 0, 0), block_bytes(bench.caches, 0, 7)
        bench.worker.submit_load(2, bench.slots([0, 1]), bench.blocks([0, 0, 20]))
        bench.finish(2)
        assert block_bytes(bench.caches, 0, 0) == null
        assert block_bytes(bench.caches, 0, 20) == wanted


def test_a_chunk_without_its_first_blocks_is_told_and_holds_no_old_bytes() -> None:
    """Pages that were not there are zeros, never the slot's former owner's; the rest is right."""
    with Bench(bpc=3) as bench:
        spec = bench.blocks([], [9, 4, 5, 6], first=[0, 5])
        bench.worker.submit_store(1, spec, bench.slots([], [3, 8], store_id=77))
        (result,) = bench.finish(1)
        assert result.success
        assert bench.partial == [(77, 0, 2)]
        assert bench.failed == []
        first, second = bench.chunk(1, 3), bench.chunk(1, 8)
        for position in (0, 1):
            pages = chunk_page(bench.caches, 1, first, position, 3)
            assert not any(any(page) for page in pages)
        assert chunk_page(bench.caches, 1, first, 2, 3) == block_bytes(bench.caches, 1, 9)
        assert chunk_page(bench.caches, 1, second, 1, 3) == block_bytes(bench.caches, 1, 5)


def test_blocks_that_cannot_be_paired_are_not_stored() -> None:
    """When nobody can say which block is gone, that group is not written; the others are."""
    with Bench(bpc=2) as bench:
        spec = bench.blocks([1, 2], [3, 4, 5], [6, 7])
        bench.worker.submit_store(1, spec, bench.slots([0], [1, 2], [3], store_id=5))
        bench.finish(1)
        assert bench.partial == [(5, 1, 2), (5, 2, 2)]
        assert (bench.chunk(1, 1) == 0xAA).all()
        assert (bench.chunk(1, 2) == 0xAA).all()
        assert chunk_page(bench.caches, 2, bench.chunk(2, 3), 1, 2) == block_bytes(
            bench.caches, 2, 7
        )


@pytest.mark.parametrize("blocks", [([1, 2, 3],), ([2, 3, 4],)])
def test_without_a_way_to_tell_a_partial_store_fails_whole(blocks: Any) -> None:
    """With no `report_partial`, a store that lacks blocks is reported failed, and acknowledged."""
    with Bench(bpc=2, partial=False) as bench:
        first = [0 if blocks[0][0] == 1 else 1]
        bench.worker.submit_store(
            1, bench.blocks(*blocks, first=first), bench.slots([0, 1], store_id=6)
        )
        (result,) = bench.finish(1)
        assert result.success
        assert bench.failed == [6]


@pytest.mark.parametrize(
    ("blocks", "slots"),
    [
        ([NUM_BLOCKS], [0]),
        ([-1], [0]),
        ([0], [0]),
        ([3], [40]),
        ([3], [-1]),
        ([3, 4], [0]),
        ([3], [0, 1]),
    ],
)
def test_a_store_outside_its_bounds_fails_alone(blocks: Any, slots: Any) -> None:
    """It writes nothing, is reported failed and acknowledged; the next job is served."""
    with Bench() as bench:
        engine = all_bytes(bench.caches)
        bench.worker.submit_store(1, bench.blocks(blocks), bench.slots(slots, store_id=9))
        (result,) = bench.finish(1)
        assert result.success
        assert bench.failed == [9]
        assert (bench.region == 0xAA).all()
        assert all((a == b).all() for a, b in zip(engine, all_bytes(bench.caches), strict=True))
        bench.worker.submit_store(2, bench.blocks([3]), bench.slots([1], store_id=10))
        assert [result.job_id for result in bench.finish(2)] == [2]
        assert bench.failed == [9]


def test_a_failed_report_does_not_stop_the_worker() -> None:
    """A `report_failed` that raises is logged; the job still ends."""

    def refuse(store_id: Any) -> None:
        raise OSError(store_id)

    caches = kv_caches("overlaid")
    worker = CpuWorker(
        caches, region=np.zeros(8192, np.uint8), blocks_per_chunk=1, report_failed=refuse
    )
    worker.submit_store(
        1, GPULoadStoreSpec([1], [1, 0, 0], [0] * 3), SlotSpec([9000], [1, 0, 0], 4)
    )
    worker.wait({1})
    assert [result.job_id for result in worker.get_finished()] == [1]
    worker.shutdown()


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


def test_a_load_that_cannot_be_done_is_never_acknowledged() -> None:
    """`get_finished` raises for it once, says why, and loses none of the others."""
    with Bench() as bench:
        bench.worker.submit_store(1, bench.blocks([5]), bench.slots([0]))
        bench.worker.submit_load(2, bench.slots([40]), bench.blocks([6]))
        bench.worker.submit_load(3, bench.slots([0]), bench.blocks([7]))
        bench.worker.wait({1, 2, 3})
        with pytest.raises(KvError, match="load job 2") as raised:
            bench.worker.get_finished()
        assert isinstance(raised.value.__cause__, Bug)
        assert {result.job_id for result in bench.worker.get_finished()} == {1, 3}
        assert bench.worker.get_finished() == []


def test_submitting_never_waits_and_each_job_is_reported_once(monkeypatch: Any) -> Any:
    """A slow copy holds up neither `submit_*` nor `get_finished`; waiting is exact."""
    gate = threading.Event()
    real = worker_module.copy_pages

    def slow(*what: Any) -> Any:
        gate.wait(10)
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


def test_after_wait_the_source_may_be_overwritten() -> None:
    """What was waited for has left the engine's blocks: later writes do not reach the slots."""
    with Bench("big", bpc=4) as bench:
        blocks = list(range(1, 89))
        wanted = [block_bytes(bench.caches, 0, block) for block in blocks]
        bench.worker.submit_store(1, bench.blocks(blocks), bench.slots(list(range(22))))
        bench.worker.wait({1})
        scramble(bench.caches, 5)
        for index, pages in enumerate(wanted):
            chunk = bench.chunk(0, index // 4)
            assert chunk_page(bench.caches, 0, chunk, index % 4, 4) == pages


def test_jobs_that_share_blocks_or_slots_keep_their_order() -> None:
    """Store, then load over the same blocks, then store again: as if one after the other."""
    rng = np.random.default_rng(3)
    with Bench("overlaid") as bench:
        blocks, slots = {}, {}
        for block in range(1, 9):
            blocks[block] = block_bytes(bench.caches, 0, block)
        for job_id in range(400):
            block, slot = int(rng.integers(1, 9)), int(rng.integers(0, 6))
            if slot in slots and rng.random() < 0.5:
                bench.worker.submit_load(job_id, bench.slots([slot]), bench.blocks([block]))
                blocks[block] = slots[slot]
            else:
                bench.worker.submit_store(job_id, bench.blocks([block]), bench.slots([slot]))
                slots[slot] = blocks[block]
        results = bench.finish(*range(400))
        assert sorted(result.job_id for result in results) == list(range(400))
        for block, pages in blocks.items():
            assert block_bytes(bench.caches, 0, block) == pages
        for slot, pages in slots.items():
            assert chunk_page(bench.caches, 0, bench.chunk(0, slot), 0, 1) == pages


def _stepping(order: Any, gate: Any, started: Any) -> Any:
    """A copy in two steps that notes the first slot offset of each; waits between, once."""

    def copy(target: Any, to: Any, source: Any, of: Any, page_bytes: Any) -> Any:
        del target, source, page_bytes
        order.append((int(to.min()), int(of.min()), "begin"))
        started.set()
        if not gate.is_set():
            gate.wait(10)
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
        started.wait(10)
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
        started.wait(10)
        bench.worker.submit_load(2, bench.slots([2]), bench.blocks([2]))
        bench.worker.submit_store(3, bench.blocks([3]), bench.slots([3]))
        waiter = threading.Thread(target=bench.worker.wait, args=({3},))
        waiter.start()
        deadline = time.monotonic() + 10
        while not any(job.is_urgent for job in bench.worker._mover._waiting):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        gate.set()
        waiter.join(10)
        results = [result.job_id for result in bench.finish(1, 2, 3)]
    assert results == [3, 1, 2]


def test_shutdown_is_bounded_and_fails_what_was_not_stored(monkeypatch: Any) -> None:
    """Stores not done are reported failed, nothing hangs, and twice is fine."""
    order, gate, started = [], threading.Event(), threading.Event()
    monkeypatch.setattr(worker_module, "copy_pages", _stepping(order, gate, started))
    monkeypatch.setattr(worker_module, "SHUTDOWN_S", 0.05)
    bench = Bench("big")
    bench.worker.submit_store(1, bench.blocks([1]), bench.slots([1], store_id=101))
    bench.worker.submit_store(2, bench.blocks([2]), bench.slots([2], store_id=102))
    bench.worker.submit_load(3, bench.slots([3]), bench.blocks([3]))
    started.wait(10)
    bench.worker.shutdown()  # a copy that does not end is left behind
    assert bench.failed == []
    gate.set()
    monkeypatch.setattr(worker_module, "SHUTDOWN_S", 10.0)
    bench.worker.shutdown()
    bench.worker.shutdown()
    assert sorted(bench.failed) == [101, 102]
    with pytest.raises(Bug, match="stopped"):
        bench.worker.submit_store(4, bench.blocks([1]), bench.slots([1]))


def test_shutdown_lets_go_of_the_region() -> None:
    """Afterwards the shared memory can be closed: no view of it is left."""
    memory = bytearray(64 << 10)
    view = memoryview(memory)
    worker = CpuWorker(
        kv_caches("overlaid"), region=view, blocks_per_chunk=1, report_failed=lambda _: None
    )
    worker.submit_store(1, GPULoadStoreSpec([1], [1, 0, 0], [0] * 3), SlotSpec([0], [1, 0, 0], 1))
    worker.wait({1})
    worker.get_finished()
    worker.shutdown()
    view.release()
    memory.clear()


def test_a_mover_that_breaks_down_keeps_nobody_waiting(monkeypatch: Any) -> None:
    """Stores are reported failed, loads raise, waiters return, and later jobs are refused."""
    bench = Bench("big")
    order, gate, started = [], threading.Event(), threading.Event()
    monkeypatch.setattr(worker_module, "copy_pages", _stepping(order, gate, started))
    bench.worker.submit_store(1, bench.blocks([1]), bench.slots([1], store_id=101))
    started.wait(10)
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
        chunk_payload_bytes(caches, 1)
    good, readonly = kv_caches("overlaid"), memoryview(bytes(8192))
    with pytest.raises(LayoutMismatch, match="read-only"):
        CpuWorker(good, region=readonly, blocks_per_chunk=1, report_failed=lambda _: None)
    narrow = CanonicalKVCaches(good.tensors, good.group_data_refs)
    narrow.tensors[1].page_size_bytes = 1024
    with pytest.raises(LayoutMismatch, match="tensor 1"):
        CpuWorker(narrow, region=bytearray(8192), blocks_per_chunk=1, report_failed=lambda _: None)


def test_a_job_without_our_slots_is_refused() -> None:
    """Another backend's spec is a wiring mistake, not a failed store."""
    with Bench() as bench, pytest.raises(Bug, match="GPULoadStoreSpec"):
        bench.worker.submit_store(1, bench.blocks([1]), bench.blocks([1]))
