"""Carrying out one move on a mover thread: the tier's verbs, retries, foreign exceptions."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

from undercroft.clock import Clock
from undercroft.errors import Bug, KvError, TierUnavailable
from undercroft.hierarchy.moves import Move
from undercroft.hierarchy.outcome import Op
from undercroft.tiers.base import Batched, Ends, Epochal, Tier

__all__ = ["Attempts", "Ended"]

_LOG = logging.getLogger(__name__)

Ended = tuple[Move, KvError | None, bool]
"""A move, its error, and whether the chunk's bytes were moved."""


class Attempts:
    """Tries a move, and again while that makes sense.

    Args:
        tier: What is called.
        clock: Source of the pauses.
        retries: Further tries after a retryable error.
        pause_s: Wait before the first retry; doubled before each further one.
        give_up: Whether to try no more (closing).

    Threads: any.
    """

    def __init__(
        self, tier: Tier, *, clock: Clock, retries: int, pause_s: float, give_up: Callable[[], bool]
    ) -> None:
        self._tier = tier
        self._epochal = tier if isinstance(tier, Epochal) else None
        self._batched = tier if isinstance(tier, Batched) else None
        self._clock = clock
        self._retries = retries
        self._pause_s = pause_s
        self._give_up = give_up
        self._lock = threading.Lock()
        self.num_bugs = 0
        self.num_retries = 0

    @property
    def batch_bytes(self) -> int:
        """How much of one kind the tier takes in a call; 0: one move."""
        return 0 if self._batched is None else self._batched.batch_bytes

    def perform(self, moves: Sequence[Move]) -> Iterator[list[Ended]]:
        """Blocks. Each move with its error, if any, and whether the chunk's bytes were moved.

        They are not if a read finds no chunk, and if the epoch of a write is over. Nothing is tried
        again: see `may_go_on` and `go_on`.
        """
        if len(moves) == 1 or self._batched is None:
            for move in moves:
                yield [(move, *self._try_once(move))]
            return
        left = dict(enumerate(moves))
        try:
            for ends in self._begun(self._batched, moves):
                yield [(left.pop(i), *self._end_of(end, moves[i])) for i, end in ends]
            failure: Exception = Bug(f"{len(left)} of {len(moves)} chunks were not told of")
        except Exception as exc:  # noqa: BLE001 - a stranger's tier may raise anything
            failure = exc
        if left:
            yield [(move, *self._end_of(failure, move)) for move in left.values()]

    def _begun(self, batched: Batched, moves: Sequence[Move]) -> Iterator[Ends]:
        op = moves[0].op
        if op is Op.DELETE:
            return batched.delete_many([move.key for move in moves])
        given = [(move.key, move.buffer, move.epoch) for move in moves if move.buffer is not None]
        if op is Op.READ:
            return batched.read_many([(key, buffer) for key, buffer, _ in given])
        return batched.write_many(given)

    def may_go_on(self, error: KvError | None, move: Move) -> bool:
        """Whether what failed with `error` is worth another try."""
        return (
            error is not None
            and self._retries > 0
            and self._worth_another(error, move.deadline_s - self._pause_s)
        )

    def go_on(self, error: KvError | None, move: Move) -> tuple[KvError | None, bool]:
        """Blocks. Try a move again that failed with `error`, while that makes sense."""
        moved = False
        pause_s = self._pause_s
        for _ in range(self._retries):
            if error is None or not self._worth_another(error, move.deadline_s - pause_s):
                break
            self._clock.sleep(pause_s)
            pause_s *= 2
            with self._lock:
                self.num_retries += 1
            error, moved = self._try_once(move)
        return error, moved

    def _worth_another(self, error: KvError, latest_s: float) -> bool:
        return (
            error.retryable
            and not isinstance(error.__cause__, Bug)
            and self._clock.now_s() < latest_s
            and not self._give_up()
        )

    def _try_once(self, move: Move) -> tuple[KvError | None, bool]:
        """The one place where a tier is called and foreign exceptions become ours."""
        try:
            return None, self._call(move)
        except KvError as exc:
            return _bare(exc), False
        except Exception as exc:  # noqa: BLE001 - a stranger's tier may raise anything
            return self._end_of(exc, move)

    def _end_of(self, end: object, move: Move) -> tuple[KvError | None, bool]:
        if not isinstance(end, Exception):
            return None, bool(end) and move.op is not Op.DELETE
        if isinstance(end, Bug):
            self._note_bug(end)
        return _bare(end if isinstance(end, KvError) else self.translated(end, move)), False

    def _call(self, move: Move) -> bool:
        tier, key, buffer = self._tier, move.key, move.buffer
        if buffer is None:
            tier.delete(key)
            return False
        if move.op is Op.READ:
            return tier.read_into(key, buffer)
        if self._epochal is not None and move.epoch is not None:
            return self._epochal.write_in_epoch(key, buffer, move.epoch)
        tier.write_from(key, buffer)
        return True

    def lost(self, move: Move, exc: BaseException) -> Ended:
        """The end of a move whose thread died of `exc`, which keeps no buffer alive."""
        error = self.translated(exc, move)
        error.__cause__ = None
        return move, error, False

    def translated(self, exc: BaseException, move: Move) -> KvError:
        """A foreign exception as `TierUnavailable` caused by it."""
        name = self._tier.name
        error = TierUnavailable(
            f"tier {name!r} failed to {move.op.value} a chunk: {type(exc).__name__}: {exc}",
            tier=name,
            key=move.key,
        )
        error.__cause__ = exc
        return error

    def _note_bug(self, bug: Bug) -> None:
        with self._lock:
            self.num_bugs += 1
            first = self.num_bugs == 1
        if first:
            # Not the exception: a kept log record would keep buffers.
            text = "".join(traceback.format_exception(bug))
            _LOG.error("a bug in tier %r; further ones are only counted\n%s", self._tier.name, text)


def _bare(error: KvError) -> KvError:
    """`error`, it and its causes without tracebacks: their frames would keep buffers alive."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        exc = todo.pop()
        if exc is None or id(exc) in seen:
            continue
        seen.add(id(exc))
        exc.__traceback__ = None
        todo += (exc.__cause__, exc.__context__)
    return error
