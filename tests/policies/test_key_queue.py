"""The queue against a list, with segments so small that every call opens, closes or joins some."""

from random import Random
from unittest import mock

import pytest

from undercroft.errors import Bug
from undercroft.keys import ChunkKey
from undercroft.policies import key_queue
from undercroft.policies.key_queue import KeyQueue, SegmentStore

VERBS = ("push",) * 4 + ("refresh",) * 6 + ("pull", "pull", "remove", "discard", "pop_first")


def call_queue(queues: list[KeyQueue], at: int, verb: str, key: ChunkKey) -> ChunkKey | None:
    """One call on queue `at`; `pull` takes from the other."""
    if verb == "pop_first":
        return queues[at].pop_first()
    if verb == "pull":
        return queues[at].pull(key, queues[1 - at])
    if verb == "refresh":
        return queues[at].pull(key)
    return getattr(queues[at], verb)(key)


def call_model(lists: list[list[ChunkKey]], at: int, verb: str, key: ChunkKey) -> ChunkKey | None:
    """The same on plain lists."""
    mine, other = lists[at], lists[1 - at]
    if verb == "pop_first":
        if not mine:
            raise Bug
        return mine.pop(0)
    known = key in mine or key in other
    if known == (verb == "push") and verb != "discard":
        raise Bug
    if verb != "push" and known:
        (other if verb == "pull" else mine).remove(key)
    if verb in ("push", "pull", "refresh"):
        mine.append(key)
    return None


def outcome(call: object, *arguments: object) -> object:
    """What a call returned, or that it was a bug."""
    try:
        return call(*arguments)  # type: ignore[operator]
    except Bug:
        return Bug


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("segment_keys", [1, 2, 3, 7])
def test_two_queues_of_one_store_behave_as_two_lists(segment_keys: int, seed: int) -> None:
    """Same keys in the same order after every call, whatever the segments do."""
    random = Random(seed)
    with mock.patch.object(key_queue, "SEGMENT_KEYS", segment_keys):
        store = SegmentStore()
        queues = [KeyQueue(store, 0), KeyQueue(store, 1)]
        lists: list[list[ChunkKey]] = [[], []]
        for _ in range(1_000):
            verb, at = random.choice(VERBS), random.randrange(2)
            key = ChunkKey(bytes([random.randrange(40)]))
            forbidden = lists[at] if verb == "pull" else lists[1 - at]
            if key in forbidden and verb not in ("push", "pop_first"):
                continue  # the caller has to know which queue a key is in
            expected = outcome(call_model, lists, at, verb, key)
            assert outcome(call_queue, queues, at, verb, key) == expected
            assert [list(queue) for queue in queues] == lists
            owner = next((i for i in (0, 1) if key in lists[i]), -1)
            assert store.owner_of(key) == owner


def test_segments_stay_in_proportion_to_keys() -> None:
    """Keys that stay while their neighbours move away do not hold a segment each."""
    store = SegmentStore()
    queue = KeyQueue(store)
    keys = [index.to_bytes(4, "big") for index in range(20 * key_queue.SEGMENT_KEYS)]
    for key in keys:
        queue.push(key)
    busy = [key for index, key in enumerate(keys) if index % 10]
    for _ in range(5):
        for key in busy:
            queue.pull(key)
    num_segments = len(store.keys) - len(store.free)
    assert list(queue) == [key for key in keys if key not in set(busy)] + busy
    assert num_segments <= 3 * len(keys) / key_queue.SEGMENT_KEYS


def test_indexes_are_used_again() -> None:
    """A queue that turns over for ever holds as many segments as its keys need."""
    store = SegmentStore()
    queue = KeyQueue(store)
    for index in range(40 * key_queue.SEGMENT_KEYS):
        queue.push(index.to_bytes(4, "big"))
        if index >= 100:
            queue.pop_first()
    assert len(store.keys) <= 4
