"""What workers of both kinds do alike: on the CPU platform, and on a device that reorders."""

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
from worker_bench import Bench

from undercroft.errors import Bug, KvError

both = pytest.mark.parametrize("on", ["cpu", "device"])


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    before = set(threading.enumerate())
    yield
    ends = time.monotonic() + 60
    while not set(threading.enumerate()) <= before:
        assert time.monotonic() < ends, threading.enumerate()
        time.sleep(0.005)


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


@both
@settings(max_examples=60, deadline=None)
@given(_round_trips())
def test_what_was_stored_comes_back_wherever_it_is_loaded(on: str, case: Any) -> None:
    """Store, scramble all engine memory, load a part elsewhere: those bytes, and no others."""
    kind, bpc, counts, parts, seed = case
    rng = np.random.default_rng(seed)
    with Bench(kind, bpc, on=on) as bench:
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


@both
def test_the_null_block_is_not_written_by_a_load(on: str) -> None:
    """Blocks that the request never reads (id 0) are passed over, the others keep their place."""
    with Bench(bpc=2, on=on) as bench:
        bench.worker.submit_store(1, bench.blocks([5, 6, 7, 8]), bench.slots([0, 1]))
        bench.finish(1)
        null, wanted = block_bytes(bench.caches, 0, 0), block_bytes(bench.caches, 0, 7)
        bench.worker.submit_load(2, bench.slots([0, 1]), bench.blocks([0, 0, 20]))
        bench.finish(2)
        assert block_bytes(bench.caches, 0, 0) == null
        assert block_bytes(bench.caches, 0, 20) == wanted


@both
def test_a_chunk_without_its_first_blocks_is_told_and_holds_no_old_bytes(on: str) -> None:
    """Pages that were not there are zeros, never the slot's former owner's; the rest is right."""
    with Bench(bpc=3, on=on) as bench:
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


@both
def test_blocks_that_cannot_be_paired_are_not_stored(on: str) -> None:
    """When nobody can say which block is gone, that group is not written; the others are."""
    with Bench(bpc=2, on=on) as bench:
        spec = bench.blocks([1, 2], [3, 4, 5], [6, 7])
        bench.worker.submit_store(1, spec, bench.slots([0], [1, 2], [3], store_id=5))
        bench.finish(1)
        assert bench.partial == [(5, 1, 2), (5, 2, 2)]
        assert (bench.chunk(1, 1) == 0xAA).all()
        assert (bench.chunk(1, 2) == 0xAA).all()
        assert chunk_page(bench.caches, 2, bench.chunk(2, 3), 1, 2) == block_bytes(
            bench.caches, 2, 7
        )


@both
@pytest.mark.parametrize("blocks", [([1, 2, 3],), ([2, 3, 4],)])
def test_without_a_way_to_tell_a_partial_store_fails_whole(on: str, blocks: Any) -> None:
    """With no `report_partial`, a store that lacks blocks is reported failed, and acknowledged."""
    with Bench(bpc=2, partial=False, on=on) as bench:
        first = [0 if blocks[0][0] == 1 else 1]
        bench.worker.submit_store(
            1, bench.blocks(*blocks, first=first), bench.slots([0, 1], store_id=6)
        )
        (result,) = bench.finish(1)
        assert result.success
        assert bench.failed == [6]


@both
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
def test_a_store_outside_its_bounds_fails_alone(on: str, blocks: Any, slots: Any) -> None:
    """It writes nothing, is reported failed and acknowledged; the next job is served."""
    with Bench(on=on) as bench:
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


@both
def test_a_load_that_cannot_be_done_is_never_acknowledged(on: str) -> None:
    """`get_finished` raises for it once, says why, and loses none of the others."""
    with Bench(on=on) as bench:
        bench.worker.submit_store(1, bench.blocks([5]), bench.slots([0]))
        bench.worker.submit_load(2, bench.slots([40]), bench.blocks([6]))
        bench.worker.submit_load(3, bench.slots([0]), bench.blocks([7]))
        bench.worker.wait({1, 2, 3})
        with pytest.raises(KvError, match="load job 2") as raised:
            bench.worker.get_finished()
        assert isinstance(raised.value.__cause__, Bug)
        assert {result.job_id for result in bench.worker.get_finished()} == {1, 3}
        assert bench.worker.get_finished() == []


@both
def test_a_failed_load_is_told_to_who_asks(on: str) -> None:
    """It is acknowledged, and its slots are named once, at the call that gave it."""
    with Bench(on=on) as bench:
        bench.worker.tells_failed_loads = True
        bench.worker.submit_store(1, bench.blocks([5]), bench.slots([0]))
        bench.worker.submit_load(2, bench.slots([40]), bench.blocks([6]))
        bench.worker.submit_load(3, bench.slots([0]), bench.blocks([7]))
        assert bench.worker.take_failed_loads() == {}
        results = bench.finish(1, 2, 3)
        assert {result.job_id for result in results if result.success} == {1, 2, 3}
        assert bench.worker.take_failed_loads() == {2: (40 * bench.slot_bytes,)}
        assert bench.worker.take_failed_loads() == {}
        assert block_bytes(bench.caches, 0, 7) == block_bytes(bench.caches, 0, 5)


@both
def test_after_wait_the_source_may_be_overwritten(on: str) -> None:
    """What was waited for has left the engine's blocks: later writes do not reach the slots."""
    with Bench("big", bpc=4, on=on) as bench:
        blocks = list(range(1, 89))
        wanted = [block_bytes(bench.caches, 0, block) for block in blocks]
        bench.worker.submit_store(1, bench.blocks(blocks), bench.slots(list(range(22))))
        bench.worker.wait({1})
        scramble(bench.caches, 5)
        for index, pages in enumerate(wanted):
            chunk = bench.chunk(0, index // 4)
            assert chunk_page(bench.caches, 0, chunk, index % 4, 4) == pages


@both
def test_jobs_that_share_blocks_or_slots_keep_their_order(on: str) -> None:
    """Store, then load over the same blocks, then store again: as if one after the other."""
    rng = np.random.default_rng(3)
    with Bench("overlaid", on=on) as bench:
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
