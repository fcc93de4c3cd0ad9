"""Records the requests that an engine serves, as a trace: numbers only, and in a thread of its own.

What a request contains is told by its chunks' keys. They are hashed with a secret that is made anew
in each process and never written; the marks that come of it are kept in memory, to find out which
prefixes two requests share, and only the numbers of those prefixes are written.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import count

from undercroft.clock import Clock
from undercroft.log import SparingLog
from undercroft.traces.parts import Parts, Recorded

__all__ = ["RESULTS", "Recorder", "Told"]

_LOG = logging.getLogger(__name__)

RESULTS = ("written", "not_written", "queue_full", "not_told")
"""What becomes of a request that ended: its line is in a file; that could not be written; more
requests ended than the thread could take; the engine did not say what was in it."""

_MAX_WAITING = 8192
_MAX_WAITING_KEYS = 1 << 18
_MAX_HELD = 4096
_MAX_HELD_KEYS = 1 << 18
_NONE_IS_OPEN_S = float("inf")
_INTERVAL_S = 0.25
_PAUSE_S = 0.0005
_KEYS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine says of a request when it ends.

    Args:
        input_tokens: Of its prompt.
        output_tokens: Generated.
        session: What the engine calls its session; empty if it has none.
        kind: How it ended, as a number; 0 if it does not say.
    """

    input_tokens: int
    output_tokens: int
    session: bytes = b""
    kind: int = 0


@dataclass(slots=True)
class _Open:
    arrival_s: float
    ends: Mapping[bytes, int]
    num_prompt_keys: int = -1
    told: Told | None = None


@dataclass(order=True, slots=True)
class _Held:
    arrival_s: float
    number: int
    request: Recorded = field(compare=False)


class Recorder:
    """Takes requests from the scheduler and hands them to a thread that writes.

    Args:
        parts: Where to; used by that thread only.
        block_tokens: Tokens of a block of the trace, a multiple of those of a chunk.
        chunk_tokens: Tokens of a chunk.
        clock: When requests come.
        results: Counts what becomes of them, by `RESULTS`; filled with zeros here, so that its
            size stays as it is while others read it.
        is_ours: Whether a key is of the group by which prefixes are told; None: all are.

    Bound: 8,192 requests wait for the thread, or 262,144 keys; what is more is counted, and left
    out with a mark. Threads: `came`, `began`, `tell` and `ended` are the scheduler's; they never
    wait and never raise. Cost: some 2 us of the scheduler's for each request.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        block_tokens: int,
        chunk_tokens: int,
        clock: Clock,
        results: Counter[str],
        is_ours: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._parts = parts
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._log = SparingLog(_LOG, clock)
        self._results = results
        results.update(dict.fromkeys(RESULTS, 0))
        self._is_ours = is_ours
        self._open: dict[str, _Open] = {}
        self._waiting: deque[tuple[_Open, float]] = deque()
        # Each is written by one thread only, so that neither needs a lock.
        self._num_keys_put = self._num_keys_taken = 0
        self._num_lost = self._num_lost_told = 0
        self._held: list[_Held] = []
        self._num_held_keys = 0
        self._numbers = count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undercroft-recorder", daemon=True)

    # --- the scheduler's ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write what ends."""
        self._thread.start()

    def came(self, request_id: str, ends: Mapping[bytes, int]) -> None:
        """A request came.

        Args:
            request_id: The engine's name of it.
            ends: Of each of its chunks' keys, in prefix order within a group, the token where the
                chunk ends. The engine may add to it until `ended`, and not after.
        """
        self._open[request_id] = _Open(self._clock.now_s(), ends)

    def began(self, request_ids: Collection[str]) -> None:
        """These begin to run: what `ends` has of them now is their prompt."""
        for request_id in request_ids:
            request = self._open.get(request_id)
            if request is not None and request.num_prompt_keys < 0:
                request.num_prompt_keys = len(request.ends)

    def tell(self, request_id: str, told: Told) -> None:
        """What the engine knows exactly; before `ended`."""
        request = self._open.get(request_id)
        if request is not None:
            request.told = told

    def ended(self, request_id: str) -> None:
        """A request is over. One that never began to run is not recorded."""
        request = self._open.pop(request_id, None)
        if request is None or request.num_prompt_keys < 0:
            return
        num_keys = len(request.ends)
        num_waiting = self._num_keys_put - self._num_keys_taken
        if self._waiting and (
            len(self._waiting) >= _MAX_WAITING or num_waiting + num_keys > _MAX_WAITING_KEYS
        ):
            self._results["queue_full"] += 1
            self._num_lost += 1
            return
        oldest = next(iter(self._open.values()), None)
        self._num_keys_put += num_keys
        self._waiting.append((request, oldest.arrival_s if oldest else _NONE_IS_OPEN_S))

    def not_told(self) -> None:
        """A request came of which the engine says nothing."""
        self._results["not_told"] += 1
        self._num_lost += 1

    def close(self, deadline_s: float) -> None:
        """Write what waits and end the file; back by `deadline_s` though the disk hangs.

        Requests of which the engine has told all have ended, though it may not have come to say so.
        """
        self._guarded(self._end_those_told)
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline_s - self._clock.now_s()))

    def _end_those_told(self) -> None:
        for request_id in [name for name, request in self._open.items() if request.told]:
            self.ended(request_id)

    # --- the thread's -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._tick()
        self._tick()
        self._take_lost()
        self._guarded(lambda: self._release(_NONE_IS_OPEN_S))
        self._guarded(self._parts.close)

    def _tick(self) -> None:
        num_keys = 0
        while self._waiting:
            request, settled_s = self._waiting.popleft()
            num_keys += len(request.ends)
            self._num_keys_taken += len(request.ends)
            self._take_lost()
            if not self._guarded(lambda r=request, s=settled_s: self._take(r, s)):  # type: ignore[misc] # bound now
                self._results["not_written"] += 1
                self._parts.lose(1)
            if num_keys > _KEYS_AT_ONCE:
                # Whoever waits for the interpreter gets it.
                self._stop.wait(_PAUSE_S)
                num_keys = 0
        self._guarded(self._parts.tick)

    def _guarded(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception:  # noqa: BLE001 - whatever it is, it ends nothing but a line
            self._log.warning("fault while recording requests", with_traceback=True)
            return False
        return True

    def _take_lost(self) -> None:
        num_lost = self._num_lost
        if num_lost != self._num_lost_told:
            self._parts.lose(num_lost - self._num_lost_told)
            self._num_lost_told = num_lost

    def _take(self, request: _Open, settled_s: float) -> None:
        recorded = self._recorded(request)
        self._num_held_keys += len(recorded.keys)
        heapq.heappush(self._held, _Held(recorded.arrival_s, next(self._numbers), recorded))
        self._release(settled_s)

    def _release(self, settled_s: float) -> None:
        """Write, in their order, those before which none can come any more, and what is too much.

        Lines are in the order in which requests came, though requests end in another one.
        """
        held = self._held
        while held and (
            held[0].arrival_s <= settled_s
            or len(held) > _MAX_HELD
            or self._num_held_keys > _MAX_HELD_KEYS
        ):
            request = heapq.heappop(held).request
            self._num_held_keys -= len(request.keys)
            self._parts.add(request)

    def _recorded(self, request: _Open) -> Recorded:
        """What the keys say, and the engine, if it does."""
        told, block_tokens, is_ours = request.told, self._block_tokens, self._is_ours
        keys: list[bytes] = []
        input_tokens = all_tokens = 0
        for index, (key, end) in enumerate(request.ends.items()):
            if end % self._chunk_tokens or not (is_ours is None or is_ours(key)):
                continue
            all_tokens = end
            if end > told.input_tokens if told else index >= request.num_prompt_keys:
                continue
            input_tokens = end
            if end == (len(keys) + 1) * block_tokens:
                keys.append(key)
        if told is None:
            told = Told(input_tokens, all_tokens - input_tokens)
        return Recorded(
            request.arrival_s,
            told.input_tokens,
            told.output_tokens,
            keys,
            session=told.session,
            kind=told.kind,
        )
