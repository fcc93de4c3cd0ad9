"""What the adapter alone can count: hits by level, tokens, durations, prefill time saved."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence

from undercroft.clock import Clock
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.request import Request
from undercroft.hierarchy.stores import LEVEL_0, StorePlan
from undercroft.keys import ChunkKey

__all__ = ["Pace", "Tally"]

_MAX_OPEN_STEPS = 8
_NUM_STEPS, _LEAST_STEPS = 20, 3
_FIRST_REACH = 1024
_LEAST_CHUNKS = 2
"""In one step of one request: fewer may be a decode that has filled a chunk."""


class Pace:
    """A running estimate of the engine's prefill seconds per token.

    Of each step that computed enough tokens of prompts, the time the engine spent in it counts, and
    those tokens: whatever else ran in it, such as decodes, is in the time, since whoever waits for
    a prompt waits for that too. The estimate is the median of the last such steps, each as heavy as
    its tokens, so that neither a first step that compiles nor a small one says much. Later tokens
    of a long prompt are dearer, so steps are kept apart by how far into a prompt they were.

    Threads: the scheduler's. Cost: under 1 us a call; an estimate after a new step some 10 us.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[list[float]] = deque(maxlen=_MAX_OPEN_STEPS)
        self._last_end_s = float("-inf")
        self._all: deque[tuple[float, float]] = deque(maxlen=_NUM_STEPS)
        self._by_reach: dict[int, deque[tuple[float, float]]] = {}
        self._known: dict[int, float] = {}
        self.is_told = False
        """Whether somebody says exactly what each step computes; else what is stored has to do."""

    @property
    def seconds_per_token(self) -> float | None:
        """None until a prefill was seen."""
        return _weighted_median(self._all) if self._all else None

    def seconds_of(self, begin: int, end: int) -> float | None:
        """To compute the tokens of a prompt from `begin` to `end`; None until enough was seen."""
        if len(self._all) < _LEAST_STEPS:
            return None
        known = self._known
        if not known:
            known.update({reach: _weighted_median(of) for reach, of in self._by_reach.items()})
        seconds = 0.0
        while begin < end:
            reach = _reach(begin)
            upto = min(end, _FIRST_REACH << reach)
            nearest = min(known, key=lambda each: (abs(each - reach), -each))
            seconds += (upto - begin) * known[nearest]
            begin = upto
        return seconds

    def step_began(self) -> None:
        """The engine has scheduled a step."""
        self._steps.append([self._clock.now_s(), 0.0, 0.0])

    def computed(self, num_tokens: float, first: float = 0.0) -> None:
        """That step computes so many tokens of a prompt, from its token `first` on."""
        if self._steps:
            step = self._steps[-1]
            step[1] += num_tokens
            step[2] += num_tokens * (first + num_tokens / 2)

    def step_ended(self) -> None:
        """The oldest step that has not ended, has. Steps may overlap, but they run in turn."""
        if not self._steps:
            return
        now_s = self._clock.now_s()
        began_s, num_tokens, moment = self._steps.popleft()
        seconds = now_s - max(began_s, self._last_end_s)
        self._last_end_s = now_s
        if num_tokens:
            seen = (seconds / num_tokens, num_tokens)
            self._all.append(seen)
            reach = _reach(int(moment / num_tokens))
            self._by_reach.setdefault(reach, deque(maxlen=_NUM_STEPS)).append(seen)
            self._known.clear()


def _reach(position: int) -> int:
    """How far into a prompt, in powers of two."""
    return (position // _FIRST_REACH).bit_length()


def _weighted_median(steps: Collection[tuple[float, float]]) -> float:
    """Of (value, weight): half of the weight is at or below it."""
    left = sum(weight for _, weight in steps) / 2
    for value, weight in sorted(steps):
        left -= weight
        if left <= 0:
            return value
    return 0.0


class Tally:
    """Counts around the manager's calls. Threads: the scheduler's.

    Cost: 0.5-1 us a call in a loop, 2-3 us between other work, whatever the number of chunks; with
    hits from below, 0.13 us a hit more.

    Args:
        counters: Where to.
        clock: For how long stores, loads and restores took.
        tokens_per_chunk: Of each group, in the engine's order.
    """

    def __init__(self, counters: Counters, clock: Clock, tokens_per_chunk: Sequence[int]) -> None:
        self._counters = counters
        self.clock = clock
        self.tokens_per_chunk = tuple(tokens_per_chunk)
        self.pace = Pace(clock)
        self._loads: dict[str, float] = {}
        self._stores: dict[str, list[tuple[ChunkKey, float]]] = {}
        self._unpriced: dict[str, int] = {}

    def load_began(
        self,
        request: Request,
        keys: Sequence[ChunkKey],
        chunks_of_groups: Sequence[int],
        *,
        has_waited: bool,
    ) -> None:
        """`request` goes on to load `keys`, group by group so many of each.

        Args:
            request: Whose hits they are.
            keys: The hits.
            chunks_of_groups: How many of them are of each group.
            has_waited: It was waiting for lower levels until now.
        """
        now_s = self.clock.now_s()
        self._loads[request.id] = now_s
        if has_waited:
            self._counters.restore_wait_seconds.see(now_s - request.queued_s)
        leader, num_tokens = self._leader(chunks_of_groups)
        if not request.promoted:
            self._counters.hit_chunks[LEVEL_0] += len(keys)
            self._counters.hit_tokens[LEVEL_0] += num_tokens
            self._unpriced[LEVEL_0] = self._unpriced.get(LEVEL_0, 0) + num_tokens
        else:
            first = sum(chunks_of_groups[:leader])
            of_leader = keys[first : first + chunks_of_groups[leader]]
            self._counters.hit_chunks.update(_by_source(request, keys))
            for level, num_chunks in _by_source(request, of_leader).items():
                num_tokens = self.tokens_per_chunk[leader] * num_chunks
                self._counters.hit_tokens[level] += num_tokens
                self._unpriced[level] = self._unpriced.get(level, 0) + num_tokens
        self._price()

    def load_ended(self, request_id: str) -> None:
        """The engine has the bytes."""
        began_s = self._loads.pop(request_id, None)
        if began_s is not None:
            self._counters.load_seconds.see(self.clock.now_s() - began_s)

    def store_began(
        self, request_id: str, plan: StorePlan, chunks_of_groups: Sequence[int]
    ) -> None:
        """A store was planned.

        Args:
            request_id: Whose.
            plan: What the engine was told to store.
            chunks_of_groups: How many of the plan's keys are of each group.
        """
        if not plan.keys:
            return
        open_stores = self._stores.setdefault(request_id, [])
        open_stores.append((plan.keys[0], self.clock.now_s()))
        leader, num_tokens = self._leader(chunks_of_groups)
        if self.pace.is_told:
            return
        if plan.is_whole and chunks_of_groups[leader] >= _LEAST_CHUNKS:
            self.pace.computed(num_tokens)

    def store_ended(self, request_id: str, keys: Collection[ChunkKey]) -> None:
        """The workers copied `keys`, all of one plan, or could not."""
        open_stores = self._stores.get(request_id)
        if open_stores is None:
            return
        for index, (first_key, began_s) in enumerate(open_stores):
            if first_key in keys:
                self._counters.store_seconds.see(self.clock.now_s() - began_s)
                del open_stores[index]
                break
        if not open_stores:
            del self._stores[request_id]

    def reset(self) -> None:
        """After a reset the engine tells no end of what was under way."""
        self._loads.clear()
        self._stores.clear()

    def _leader(self, chunks_of_groups: Sequence[int]) -> tuple[int, int]:
        """The group whose chunks span most tokens: full attention, if there is one."""
        tokens_per_chunk = self.tokens_per_chunk
        if len(tokens_per_chunk) == 1:
            return 0, chunks_of_groups[0] * tokens_per_chunk[0]
        spans = [n * t for n, t in zip(chunks_of_groups, tokens_per_chunk, strict=True)]
        most = max(spans)
        return spans.index(most), most

    def _price(self) -> None:
        """Turn hit tokens into seconds; before the first prefill was seen they wait for that."""
        pace = self.pace.seconds_per_token
        if pace is None:
            return
        saved = self._counters.saved_prefill_seconds
        for level, num_tokens in self._unpriced.items():
            saved[level] = saved.get(level, 0.0) + num_tokens * pace
        self._unpriced.clear()


def _by_source(request: Request, keys: Sequence[ChunkKey]) -> dict[str, int]:
    """How many of `keys` came from each level."""
    found = Counter(map(request.promoted.get, keys))
    return {level or LEVEL_0: count for level, count in found.items()}
