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
_FORGET_RATIO = 0.1
_LEAST_CHUNKS = 2
"""In one step of one request: fewer may be a decode that has filled a chunk."""


class Pace:
    """A running estimate of the engine's prefill seconds per token.

    Of each step that stored newly computed chunks, the time the engine spent in it counts, and the
    tokens of those chunks; older steps count less and less. What else ran in such a step, such as
    decodes, is in the time too.

    Threads: the scheduler's. Cost: under 1 us a call.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[list[float]] = deque(maxlen=_MAX_OPEN_STEPS)
        self._last_end_s = float("-inf")
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """None until a prefill was seen."""
        return self._seconds / self._tokens if self._tokens else None

    def step_began(self) -> None:
        """The engine has scheduled a step."""
        self._steps.append([self._clock.now_s(), 0.0])

    def computed(self, num_tokens: float) -> None:
        """That step computes so many tokens of prompts."""
        if self._steps:
            self._steps[-1][1] += num_tokens

    def step_ended(self) -> None:
        """The oldest step that has not ended, has. Steps may overlap, but they run in turn."""
        if not self._steps:
            return
        now_s = self._clock.now_s()
        began_s, num_tokens = self._steps.popleft()
        seconds = now_s - max(began_s, self._last_end_s)
        self._last_end_s = now_s
        if num_tokens:
            self._seconds += seconds - _FORGET_RATIO * self._seconds
            self._tokens += num_tokens - _FORGET_RATIO * self._tokens


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
