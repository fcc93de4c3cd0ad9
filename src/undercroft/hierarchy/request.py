"""What the hierarchy remembers of one request while it lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, IntEnum

from undercroft.keys import ChunkKey

__all__ = ["Answer", "Lookup", "Request", "Walk"]


class Lookup(Enum):
    """The answer to a lookup."""

    HIT = "hit"
    """Readable for the rest of the step; while the request waits for other chunks, until it loads
    it, ends, or its deadline passes."""
    MISS = "miss"
    PENDING = "pending"
    """On its way; ask again next step."""


class Answer(IntEnum):
    """What one lookup of a walk found; one byte each."""

    HIT = 0
    COMING = 1
    """Being filled already."""
    BELOW = 2
    """A lower level has it; nobody fetches it yet."""
    MISS = 3


class Walk:
    """The lookups of one group in one pass of the engine over a request's keys.

    Engines walk a full-attention group from the root until the first miss, and a sliding-window
    or state group from the end until the window is complete. They may walk again within a step
    over fewer keys; then only the last pass counts.
    """

    __slots__ = ("answers", "keys")

    def __init__(self) -> None:
        self.keys: list[ChunkKey] = []
        self.answers = bytearray()

    def note(self, key: ChunkKey, answer: Answer) -> None:
        """Append one lookup."""
        self.keys.append(key)
        self.answers.append(answer)

    def usable(self, position_of: Callable[[ChunkKey], int | None]) -> range:
        """Indices of the keys that the engine's result can consist of.

        From the root: all before the first miss. From the end: all after the last miss, since a
        gap rules out everything nearer the end.
        """
        if self.descends(position_of):
            return range(self.answers.rfind(Answer.MISS) + 1, len(self.keys))
        first_miss = self.answers.find(Answer.MISS)
        return range(len(self.keys) if first_miss < 0 else first_miss)

    def descends(self, position_of: Callable[[ChunkKey], int | None]) -> bool:
        """Whether the walk went from the end towards the root."""
        if len(self.keys) < 2:  # noqa: PLR2004 - a direction needs two points
            return False
        first, last = position_of(self.keys[0]), position_of(self.keys[-1])
        return first is not None and last is not None and last < first


def _no_position(_key: ChunkKey) -> int | None:
    return None


class Request:
    """State of one request; adapters make it, pass it with each call, and leave it alone.

    Args:
        request_id: The engine's name of the request.
        position_of: Tells how many tokens into the request a key's chunk ends, if known.
    """

    __slots__ = (
        "admit_by_s",
        "chain",
        "deadline_s",
        "denied",
        "failed_reads",
        "finished",
        "hits",
        "holds",
        "id",
        "limits",
        "loaded",
        "loading",
        "num_promoted_before",
        "num_storing",
        "offered_below",
        "position_of",
        "promoted",
        "queued",
        "queued_s",
        "step",
        "walk_id",
        "walks",
    )

    def __init__(
        self, request_id: str, position_of: Callable[[ChunkKey], int | None] = _no_position
    ) -> None:
        self.id = request_id
        self.position_of = position_of
        self.step = -1
        self.walk_id: object = None
        self.walks: dict[object, Walk] = {}
        self.hits: dict[int, ChunkKey] = {}
        """Slots that lookups of this step said HIT for, and that nothing can have evicted since."""
        self.holds: dict[int, ChunkKey] = {}
        """Slots this request pinned because a lookup said HIT, or a promotion for it arrived."""
        self.loading: dict[ChunkKey, int] = {}
        self.loaded: dict[ChunkKey, None] = {}
        """Keys of its last load, in prefix order."""
        self.promoted: dict[ChunkKey, str] = {}
        """Keys read from a lower level for this request, and the level's name."""
        self.denied: set[ChunkKey] = set()
        """Keys this request is told MISS for, whatever a lower level may have."""
        self.failed_reads: dict[ChunkKey, tuple[str, str]] = {}
        """Those of them whose read failed: the level, and why that is a miss."""
        self.limits: dict[object, int] = {}
        """By walk: the last position whose chunk can be part of the hit; MISS beyond."""
        self.chain: list[ChunkKey] = []
        """Keys loaded or stored, in order; lower levels are told leaf first when it ends."""
        self.deadline_s: float | None = None
        """When PENDING turns into MISS; None while nothing is waited for."""
        self.admit_by_s = 0.0
        """When a restore stops waiting for its turn and takes what fits."""
        self.num_promoted_before = -1
        """How many were promoted when its deadline was set last; -1: no read was started."""
        self.num_storing = 0
        self.offered_below: set[ChunkKey] = set()
        """Keys whose one offer to choosy lower levels this request has made."""
        self.queued = False
        self.queued_s = 0.0
        """When it began to wait for lower levels, if it is queued."""
        self.finished = False

    def begin_step(self, step: int) -> None:
        """Forget the walks of earlier steps."""
        self.step = step
        self.walks.clear()
        self.walk_id = None

    def in_order(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """`keys` in prefix order over all groups, if their positions are known."""
        ordered, position_of = list(keys), self.position_of
        if ordered and position_of(ordered[0]) is not None:
            ordered.sort(key=lambda key: position_of(key) or 0)
        return ordered

    def denies(self, key: ChunkKey, walk_id: object) -> bool:
        """Whether `key` is not to be fetched for this request."""
        if key in self.denied:
            return True
        limit = self.limits.get(walk_id) if self.limits else None
        return limit is not None and (self.position_of(key) or 0) > limit

    def walk(self, walk_id: object) -> Walk:
        """The pass the engine is on for `walk_id`; a switch of group begins a new pass."""
        if walk_id != self.walk_id or walk_id not in self.walks:
            self.walk_id = walk_id
            self.walks[walk_id] = Walk()
        return self.walks[walk_id]
