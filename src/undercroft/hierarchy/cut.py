"""Where the walks of several groups end together, and how an engine is told to ask no further.

An engine takes the shortest of what its groups have, but asks each group for more than that while
answers are pending. What lies beyond the common end is answered MISS, so that nothing is read for
it and groups walked from the end are asked for the keys at the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from undercroft.hierarchy.request import Answer, Request, Walk
from undercroft.keys import ChunkKey

__all__ = [
    "common_end",
    "cut_at",
    "deny_all",
    "from_root",
    "has_window",
    "least_end",
    "positions_below",
]

_PositionOf = Callable[[ChunkKey], int | None]


def from_root(walk: Walk, position_of: _PositionOf) -> bool:
    """Whether the walk went away from the root. One key alone may be a window of one."""
    return len(walk.keys) > 1 and not walk.descends(position_of)


def has_window(request: Request) -> bool:
    """Whether a shorter cut would need other chunks than those asked for, which take time to read.

    All walks from the root have what they need for it.
    """
    position_of = request.position_of
    return any(not from_root(walk, position_of) for walk in request.walks.values())


def positions_below(walk: Walk, position_of: _PositionOf) -> list[int]:
    """Ends, in tokens, of the usable chunks that have to be read; rising."""
    usable = [i for i in walk.usable(position_of) if walk.answers[i] == Answer.BELOW]
    return [position_of(walk.keys[i]) or 0 for i in usable]


def common_end(request: Request) -> int | None:
    """The token at which the shortest of the walks ends, if it is known."""
    position_of = request.position_of
    ends = [
        position_of(walk.keys[walk.usable(position_of)[-1 if from_root(walk, position_of) else 0]])
        for walk in request.walks.values()
    ]
    return min((end for end in ends if end is not None), default=None)


def least_end(walks: Sequence[Walk], position_of: _PositionOf) -> int:
    """The shortest hit that an engine takes: a whole chunk of every group."""
    sizes, begins = [0], []
    for walk in walks:
        if len(walk.keys) > 1:
            first, second = (position_of(key) or 0 for key in walk.keys[:2])
            sizes.append(abs(second - first))
            if second > first:
                begins.append(first - sizes[-1])
    return min(begins, default=0) + max(sizes)


def deny_all(request: Request) -> None:
    """Answer MISS for whatever is not here yet."""
    for walk_id, walk in request.walks.items():
        request.denied.update(walk.keys)
        if not from_root(walk, request.position_of):
            request.limits[walk_id] = 0


def cut_at(request: Request, end: int) -> bool:
    """Answer MISS for chunks that begin at token `end` or later; whether any had been asked for."""
    position_of = request.position_of
    found = False
    for walk_id, walk in request.walks.items():
        if from_root(walk, position_of):
            found |= _cut_from_root(request, walk, end)
        else:
            found |= _cut_window(request, walk_id, walk, end)
    return found


def _cut_from_root(request: Request, walk: Walk, end: int) -> bool:
    begins_at = 0
    for i in walk.usable(request.position_of):
        key = walk.keys[i]
        if begins_at >= end and walk.answers[i] != Answer.HIT:
            request.denied.add(key)
            return True
        begins_at = request.position_of(key) or 0
    return False


def _cut_window(request: Request, walk_id: object, walk: Walk, end: int) -> bool:
    position_of = request.position_of
    positions = [position_of(key) or 0 for key in walk.keys]
    waiting = [
        i for i in walk.usable(position_of) if walk.answers[i] in {Answer.BELOW, Answer.COMING}
    ]
    if len(positions) == 1:
        # How long the chunk is shows when the engine asks for the next one.
        if waiting and positions[0] > end:
            request.denied.add(walk.keys[0])
            return True
        return False
    limit = end + positions[0] - positions[1] - 1
    if not any(positions[i] > limit for i in waiting):
        return False
    request.limits[walk_id] = limit
    return True
