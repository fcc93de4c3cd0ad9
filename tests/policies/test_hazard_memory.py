"""What `hazard` needs, stated in docs/reference/policies.md."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import pytest

from undercroft.keys import ChunkKey
from undercroft.policies import lru_shadow
from undercroft.policies.hazard import Hazard
from undercroft.policies.known_prefixes import KnownPrefixes

NUM_CHUNKS = 2_048
TABLES_BYTES, KNOWN_BYTES = 30, 96


def table_bytes(policy: Hazard) -> int:
    """Of the columns that have a row a known prefix."""
    known, paths = policy.known, policy._paths
    columns = (
        *(known._prints, known._used, known._state),
        *(paths._owner, paths._depth, paths._hanging),
        policy._guard._shadow._last,
    )
    assert all(len(column) == known.num_rows for column in columns)
    return sum(column.nbytes for column in columns)


def fill(policy: Hazard, requests: Sequence[Sequence[ChunkKey]]) -> set[ChunkKey]:
    """Store them all, with room for `NUM_CHUNKS`; what is resident in the end."""
    resident: set[ChunkKey] = set()
    for number, request in enumerate(requests):
        policy.on_request(request, number * 0.5)
        policy.on_insert_all(request[::-1])
        resident.update(request)
        excess = len(resident) - NUM_CHUNKS
        resident.difference_update(policy.evict(max(0, excess), lambda _: False))
    return resident


@pytest.mark.parametrize(
    ("length", "num_fills", "resident_bytes"), [(64, 80, 230), (8, 3, 120), (1, 3, 300)]
)
def test_bytes_per_known_prefix_and_resident(
    length: int, num_fills: int, resident_bytes: int
) -> None:
    """By what a request stores; everything that is allocated counts, the keys themselves aside."""
    num_keys = num_fills * NUM_CHUNKS  # of 80, nearly all rows come into use
    keys = [ChunkKey(number.to_bytes(8, "big") * 4 + bytes(4)) for number in range(num_keys)]
    requests = [keys[at : at + length] for at in range(0, num_keys - length + 1, length)]
    warm = Hazard(16)
    warm.on_request(keys[:16], 0.0)
    tracemalloc.start()
    try:
        policy = Hazard(NUM_CHUNKS)
        empty = tracemalloc.get_traced_memory()[0]
        resident = fill(policy, requests)
        num_resident = len(resident)
        resident.clear()
        del resident
        full = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    known = policy.known
    num_known = int((known._prints != 0).sum())
    assert num_known > min(0.9 * known.num_rows, 0.9 * num_keys)
    assert num_resident == NUM_CHUNKS
    tables = table_bytes(policy)
    each, each_resident = full / known.num_rows, (full - empty) / num_resident
    told = f"{each:.0f} bytes a known prefix, {each_resident:.0f} a resident"
    print(f"{length} chunks a request: {told}, tables {tables / known.num_rows:.0f} a row")
    assert tables == TABLES_BYTES * known.num_rows
    assert each <= KNOWN_BYTES, told
    assert each_resident <= resident_bytes, told


def test_bytes_per_known_prefix_of_a_large_level_of_single_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A level of a million chunks knows four prefixes a chunk: the least that any knows.

    All bounds are smaller here in the same proportion.
    """
    num_chunks = 8_192
    monkeypatch.setattr(lru_shadow, "_MAX_SPANS", lru_shadow._MAX_SPANS * num_chunks >> 20)
    keys = [ChunkKey(number.to_bytes(8, "big") * 4 + bytes(4)) for number in range(2 * num_chunks)]
    warm = Hazard(16)
    warm.on_request(keys[:16], 0.0)
    tracemalloc.start()
    try:
        policy = Hazard(num_chunks, KnownPrefixes(4 * num_chunks))
        for number, key in enumerate(keys):
            policy.on_request([key], number * 0.5)
            policy.on_insert(key)
            if number >= num_chunks:
                policy.evict(1, lambda _: False)
        full = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    num_rows = policy.known.num_rows  # their memory is taken, in use or not
    each = full / num_rows
    print(f"{each:.0f} bytes a known prefix, {num_rows / num_chunks:.0f} a chunk")
    assert num_rows == 4 * num_chunks
    assert sum(1 for _ in policy._paths) == num_chunks
    assert each <= KNOWN_BYTES


def test_single_chunks_are_nothing_to_the_garbage_collector() -> None:
    """What rests is kept in objects that it does not follow."""
    policy = Hazard(4_096)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(4_096):
        key = ChunkKey(b"%d" % number)
        policy.on_request([key], number * 0.5)
        policy.on_insert(key)
        policy.evict(number > 4_000, lambda _: False)
    gc.collect()
    assert len(gc.get_objects()) - before < 6 * 256 + 1_000  # the young ones are objects
