"""`hazard` is overruled where LRU would find more: on made-up streams, and in small."""

from __future__ import annotations

import logging
from heapq import heappop, heappush
from math import inf
from random import Random
from unittest import mock

import numpy as np
import pytest
from tests.streams.streams import make

from undercroft.keys import ChunkKey
from undercroft.policies import guard
from undercroft.policies.base import EvictionPolicy, Learning
from undercroft.policies.guard import Guard
from undercroft.policies.hazard import Hazard
from undercroft.policies.known_prefixes import KnownPrefixes, Seen
from undercroft.policies.lru import Lru
from undercroft.sim import hit_curve
from undercroft.sim.moment import Moment
from undercroft.sim.replay import replay
from undercroft.traces import Trace, TraceBuilder

KEYS = [ChunkKey(b"k")] * 10
PATIENCE = guard._FIRST_PATIENCE


class Requests:
    """Tells a guard of requests of `NUM` chunks that LRU has, and the level or not."""

    NUM = 10

    def __init__(self) -> None:
        self.guard = Guard("hazard", 10_000, 1024)
        self.rows = np.arange(self.NUM)
        self.serial = 0
        self.tell(0)
        self.guard.on_come_all(self.rows, self.serial)

    def tell(self, num_found: int, num_told: int = 0) -> None:
        self.serial += 1
        seen = Seen(self.serial, 0.0, KEYS, self.rows, [0], [0], num_known=self.NUM)
        self.guard.on_request(seen, num_found, num_told)

    def all_there(self, num: int = 1) -> None:
        for _ in range(num):
            self.tell(self.NUM)

    def all_lost(self, num: int = 1) -> None:
        for _ in range(num):
            self.tell(0)


def test_overrules_for_a_while_and_longer_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """More than some requests' worth was lost; it is said once."""
    requests = Requests()
    with caplog.at_level(logging.INFO, logger="undercroft.policies.guard"):
        requests.all_there(1000)
        requests.all_lost(8)
        assert not requests.guard.is_overruling
        requests.all_lost(8)
        assert requests.guard.is_overruling
        requests.all_there(PATIENCE - 20)
        assert requests.guard.is_overruling
        requests.all_there(20)
        assert not requests.guard.is_overruling
        requests.all_lost(40)
        assert requests.guard.is_overruling
        requests.all_there(2 * PATIENCE - 50)
        assert requests.guard.is_overruling
        requests.all_there(50)
        assert not requests.guard.is_overruling
    (record,) = caplog.records
    assert "policy hazard of a level of 10000 chunks finds less than LRU" in record.message
    assert requests.guard.num_times == 2


def test_what_a_request_was_told_to_have_before_is_no_hit() -> None:
    """It has grown, and is told of again: only the rest was asked for."""
    requests = Requests()
    for _ in range(200):
        requests.tell(8, num_told=8)
    # Two of two were lost each time, though the level had eight of ten.
    assert requests.guard.is_overruling
    other = Requests()
    for _ in range(200):
        other.tell(0, num_told=10)
    assert not other.guard.is_overruling


def test_what_was_lost_and_read_again_was_lost() -> None:
    """A chunk that was evicted and promoted is resident when its request ends."""
    requests = Requests()
    for _ in range(300):
        requests.guard.on_come(3, requests.serial)
        requests.all_there()
    assert requests.guard.is_overruling


def test_a_chunk_that_came_once_is_no_loss() -> None:
    """Also if it came late, as into a lower level."""
    level = Guard("hazard", 10_000, 1024)
    rows = np.arange(1)
    for number in range(1, 1000, 2):
        new = Seen(number, 0.0, KEYS[:1], rows, [0], [0], num_known=0)
        level.on_request(new, 0, 0)
        level.on_come(0, number)
        again = Seen(number + 1, 0.0, KEYS[:1], rows, [0], [0], num_known=1)
        level.on_request(again, 1, 0)
    assert level._lost <= 0


def test_dropped_chunks_are_no_loss() -> None:
    """After a reset LRU would have to begin anew, too."""
    requests = Requests()
    for row in range(Requests.NUM):
        requests.guard.on_drop(row)
    requests.all_lost(200)
    assert not requests.guard.is_overruling


def found(trace: Trace, capacity: int) -> tuple[float, float, float]:
    """Hits in points: of LRU, of `hazard` without the guard, and with it."""
    (lru,) = hit_curve(trace, "lru", [capacity])

    def hazard() -> float:
        policy = Hazard(capacity)
        return 100 * replay(trace, policy, capacity, moment=Moment()).block_hit_ratio

    guarded = hazard()
    with mock.patch.object(guard, "_MOST_LOST", inf):
        alone = hazard()
    return 100 * lru.block_hit_ratio, alone, guarded


def chats_and_a_scanner(num: int) -> Trace:
    """Tenants whose owners come back, and one that asks for everything once, at twice the rate."""
    random = Random(5)
    builder = TraceBuilder("tenants", 16)
    waiting: list[tuple[float, int, int]] = []
    for chat in range(40):
        heappush(waiting, (random.uniform(0, 60), chat, 4))
    scanned = 0
    for number in range(num):
        now_s, chat, size = heappop(waiting)
        path: list[object] = [("chat", chat % 4, at) for at in range(3)]
        path += [("chat", chat, at) for at in range(3, size)]
        builder.add(path, time_ms=int(1000 * now_s), kind=0)
        goes_on = random.random() < 0.9
        chat, size = (chat, size + 2) if goes_on else (40 + number, 4)
        heappush(waiting, (now_s + random.lognormvariate(3.3, 0.6), chat, min(size, 40)))
        for _ in range(2):
            builder.add(
                [("scan", scanned, at) for at in range(20)], time_ms=int(1000 * now_s), kind=0
            )
            scanned += 1
    return builder.build()


def chat_hits(trace: Trace, policy: EvictionPolicy, capacity: int) -> int:
    """Hits of every third request: the chats'."""
    resident: set[int] = set()
    learning = policy if isinstance(policy, Learning) else None
    num_hits = 0
    for number, (path, time_ms) in enumerate(
        zip(trace.iter_blocks(), trace.times_ms.tolist(), strict=True)
    ):
        if number % 3 == 0:
            num_hits += next((i for i, at in enumerate(path) if at not in resident), len(path))
        if learning is not None:
            learning.on_request([as_key(at) for at in path], time_ms / 1000)
        for at in reversed(path):
            if at in resident:
                policy.on_hit(as_key(at))
                continue
            if len(resident) == capacity:
                victim = next(policy.victims())
                policy.on_evict(victim)
                resident.remove(int.from_bytes(victim, "big"))
            policy.on_insert(as_key(at))
            resident.add(at)
    return num_hits


def as_key(block: int) -> ChunkKey:
    return ChunkKey(block.to_bytes(8, "big"))


@pytest.mark.parametrize("capacity", [150, 400, 1000])
def test_a_scanner_takes_nothing_from_chats(capacity: int) -> None:
    """Several tenants share a level: chats find what they find with LRU, and more."""
    trace = chats_and_a_scanner(1_200)
    lru = chat_hits(trace, Lru(capacity), capacity)
    assert chat_hits(trace, Hazard(capacity), capacity) > max(lru, 1000)


def test_the_same_request_at_the_same_time_moves_up() -> None:
    """A clock that stands: what was used last goes last, also if it is all the same request."""
    policy = Hazard(1000, KnownPrefixes(4096))
    names = [ChunkKey(b"a"), ChunkKey(b"b"), ChunkKey(b"c")]
    for key in names:
        policy.on_request([key], 1.0)
        policy.on_insert(key)
    policy.on_request([names[0]], 1.0)
    assert list(policy.victims()) == [b"b", b"c", b"a"]


@pytest.mark.parametrize(
    ("recipe", "seed", "capacity"),
    [("regimes", 3, 187), ("regimes", 2, 53), ("standing", 4, 29), ("liars", 3, 22)],
)
def test_never_much_worse_than_lru(recipe: str, seed: int, capacity: int) -> None:
    """Where the policy alone is: the clock stands, or what it has learned is no longer so."""
    lru, alone, guarded = found(make(recipe, seed, 25_000).trace, capacity)
    assert alone < lru - 1
    assert guarded > lru - 1


@pytest.mark.parametrize(
    ("recipe", "seed", "capacity"),
    [("zipf", 0, 344), ("bursts", 0, 417), ("loop", 0, 100), ("scan", 0, 100), ("swings", 0, 20)],
)
def test_nothing_is_lost_where_the_policy_is_better(recipe: str, seed: int, capacity: int) -> None:
    """Popularity at random, bursts, loops, scans, and requests longer than the level."""
    lru, alone, guarded = found(make(recipe, seed, 20_000).trace, capacity)
    assert alone > lru - 1
    assert guarded > lru - 1
    assert guarded > alone - 0.5
