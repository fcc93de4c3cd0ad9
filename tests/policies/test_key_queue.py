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


# --- marks ---


def make_marked(marks: str, segment_keys: int = 2) -> tuple[SegmentStore, KeyQueue, list[ChunkKey]]:
    """A queue whose keys have these marks, oldest first."""
    store = SegmentStore()
    with mock.patch.object(key_queue, "SEGMENT_KEYS", segment_keys):
        queue = KeyQueue(store, 0)
        keys = [ChunkKey(bytes([number])) for number in range(len(marks))]
        for key, mark in zip(keys, marks, strict=True):
            queue.push(key)
            for _ in range(int(mark)):
                store.mark(key, most=3)
    return store, queue, keys


def test_a_mark_rises_to_its_bound_and_goes_with_a_move() -> None:
    """A stranger has none; a moved key begins anew, or where it is told to."""
    store, queue, (key, other) = make_marked("50")
    assert dict(queue.items()) == {key: 3, other: 0}
    assert store.mark(key) == 0, "the queue that it is in"
    assert store.mark(ChunkKey(b"stranger")) == -1
    queue.pull(key)
    assert list(queue.items()) == [(other, 0), (key, 0)]
    queue.pull(other, mark=2)
    assert list(queue.items()) == [(key, 0), (other, 2)]


def test_marks_survive_the_joining_of_segments() -> None:
    """Keys that stay while their neighbours move away keep their marks."""
    store = SegmentStore()
    queue = KeyQueue(store)
    keys = [index.to_bytes(4, "big") for index in range(20 * key_queue.SEGMENT_KEYS)]
    for key in keys:
        queue.push(key)
        store.mark(key, most=3)
    for _ in range(5):
        for index, key in enumerate(keys):
            if index % 10:
                queue.pull(key, mark=2)
    assert dict(queue.items()) == {key: 2 if i % 10 else 1 for i, key in enumerate(keys)}


@pytest.mark.parametrize("segment_keys", [1, 3])
def test_marked_keys_pass_to_another_queue(segment_keys: int) -> None:
    """Down to the first without a mark, or as many as are asked for; the mark falls."""
    store, queue, keys = make_marked("132012", segment_keys)
    target = KeyQueue(store, 1)
    assert queue.pass_marked(target, 2, keep=1) == 2
    assert list(target.items()) == [(keys[0], 0), (keys[1], 1)]
    assert queue.pass_marked(target, 99) == 1
    assert list(target.items())[2:] == [(keys[2], 0)]
    assert list(queue) == keys[3:]
    assert queue.pass_marked(target, 99) == 0
    for key in keys[3:]:
        queue.remove(key)
    assert queue.first() is None
    assert queue.pass_marked(target, 99) == 0


def test_a_queue_passed_to_itself_ends_with_a_key_that_was_used_up() -> None:
    """Each round takes one from every mark; the first at nought stops it."""
    _, queue, keys = make_marked("212")
    assert queue.pass_marked(queue, 99, keep=3) == 4
    assert list(queue.items()) == [(keys[1], 0), (keys[2], 1), (keys[0], 0)]


@pytest.mark.parametrize("bound", [1, 2, 1024])
def test_laps_give_each_key_once(bound: int) -> None:
    """By mark, and oldest first within; of too many greater marks in a row one comes early."""
    _, queue, keys = make_marked("1302221130")
    with mock.patch.object(key_queue, "MAX_PASSED", bound):
        early: set[ChunkKey] = set()
        laps = [list(queue.lap(mark, early)) for mark in range(4)]
        assert sorted(key for lap in laps for key in lap) == keys
        lone: set[ChunkKey] = set()
        assert sorted([*queue.lap(0, lone), *queue.marked(lone)]) == keys
    expected = {
        1: [[1, 2, 4, 6, 8, 9], [0, 5, 7], [3], []],
        2: [[2, 5, 8, 9], [0, 4, 6, 7], [3], [1]],
        1024: [[2, 9], [0, 6, 7], [3, 4, 5], [1, 8]],
    }
    assert [[keys.index(key) for key in lap] for lap in laps] == expected[bound]
