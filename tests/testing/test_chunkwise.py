"""Batches through a tier that goes wrong: each chunk of them as if it had been asked for alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from undercroft.errors import KvError, TierUnavailable
from undercroft.keys import ChunkKey
from undercroft.testing.faults import Effect, FaultyTier, Injector, on_index, on_verb
from undercroft.testing.tier_suite import chunk_of, key_of
from undercroft.tiers.base import Batched, Ends, Tier
from undercroft.tiers.checked import Checked
from undercroft.tiers.memory import MemoryTier

N = 256
KEYS = [key_of(letter) for letter in "abcdef"]


class InBatches(MemoryTier):
    """Has each chunk of a call told of on its own, and knows which came in one call."""

    batch_bytes = 1 << 20

    def __init__(self) -> None:
        super().__init__(1 << 16)
        self.calls: list[tuple[str, list[ChunkKey]]] = []
        self.is_broken = False

    def read_many(self, wanted: Sequence[tuple[ChunkKey, memoryview]]) -> Iterator[Ends]:
        self.calls.append(("read", [key for key, _ in wanted]))
        for index, (key, out) in reversed(list(enumerate(wanted))):
            if self.is_broken:
                raise RuntimeError("broken")
            yield [(index, self.read_into(key, out))]

    def write_many(
        self, given: Sequence[tuple[ChunkKey, memoryview, int | None]]
    ) -> Iterator[Ends]:
        self.calls.append(("write", [key for key, _, _ in given]))
        for index, (key, data, epoch) in enumerate(given):
            yield [(index, self._write(key, data, epoch))]

    def delete_many(self, keys: Sequence[ChunkKey]) -> Iterator[Ends]:
        self.calls.append(("delete", list(keys)))
        for key in keys:
            self.delete(key)
        yield [(index, True) for index in range(len(keys))]


def batched(tier: Tier) -> Batched:
    assert isinstance(tier, Batched)
    return tier


def write(tier: Tier) -> list[Any]:
    return ends_of(batched(tier).write_many([(key, chunk_of(key, N), None) for key in KEYS]))


def read(tier: Tier) -> tuple[list[Any], list[bytes]]:
    buffers = [memoryview(bytearray(N)) for _ in KEYS]
    ends = ends_of(batched(tier).read_many(list(zip(KEYS, buffers, strict=True))))
    return ends, [bytes(buffer) for buffer in buffers]


def ends_of(ends: Iterator[Ends]) -> list[Any]:
    told = [end for some in ends for end in some]
    assert sorted(index for index, _ in told) == list(range(len(KEYS))), "one end each"
    return [end for _, end in sorted(told, key=lambda end: end[0])]


def test_a_batch_stays_one() -> None:
    """Without faults it reaches the inner tier whole; of one that meets a fault, the others."""
    inner = InBatches()
    tier = FaultyTier(inner)
    assert tier.batch_bytes == inner.batch_bytes  # type: ignore[attr-defined] # an ability
    assert write(tier) == [True] * len(KEYS)
    assert read(tier) == ([True] * len(KEYS), [bytes(chunk_of(key, N)) for key in KEYS])
    tier.injectors = (Injector(Effect.LOST_WRITE, on_index(2)), Injector(Effect.ERROR, on_index(0)))
    assert isinstance(ends_of(batched(tier).delete_many(KEYS))[0], TierUnavailable)
    assert inner.calls == [("write", KEYS), ("read", KEYS), ("delete", KEYS[1:])]


@pytest.mark.parametrize("effect", list(Effect))
@pytest.mark.parametrize("verb", ["read_into", "write_from"])
def test_each_chunk_goes_wrong_as_alone(effect: Effect, verb: str) -> None:
    """The same chunk with the same result, whether it was asked for with others or by itself."""
    if effect is Effect.KILLED:  # `test_a_killed_process_has_told_that_it_was`
        return
    seen = []
    for in_batches in (True, False):
        tier = FaultyTier(InBatches(), seed=3)
        if verb == "read_into":
            write(tier)
        injector = Injector(effect, on_index(3), seconds=0.01)
        tier.injectors = (injector,)
        if effect is Effect.HANG:
            threading.Timer(0.05, tier.release).start()
        if not in_batches:
            results = [_alone(tier, verb, key) for key in KEYS]
        elif verb == "read_into":
            results = [str(end) for end in read(tier)[0]]
        else:
            results = [str(end) for end in write(tier)]
        tier.injectors = ()
        found = read(tier)
        if effect is Effect.MISDIRECTED_WRITE:  # whom it hits depends on who was there before
            found = found[0][3:4], [b""]
        seen.append((results, found, injector.num_fired))
    assert seen[0] == seen[1]


def _alone(tier: Any, verb: str, key: ChunkKey) -> str:
    try:
        if verb == "read_into":
            return str(tier.read_into(key, memoryview(bytearray(N))))
        tier.write_from(key, chunk_of(key, N))
    except (KvError, OSError) as exc:
        return str(exc)
    return "True"


def test_one_that_hangs_holds_up_no_other() -> None:
    """And each that hangs is counted, as in a tier that has a thread for each."""
    tier = FaultyTier(InBatches())
    write(tier)
    tier.injectors = (Injector(Effect.HANG, lambda call: call.index < 2, verbs=("read_into",)),)
    buffers = [memoryview(bytearray(N)) for _ in KEYS]
    ends = batched(tier).read_many(list(zip(KEYS, buffers, strict=True)))
    first = [index for _ in KEYS[2:] for index, _ in next(ends)]
    assert sorted(first) == list(range(2, len(KEYS)))
    tier.await_hung(2)
    tier.release()
    rest = [end for some in ends for end in some]
    assert sorted(rest) == [(0, True), (1, True)]


def test_a_buffer_is_not_given_back_while_its_chunk_hangs() -> None:
    """Also if the others of the batch fail together, or nobody asks any more."""
    inner = InBatches()
    tier = FaultyTier(inner)
    write(tier)
    inner.is_broken = True
    tier.injectors = (Injector(Effect.HANG, on_index(0), verbs=("read_into",)),)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            read(tier)
        except RuntimeError as exc:
            failed.append(exc)

    asking = threading.Thread(target=ask)
    asking.start()
    tier.await_hung(1)
    asking.join(0.1)
    assert asking.is_alive()
    assert not failed
    tier.release()
    asking.join(10)
    assert [str(exc) for exc in failed] == ["broken"]


def test_a_wrapper_that_knows_no_batches_is_asked_for_single_chunks() -> None:
    """Or they would go past what it does: here past the checksum."""
    assert not isinstance(Checked(InBatches()), Batched)
    assert not isinstance(FaultyTier(MemoryTier(1 << 16)), Batched)
    tier = FaultyTier(Checked(InBatches()), Injector(Effect.ERROR, on_verb("read_into")))
    assert not isinstance(tier, Batched)
