"""What a request remembers of its lookups: a hit costs one append, and nothing is lost by that."""

from __future__ import annotations

import random

import pytest

from undercroft.hierarchy.request import Answer, Request, Walk
from undercroft.keys import ChunkKey


def key_of(group: int, index: int) -> ChunkKey:
    return ChunkKey(bytes([index]) * 8 + bytes([group]))


def ask(request: Request, key: ChunkKey, answer: Answer) -> None:
    """As the hierarchy, or who stands in for it, does."""
    if answer is Answer.HIT:
        request.asked.append(key)
    else:
        request.note(key, answer)


def walked(asked: list[tuple[ChunkKey, Answer]]) -> dict[int, tuple[list[ChunkKey], bytes]]:
    """The last pass over each group, told the long way."""
    passes: dict[int, tuple[list[ChunkKey], bytes]] = {}
    last = None
    for key, answer in asked:
        if key[-1] != last:
            last = key[-1]
            passes[last] = ([], b"")
        keys, answers = passes[last]
        passes[last] = ([*keys, key], answers + bytes([answer]))
    return passes


def seen(walks: dict[object, Walk]) -> dict[object, tuple[list[ChunkKey], bytes]]:
    return {group: (walk.keys, bytes(walk.answers)) for group, walk in walks.items()}


@pytest.mark.parametrize("seed", range(20))
def test_walks_are_the_last_pass_over_each_group(seed: int) -> None:
    """Whatever was answered in which order, also when they were read in between."""
    rng = random.Random(seed)
    request = Request("r", group_of=lambda key: key[-1])
    request.begin_step(1)
    asked = []
    for _ in range(rng.randrange(1, 6)):
        group = rng.randrange(3)
        for index in range(rng.randrange(1, 8)):
            asked.append((key_of(group, index), rng.choice([Answer.HIT, *Answer])))
            ask(request, *asked[-1])
        if rng.random() < 0.5:
            assert seen(request.walks) == walked(asked)
    assert seen(request.walks) == walked(asked)
    assert request.num_hits == sum(answer is Answer.HIT for _, answer in asked)
    hits = dict.fromkeys(key for key, answer in asked if answer is Answer.HIT)
    assert request.unsettled_hits() == list(hits)
    assert request.unsettled_hits() == []
    request.begin_step(2)
    assert (request.walks, request.num_hits, request.unsettled_hits()) == ({}, 0, [])


def test_one_group_is_one_walk() -> None:
    """Without a way to tell groups apart, all lookups of a step are one pass."""
    request = Request("r")
    request.begin_step(1)
    answers = [Answer.HIT, Answer.BELOW, Answer.HIT, Answer.MISS, Answer.HIT]
    keys = [key_of(n % 2, n) for n in range(5)]
    for key, answer in zip(keys, answers, strict=True):
        ask(request, key, answer)
    assert seen(request.walks) == {None: (keys, bytes(answers))}


def test_hits_are_settled_once() -> None:
    """Those before the last call stay settled; those after it come next, each once."""
    request = Request("r")
    request.begin_step(1)
    a, b, c = (key_of(0, n) for n in range(3))
    ask(request, a, Answer.HIT)
    ask(request, b, Answer.MISS)
    assert request.unsettled_hits() == [a]
    ask(request, c, Answer.HIT)
    ask(request, c, Answer.HIT)
    assert request.unsettled_hits() == [c]


def test_groups_are_put_in_prefix_order() -> None:
    """By position over all groups; one group's keys come in that order."""
    keys = [key_of(0, 2), key_of(0, 4), key_of(1, 1), key_of(1, 3)]
    position_of = {key: key[0] for key in keys}.get
    grouped = Request("r", position_of, lambda key: key[-1])
    assert [key[0] for key in grouped.in_order(keys)] == [1, 2, 3, 4]
    assert Request("r", position_of).in_order(keys) == keys
    assert Request("r", group_of=lambda key: key[-1]).in_order(keys) == keys
