"""When policies that learn are told of a request: once, at its end; sooner where room is short.

A chunk that comes before its request was told of is one that nobody knows, and such go first. So
what a running request has stored is named to a policy only after the policy was told of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from undercroft.clock import Clock
from undercroft.hierarchy.request import Request
from undercroft.keys import ChunkKey

__all__ = ["Learner", "Telling", "Unlisted"]


class Learner(Protocol):
    """A level whose policy may want to know of requests."""

    learns: bool

    def learn(self, keys: Sequence[ChunkKey], now_s: float, *, kind: int, num_told: int) -> None:
        """See `undercroft.policies.base.Learning.on_request`."""
        ...

    def list_told(self, keys: Collection[ChunkKey]) -> None:
        """The request that stored `keys`, deepest first, was told of: they may be evicted."""
        ...


class Telling:
    """What policies were told of the requests that run.

    Args:
        learners: Every level; those that learn nothing are left out.

    Threads: the scheduler's. Cost: a set's operation a stored chunk; nothing if no level learns.
    Memory: the keys that running requests have stored.
    """

    def __init__(self, learners: Sequence[Learner], clock: Clock) -> None:
        self._learners = [each for each in learners if each.learns]
        self._clock = clock
        self._untold: set[ChunkKey] = set()
        self._stored: dict[str, tuple[Request, list[ChunkKey]]] = {}

    @property
    def is_needed(self) -> bool:
        """Whether a level learns."""
        return bool(self._learners)

    def stored(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """`request`, which has not ended, has stored `keys`, in prefix order."""
        if self._learners and keys:
            self._untold.update(keys)
            self._stored.setdefault(request.id, (request, []))[1].extend(keys)

    def is_untold(self, key: ChunkKey) -> bool:
        """Whether `key` must not be named to a policy yet."""
        return key in self._untold

    def tell(self, request_id: str) -> None:
        """Room is short: tell of a request before its end."""
        entry = self._stored.get(request_id)
        if entry is not None:
            self._tell(entry[0], entry[0].in_order(dict.fromkeys(entry[0].chain)))

    def tell_all(self) -> None:
        """The same of all that have stored something since they were told of last."""
        for request_id in list(self._stored):
            self.tell(request_id)

    def ended(self, request: Request, chain: list[ChunkKey]) -> None:
        """`request` has ended; it loaded or stored `chain`, in prefix order."""
        if self._learners:
            self._tell(request, chain)

    def _tell(self, request: Request, chain: list[ChunkKey]) -> None:
        now_s = self._clock.now_s()
        for keys in request.use.every_key(chain) or (request.by_group(chain) if chain else []):
            group = request.group_of(keys[0]) if request.group_of is not None else None
            num_told = min(request.use.num_told.get(group, 0), len(keys))
            if num_told == len(keys):
                continue
            request.use.num_told[group] = len(keys)
            for each in self._learners:
                each.learn(keys, now_s, kind=request.use.kind, num_told=num_told)
        _, stored = self._stored.pop(request.id, (None, ()))
        if stored:
            self._untold.difference_update(stored)
            deepest_first = stored[::-1]
            for each in self._learners:
                each.list_told(deepest_first)

    def clear(self) -> None:
        """At a reset: what was stored is void."""
        self._untold.clear()
        self._stored.clear()


class Unlisted:
    """What a lower level holds, but may not name to its policies yet.

    Args:
        num_classes: Size classes, each of which has a policy.

    Attributes:
        telling: Who knows; None: everything may be named.

    Threads: the scheduler's.
    """

    def __init__(self, num_classes: int) -> None:
        self.telling: Telling | None = None
        self._keys: list[set[ChunkKey]] = [set() for _ in range(num_classes)]

    def keeps(self, key: ChunkKey, size_class: int) -> bool:
        """Take `key`, if its request was not told of yet."""
        if self.telling is None or not self.telling.is_untold(key):
            return False
        self._keys[size_class].add(key)
        return True

    def of(self, size_class: int) -> set[ChunkKey]:
        """Those of a class; not to be changed."""
        return self._keys[size_class]

    def drop(self, key: ChunkKey, size_class: int) -> None:
        """`key` is gone. Unknown is fine."""
        self._keys[size_class].discard(key)

    def take(self, keys: Collection[ChunkKey]) -> Iterator[tuple[int, list[ChunkKey]]]:
        """By class those of `keys` that are here, in their order; they are no more."""
        for size_class, unlisted in enumerate(self._keys):
            if unlisted:
                taken = [key for key in keys if key in unlisted]
                unlisted.difference_update(taken)
                yield size_class, taken

    def are_told(self, size_class: int) -> bool:
        """Have their requests told of, if there are any of a class."""
        if self.telling is None or not self._keys[size_class]:
            return False
        self.telling.tell_all()
        return True
