"""Made-up request streams, each a recipe and a seed; none is modelled on a recorded trace.

A *source* yields requests, (seconds, path), a path being any hashable keys, root first. Recipes
draw their own sizes and times from the seed, so that a search over seeds is a search over those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from itertools import islice
from math import exp, log
from random import Random

from undercroft.traces import Trace, TraceBuilder

__all__ = ["RECIPES", "Stream", "make"]

_Keys = tuple[object, ...]
_Source = Iterator[tuple[float, _Keys]]
_TOKENS = 16


@dataclass(frozen=True)
class Stream:
    """One stream: what made it, and its requests."""

    recipe: str
    seed: int
    trace: Trace


def make(recipe: str, seed: int, num_references: int) -> Stream:
    """A stream of about so many references."""
    random = Random(f"{recipe} {seed}")
    builder = TraceBuilder(f"{recipe}-{seed}", _TOKENS)
    left = num_references
    for now_s, keys in RECIPES[recipe](random, num_references):
        builder.add(keys, time_ms=int(now_s * 1000), kind=0)
        left -= len(keys)
        if left <= 0:
            break
    return Stream(recipe, seed, builder.build())


def _log_uniform(random: Random, low: float, high: float) -> float:
    return exp(random.uniform(log(low), log(high)))


def _chain(name: object, num: int) -> _Keys:
    return tuple((name, at) for at in range(num))


def _after(source: Iterable[tuple[float, _Keys]], start_s: float) -> _Source:
    for now_s, keys in source:
        yield start_s + now_s, keys


def _named(source: Iterable[tuple[float, _Keys]], name: object) -> _Source:
    """The same, sharing no block with the same under another name."""
    for now_s, keys in source:
        yield now_s, tuple((name, key) for key in keys)


# --- sources ------------------------------------------------------------------------------------


def zipf(random: Random, _num: int) -> _Source:
    """Documents asked for independently of each other, some far more often."""
    num_docs = int(_log_uniform(random, 20, 3000))
    skew = random.uniform(0.0, 1.4)
    sizes = [int(_log_uniform(random, 1, 60)) for _ in range(num_docs)]
    weights = [1 / (rank + 1) ** skew for rank in range(num_docs)]
    gap_s, now_s = _log_uniform(random, 0.005, 60), 0.0
    while True:
        for doc in random.choices(range(num_docs), weights, k=256):
            now_s += random.expovariate(1 / gap_s)
            yield now_s, _chain(doc, sizes[doc])


def loop(random: Random, _num: int) -> _Source:
    """The same prompts in turn for ever: a little room less, and LRU has no hits at all."""
    num_docs, size = int(_log_uniform(random, 5, 600)), int(_log_uniform(random, 1, 100))
    gap_s, shared = _log_uniform(random, 0.01, 30), random.randrange(0, 20)
    now_s = 0.0
    while True:
        for doc in range(num_docs):
            now_s += gap_s
            yield now_s, (*_chain("shared", shared), *_chain(doc, size))


def scan(random: Random, _num: int) -> _Source:
    """Prompts that nobody sends again."""
    gap_s, now_s = _log_uniform(random, 0.05, 20), 0.0
    most = int(_log_uniform(random, 2, 200))
    for number in range(1 << 30):
        now_s += random.expovariate(1 / gap_s)
        yield now_s, _chain(number, random.randint(1, most))


def sessions(
    random: Random,
    _num: int,
    *,
    wait_s: float | None = None,
    spread: float | None = None,
    turns: float | None = None,
) -> _Source:
    """Conversations that grow; each turn comes a while after the one before."""
    gap_s = _log_uniform(random, 0.3, 60)
    wait_s = _log_uniform(random, 1, 3000) if wait_s is None else wait_s
    spread = random.uniform(0.0, 1.5) if spread is None else spread
    turns = _log_uniform(random, 1.2, 40) if turns is None else turns
    first, more = int(_log_uniform(random, 1, 40)), int(_log_uniform(random, 1, 12))
    shared = random.choice((0, 0, 3, 15))
    waiting: list[tuple[float, int, int]] = []
    next_s, number = 0.0, 0
    while True:
        if not waiting or next_s < waiting[0][0]:
            now_s, session, size = next_s, number, random.randint(1, 2 * first)
            number += 1
            next_s += random.expovariate(1 / gap_s)
        else:
            now_s, session, size = heappop(waiting)
            size = min(400, size + random.randint(1, 2 * more))
        yield now_s, (*_chain("shared", shared), *_chain(session, size))
        if random.random() < 1 - 1 / turns:
            waits_s = wait_s * exp(random.gauss(0, spread)) if spread else wait_s
            heappush(waiting, (now_s + waits_s, session, size))


def late(random: Random, num: int) -> _Source:
    """Sessions whose owners come back after hours."""
    return sessions(random, num, wait_s=_log_uniform(random, 2000, 60_000))


def agents(random: Random, num: int) -> _Source:
    """Long sessions of tool calls: seconds apart, then gone."""
    return sessions(random, num, wait_s=_log_uniform(random, 2, 40), turns=random.uniform(8, 40))


def few(random: Random, num: int) -> _Source:
    """All requests of one block, or of one document: hardly a class to tell from another."""
    source = zipf(random, num)
    size = random.choice((1, 1, 2, 8))
    return ((now_s, keys[:size]) for now_s, keys in source)


def bursts(random: Random, num: int) -> _Source:
    """Traffic that comes in bursts, with silence between them."""
    source = random.choice((zipf, sessions, agents))(random, num)
    busy_s, idle_s = _log_uniform(random, 5, 600), _log_uniform(random, 60, 20_000)
    return ((now_s + idle_s * (now_s // busy_s), keys) for now_s, keys in source)


def fan(random: Random, _num: int) -> _Source:
    """One long prompt, many short ends at once, none of which comes again; then the next prompt."""
    size, width = int(_log_uniform(random, 5, 200)), int(_log_uniform(random, 2, 200))
    gap_s, between_s = _log_uniform(random, 0.01, 5), _log_uniform(random, 1, 600)
    now_s = 0.0
    for number in range(1 << 30):
        for end in range(width):
            now_s += gap_s
            yield now_s, (*_chain(number, size), (number, "end", end))
        now_s += between_s


# --- streams of which one period misleads about the next -----------------------------------------


def _phases(
    random: Random, num: int, kinds: list[Callable[[], _Source]], cuts: list[int]
) -> _Source:
    """One after the other, each for so many references; the same blocks if it comes again."""
    del random, num
    start_s = 0.0
    for kind, cut in zip(kinds, cuts, strict=True):
        left, last_s = cut, start_s
        for now_s, keys in _after(kind(), start_s):
            last_s = now_s
            yield now_s, keys
            left -= len(keys)
            if left <= 0:
                break
        start_s = last_s


_PLAIN: tuple[Callable[[Random, int], _Source], ...] = (
    zipf, loop, scan, sessions, late, agents, few, bursts, fan,
)  # fmt: skip


def regimes(random: Random, num: int) -> _Source:
    """Two to five kinds of traffic, one after the other."""
    count = random.randint(2, 5)
    kinds: list[Callable[[], _Source]] = []
    for number in range(count):
        kind, seed = random.choice(_PLAIN), random.random()

        def begin(
            kind: Callable[[Random, int], _Source] = kind, seed: float = seed, number: int = number
        ) -> _Source:
            return _named(kind(Random(seed), num), number)

        kinds.append(begin)
    weights = [random.random() + 0.1 for _ in range(count)]
    return _phases(random, num, kinds, [int(num * w / sum(weights)) + 1 for w in weights])


def swings(random: Random, num: int) -> _Source:
    """Owners come back after one time, then after quite another, back and forth."""
    short_s = _log_uniform(random, 2, 60)
    waits = (short_s, short_s * _log_uniform(random, 3, 200))
    period = int(num / random.randint(2, 30))
    seed, count = random.random(), 40

    def begin(number: int) -> _Source:
        source = sessions(Random(seed), num, wait_s=waits[number % 2], spread=0.1, turns=20)
        return _named(source, number)

    kinds: list[Callable[[], _Source]] = [
        (lambda number=number: begin(number)) for number in range(count)
    ]
    return _phases(random, num, kinds, [period] * count)


def liars(random: Random, num: int) -> _Source:
    """Until the middle the newest never come again and the old do; from then on the reverse."""
    gap_s, size = _log_uniform(random, 0.1, 10), int(_log_uniform(random, 1, 40))
    num_docs = int(_log_uniform(random, 10, 500))

    def old() -> _Source:
        now_s = 0.0
        for number in range(1 << 30):
            now_s += gap_s
            yield now_s, _chain(("once", number), size)
            yield now_s, _chain(("again", number % num_docs), size)

    def new() -> _Source:
        now_s = 0.0
        for number in range(1 << 30):
            for _ in range(3):
                now_s += gap_s
                yield now_s, _chain(("thrice", number), size)

    cut = int(num * random.uniform(0.2, 0.8))
    return _phases(random, num, [old, new, old], [cut, (num - cut) // 2, num])


def drift(random: Random, _num: int) -> _Source:
    """Documents that are in fashion, a few at a time; the fashion moves on."""
    span, size = int(_log_uniform(random, 5, 300)), int(_log_uniform(random, 1, 40))
    gap_s, per_step = _log_uniform(random, 0.05, 20), int(_log_uniform(random, 2, 200))
    now_s = 0.0
    for number in range(1 << 30):
        now_s += random.expovariate(1 / gap_s)
        yield now_s, _chain(number // per_step + random.randrange(span), size)


def mixed(random: Random, num: int) -> _Source:
    """Two to four kinds of traffic at once."""
    sources = [
        _named(random.choice(_PLAIN)(Random(random.random()), num), number)
        for number in range(random.randint(2, 4))
    ]
    return merge(*sources, key=lambda request: request[0])


# --- the clock ------------------------------------------------------------------------------------


def _any(random: Random, num: int) -> _Source:
    return random.choice((*_PLAIN, regimes, swings, liars, drift, mixed))(random, num)


def scaled(random: Random, num: int) -> _Source:
    """Replayed much faster or slower than it happened."""
    factor = _log_uniform(random, 1e-4, 100)
    return ((now_s * factor, keys) for now_s, keys in _any(random, num))


def standing(random: Random, num: int) -> _Source:
    """The clock stands for a while, or for good, and goes on."""
    start, stop = sorted(random.uniform(0, 0.06 * num) for _ in range(2))
    stood_s, at_s = 0.0, 0.0
    for number, (now_s, keys) in enumerate(_any(random, num)):
        if start <= number < stop:
            stood_s = now_s - at_s
        else:
            at_s = now_s - stood_s
        yield at_s, keys


def uneven(random: Random, num: int) -> _Source:
    """Time goes faster, then slower, by orders of magnitude."""
    every, at_s, before_s, factor = random.randint(50, 2000), 0.0, 0.0, 1.0
    for number, (now_s, keys) in enumerate(_any(random, num)):
        if number % every == 0:
            factor = _log_uniform(random, 1e-3, 1e3)
        at_s += factor * (now_s - before_s)
        before_s = now_s
        yield at_s, keys


RECIPES: dict[str, Callable[[Random, int], _Source]] = {
    recipe.__name__: recipe
    for recipe in (
        *(*_PLAIN, regimes, swings, liars, drift, mixed),
        *(scaled, standing, uneven),
    )
}


def first(source: _Source, num: int) -> list[tuple[float, _Keys]]:
    """The first so many requests."""
    return list(islice(source, num))
