"""What a restore costs the scheduler thread: whether it is worth it is weighed, or not.

A request asks for chunks that a lower level has, waits until they are read, loads them and ends:
processor time of the scheduler's thread for all of it, the reads aside. `weighed`: the speed of the
level and of the engine are known, and say that reading pays. `close`: they say so, but only once
every place to cut at has been looked at. `plain`: `load_only_if_faster` is off.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from cases.stack import hierarchy_over
from harness import AGAIN, Goal, Options, Row, Side
from undercroft.hierarchy.hierarchy import Limits
from undercroft.hierarchy.request import Lookup, Request
from undercroft.keys import ChunkKey
from undercroft.tiers.memory import MemoryTier

CHUNK_BYTES, CHUNK_TOKENS = 4096, 16
LENGTHS = (16, 256)
NUM_PREFIXES = 4
SLOW_S_PER_TOKEN, CLOSE_RATIO = 1.0, 0.9
"""Of computing: for ever; and so little less than reading that one look does not settle it."""


class Restorer:
    """A hierarchy over memory whose lower level has prefixes of every length.

    Args:
        margin: `load_margin`; None: nothing is weighed.
        is_close: Reading is predicted to take nearly as long as computing.
    """

    def __init__(self, margin: float | None, *, is_close: bool = False) -> None:
        tier = MemoryTier(1 << 30, name="below")
        data = memoryview(bytes(CHUNK_BYTES))
        self._prefixes = {
            length: [_prefix(f"{length}-{n}", length) for n in range(NUM_PREFIXES)]
            for length in LENGTHS
        }
        for prefixes in self._prefixes.values():
            for key in (key for prefix in prefixes for key in prefix):
                tier.write_from(key, data)
        self._hierarchy = hierarchy_over(
            tier,
            memoryview(mmap.mmap(-1, max(LENGTHS) * CHUNK_BYTES)),
            CHUNK_BYTES,
            max_queued_write_bytes=1 << 20,
            limits=Limits(promote_deadline_s=60.0, load_margin=margin),
        )
        (self._level,) = self._hierarchy.levels
        self._is_close = is_close
        self._hierarchy.restores.worth.compute_s = self._compute_s
        self._number = 0

    def _compute_s(self, begin: int, end: int) -> float:
        if not self._is_close:
            return SLOW_S_PER_TOKEN * (end - begin)
        s_per_byte = self._level.transfers.speeds.read_s_per_byte or 0.0
        num_bytes = (end - begin) // CHUNK_TOKENS * CHUNK_BYTES
        return CLOSE_RATIO * s_per_byte * num_bytes / self._level.transfers.num_threads

    def measure(self, num_restores: int) -> dict[str, float]:
        """Seconds of processor time a chunk, by length; the middle of so many restores."""
        return {
            f"{length}": statistics.median(
                self._restore(self._prefixes[length][n % NUM_PREFIXES]) / length
                for n in range(num_restores)
            )
            for length in LENGTHS
        }

    def _restore(self, keys: Sequence[ChunkKey]) -> float:
        """One request; the waits for its reads are not counted."""
        hierarchy, spent = self._hierarchy, 0.0
        self._number += 1
        positions = {key: CHUNK_TOKENS * (n + 1) for n, key in enumerate(keys)}
        request = Request(f"restore-{self._number}", positions.get)
        while True:
            begun = time.thread_time()
            answers = {hierarchy.lookup(key, request) for key in keys}
            if answers == {Lookup.HIT}:
                hierarchy.prepare_load(keys, request)
            hierarchy.end_step([request.id] if request.loading else [])
            if request.loading:
                hierarchy.complete_load(keys, request)
                hierarchy.finish_request(request)
                hierarchy.step_ended()
                spent += time.thread_time() - begun
                break
            if Lookup.MISS in answers:
                raise SystemExit("a chunk that is below was not restored")
            hierarchy.step_ended()
            spent += time.thread_time() - begun
            self._level.transfers.drain(time.monotonic() + 60.0)
        for key, slot in list(hierarchy.pool.keys()):  # the next one finds level 0 empty
            hierarchy.pool.void(key, slot)
        hierarchy.fresh.forget_all()
        return spent

    def close(self) -> None:
        self._hierarchy.close()


def _prefix(label: str, length: int) -> list[ChunkKey]:
    keys = (hashlib.sha256(f"{label}-{n}".encode()).digest() + bytes(4) for n in range(length))
    return [ChunkKey(key) for key in keys]


class Restore:
    """The case."""

    name = "restore"
    about = "what a restore costs the scheduler thread, weighed and not"
    rounds = 15

    def rows(self, options: Options) -> Sequence[Row]:
        """The bound of ours: weighing adds 3 % at most to what a restore takes anyway."""
        del options
        return [
            Row(
                f"restore of {length} chunks, {side}",
                (side, f"{length}"),
                ("plain", f"{length}"),
                unit="us/key",
                scale=1e6,
                goals=[Goal(round(1 / 1.03, 2))] if side == "weighed" else [],
            )
            for length in LENGTHS
            for side in ("weighed", "close")
        ]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        num_restores = 20 if options.quick else 60
        with contextlib.ExitStack() as opened:
            made = {
                "plain": Restorer(None),
                "weighed": Restorer(1.5),
                "close": Restorer(1.5, is_close=True),
            }
            for restorer in made.values():
                opened.callback(restorer.close)
            yield {
                **{name: partial(each.measure, num_restores) for name, each in made.items()},
                "plain" + AGAIN: partial(made["plain"].measure, num_restores),
            }
