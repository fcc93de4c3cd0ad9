"""What the hierarchy remembers of one request while it lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from undercroft.keys import ChunkKey

__all__ = ["Answer", "Lookup", "Request", "Use", "Walk"]


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


def _not_known(_chain: Iterable[ChunkKey]) -> list[list[ChunkKey]]:
    return []


@dataclass(slots=True)
class Use:
    """What policies that learn are told of a request: see `undercroft.policies.base.Learning`.

    Args:
        every_key: Given what it loaded and stored: the keys of all its full chunks, those that the
            engine had by itself among them, of each group, root first, without holes. Nothing if
            the adapter does not know.
        kind: How it ended.
        num_told: By group, how many of them policies were told of.
    """

    every_key: Callable[[Iterable[ChunkKey]], list[list[ChunkKey]]] = _not_known
    kind: int = 0
    num_told: dict[object, int] = field(default_factory=dict)


class Request:
    """State of one request; adapters make it, pass it with each call, and leave it alone.

    Args:
        request_id: The engine's name of the request.
        position_of: Tells how many tokens into the request a key's chunk ends, if known.
        group_of: Tells the group of a key. None: there is one only, whose keys always come in
            prefix order.
    """

    __slots__ = (
        "_num_walked",
        "_walks",
        "admit_by_s",
        "answers",
        "asked",
        "chain",
        "deadline_s",
        "denied",
        "failed_reads",
        "finished",
        "group_of",
        "holds",
        "id",
        "is_known",
        "is_late",
        "limits",
        "loaded",
        "loading",
        "num_promoted_before",
        "num_settled",
        "num_storing",
        "num_weighed",
        "offered_below",
        "position_of",
        "promoted",
        "queued",
        "queued_s",
        "reserve_s",
        "step",
        "use",
        "why_denied",
    )

    def __init__(
        self,
        request_id: str,
        position_of: Callable[[ChunkKey], int | None] = _no_position,
        group_of: Callable[[ChunkKey], object] | None = None,
    ) -> None:
        self.id = request_id
        self.position_of = position_of
        self.group_of = group_of
        self.step = -1
        self.asked: list[ChunkKey] = []
        """Keys looked up in `step`, in order. To append one alone says that the answer was HIT,
        and is all that a lookup that hits costs here; what follows from it is found out later."""
        self.answers = bytearray()
        """`Answer`s to `asked`; those that are missing at the end are HIT."""
        self.num_settled = 0
        """How many of `asked` need no pin any more: they have one, or were let go of."""
        self._walks: dict[object, Walk] = {}
        self._num_walked, self.use = 0, Use()
        self.holds: dict[int, ChunkKey] = {}
        """Slots this request pinned because a lookup said HIT, or a promotion for it arrived."""
        self.loading: dict[ChunkKey, int] = {}
        self.loaded: dict[ChunkKey, None] = {}
        """Keys of its last load, in prefix order."""
        self.promoted: dict[ChunkKey, str] = {}
        """Keys read from a lower level for this request, and the level's name."""
        self.denied: set[ChunkKey] = set()
        """Keys this request is told MISS for, whatever a lower level may have."""
        # Why those are misses whose read did not fail; how often reading was weighed for it.
        self.why_denied, self.num_weighed = "not_restored", 0
        self.failed_reads: dict[ChunkKey, tuple[str, str]] = {}
        """Those of them whose read failed: the level, and why that is a miss."""
        self.limits: dict[object, int] = {}
        """By group: the last position whose chunk can be part of the hit; MISS beyond."""
        self.chain: list[ChunkKey] = []
        """Keys loaded or stored, in order; lower levels are told leaf first when it ends."""
        self.deadline_s: float | None = None
        """When PENDING turns into MISS; None while nothing is waited for."""
        self.admit_by_s = self.reserve_s = 0.0
        """When a restore stops waiting for its turn and takes what fits; the seconds before its
        deadline that are for what a cut by late reads asks for."""
        self.num_promoted_before = -1
        """How many were promoted when its deadline was set last; -1: no read was started."""
        self.num_storing, self.is_known = 0, False  # known: it has offered chunks; the adapter's
        self.offered_below: set[ChunkKey] = set()
        """Keys whose one offer to choosy lower levels this request has made."""
        # Late: a read did not come in time, so its deadline stays where it is.
        self.queued = self.finished = self.is_late = False
        self.queued_s = 0.0
        """When it began to wait for lower levels, if it is queued."""

    def begin_step(self, step: int) -> None:
        """Forget the lookups of earlier steps."""
        self.step = step
        self.asked = []
        self.num_settled = self._num_walked = 0
        if self.answers or self._walks:
            self.answers = bytearray()
            self._walks = {}

    def note(self, key: ChunkKey, answer: int) -> None:
        """Append a lookup, and its `Answer`."""
        asked, answers = self.asked, self.answers
        if len(asked) != len(answers):
            answers.extend(bytes(len(asked) - len(answers)))
        asked.append(key)
        answers.append(answer)

    @property
    def num_hits(self) -> int:
        """How many lookups of this step were answered HIT."""
        return len(self.asked) - len(self.answers) + self.answers.count(Answer.HIT)

    def unsettled_hits(self) -> list[ChunkKey]:
        """Keys of this step's hits that have no pin, each once; they count as settled from now."""
        first, self.num_settled = self.num_settled, len(self.asked)
        answers = self.answers
        noted = [self.asked[i] for i in range(first, len(answers)) if answers[i] == Answer.HIT]
        noted += self.asked[max(first, len(answers)) :]
        return list(dict.fromkeys(noted))

    def in_order(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """`keys` in prefix order over all groups, if their positions are known."""
        ordered, position_of = list(keys), self.position_of
        if self.group_of is not None and ordered and position_of(ordered[0]) is not None:
            ordered.sort(key=lambda key: position_of(key) or 0)
        return ordered

    def by_group(self, keys: list[ChunkKey]) -> list[list[ChunkKey]]:
        """`keys`, in prefix order over all groups, by group."""
        if self.group_of is None:
            return [keys]
        groups: dict[object, list[ChunkKey]] = {}
        for key in keys:
            groups.setdefault(self.group_of(key), []).append(key)
        return list(groups.values())

    def denies(self, key: ChunkKey) -> bool:
        """Whether `key` is not to be fetched for this request."""
        if key in self.denied:
            return True
        if not self.limits:
            return False
        limit = self.limits.get(self.group_of(key) if self.group_of is not None else None)
        return limit is not None and (self.position_of(key) or 0) > limit

    @property
    def walks(self) -> dict[object, Walk]:
        """The last pass of this step over each group; a switch of group begins a new pass."""
        if self._num_walked != len(self.asked):
            self._num_walked = len(self.asked)
            self._walks = self._walked()
        return self._walks

    def _walked(self) -> dict[object, Walk]:
        group_of = self.group_of
        answers = self.answers + bytes(len(self.asked) - len(self.answers))
        walks: dict[object, Walk] = {}
        walk = Walk()
        if group_of is None:
            walks[None] = walk
            walk.keys, walk.answers = list(self.asked), answers
            return walks
        last: object = None
        for key, answer in zip(self.asked, answers, strict=True):
            group = group_of(key)
            if group != last or not walks:
                walk = walks[group] = Walk()
                last = group
            walk.keys.append(key)
            walk.answers.append(answer)
        return walks
