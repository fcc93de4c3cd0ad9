"""Never zero without a word: why nothing is served although chunks are stored, said once.

Each request is looked at once, when it begins to run: was it served, and if not, how did its
lookups end? Evidence is what comes together while no request is served at all; a request that is
served wipes it out. Prompts that are new to the cache are no evidence of anything.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec

from undercroft.clock import Clock
from undercroft.engines.vllm import self_check_texts as texts
from undercroft.engines.vllm.self_check_texts import Evidence, GroupSeen
from undercroft.hierarchy.hierarchy import LEVEL_0, Hierarchy
from undercroft.hierarchy.request import Answer, Request
from undercroft.keys import ChunkKey

__all__ = ["CAUSES", "RESULTS", "SelfCheck"]

_LOG = logging.getLogger(__name__)

RESULTS = ("served", "new", "unasked", "group", "gone", "declined", "held_up", "unavailable")
"""What became of a request when it began to run; see docs/reference/metrics.md."""
CAUSES = (
    "group",
    "gone",
    "declined",
    "held_up",
    "unavailable",
    "full",
    "copy_failed",
    "salt",
    "short",
)
"""What there are warnings about."""

_LEAST_S = 60.0
_LOOK_EVERY_S = 5.0
_LEAST_REQUESTS = 5
_LEAST_PROMPTS = 20
"""Of prompts alone, which cost a request less than what is stored and not served."""
_LEAST_NEW_SALTS = 100
"""Prompts with salts that were all new. New tenants who start on one system prompt look like that
too: some come again among so many, unless there are tens of thousands."""
_LEAST_CHUNKS = 16
_LEAST_TOKENS = 64
"""Of a prompt that would be worth storing."""
_MAX_REMEMBERED = 4096
_MAX_COUNTED = 20_000
"""Chunks of level 0 looked at before a warning; the one time costs some milliseconds."""
_HIT = int(Answer.HIT)
_P = ParamSpec("_P")
_AS_RESULTS = ("group", "gone", "declined", "held_up", "unavailable")


@dataclass(slots=True)
class _Seen:
    """The last keys, or hashes, of some kind; the oldest go first."""

    values: dict[object, int] = field(default_factory=dict)

    def add(self, key: object, value: int = 0) -> bool:
        """Whether it was there already."""
        was_there = self.values.pop(key, None) is not None
        self.values[key] = value
        if len(self.values) > _MAX_REMEMBERED:
            del self.values[next(iter(self.values))]
        return was_there


def _unfailing(
    method: Callable[Concatenate[SelfCheck, _P], None],
) -> Callable[Concatenate[SelfCheck, _P], None]:
    """End the self-check at its first fault: what only watches must not cost the cache."""

    @wraps(method)
    def call(self: SelfCheck, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self.is_over:
            return
        try:
            method(self, *args, **kwargs)
        except Exception:  # noqa: BLE001 - see above
            self.end()

    return call


class SelfCheck:
    """Told what is offered for storing and which requests begin; says when all of it is in vain.

    Args:
        hierarchy: Whose; its counters count what is found here too.
        clock: Source of time.
        groups: The engine's id of each group, by what `Request.group_of` says of its keys, and
            the tokens of its chunks. None stands for the only group.

    No fault in here reaches the caller: the first one ends the self-check.

    Threads: the scheduler's. Cost: some 5 us a request, 2 us a store, 0.3 us a step; nothing a key,
    but a walk over the last lookups of a request that some groups had chunks of and was not served.
    """

    def __init__(
        self, hierarchy: Hierarchy, *, clock: Clock, groups: Mapping[object, tuple[int, int]]
    ) -> None:
        self.clock = clock
        self.is_over = False
        """Whether a fault has ended it."""
        self._hierarchy = hierarchy
        self._counters = hierarchy.counters
        self._groups = {
            key: GroupSeen(group_id, chunk_tokens)
            for key, (group_id, chunk_tokens) in groups.items()
        }
        self._by_index = list(self._groups.values())
        self._chunk_tokens = max((group.chunk_tokens for group in self._by_index), default=0)
        self._stored = _Seen()
        """The first chunk of each group that a request stored, with the bytes stored before it; -1
        of one that was declined."""
        self._beginnings, self._salted = _Seen(), _Seen()
        self._evidence: Evidence | None = None
        self._num_not_copied = 0
        self._look_at_s = 0.0

    def _begin(self, cause: str) -> Evidence:
        now_s = self.clock.now_s()
        evidence = self._evidence
        if evidence is None:
            counters = self._counters
            evidence = self._evidence = Evidence(
                counters.stored_chunks,
                counters.evicted_chunks[LEVEL_0],
                counters.declined_chunks[LEVEL_0, "full"],
                counters.dropped_chunks[LEVEL_0, "copy_failed"],
            )
            self._look_at_s = now_s + _LEAST_S
        evidence.began_s.setdefault(cause, now_s)
        return evidence

    def end(self) -> None:
        """Say no more, because of the exception that is being handled."""
        self.is_over = True
        _LOG.exception("fault in the self-check; it says no more. Please report this.")

    # --- what is told -------------------------------------------------------------------------

    @_unfailing
    def planned(
        self, request: Request, keys: Sequence[ChunkKey], chunks_of_groups: Sequence[int]
    ) -> None:
        """`request` stores `keys`, group by group so many of each."""
        not_copied = self._counters.dropped_chunks[LEVEL_0, "copy_failed"]
        if not_copied != self._num_not_copied:
            self._num_not_copied = not_copied
            self._begin("copy_failed")
        if request.is_known:
            for group, count in zip(self._by_index, chunks_of_groups, strict=True):
                group.num_stored += count
            return
        request.is_known = True
        first, num_bytes = 0, self._counters.stored_bytes
        for group, count in zip(self._by_index, chunks_of_groups, strict=True):
            if count:
                group.num_stored += count
                self._stored.add(keys[first], num_bytes)
                first += count

    @_unfailing
    def declined(self, request: Request, keys: Collection[ChunkKey]) -> None:
        """Nothing of what `request` offered was let in, although some of it is not here."""
        self._begin("full")
        if not request.is_known and keys:
            request.is_known = True
            self._stored.add(next(iter(keys)), -1)

    @_unfailing
    def came(
        self, num_tokens: int, beginning: Sequence[int] | None, salt: str | None, adapter: str
    ) -> None:
        """A request came.

        Args:
            num_tokens: How long its prompt is.
            beginning: The prompt's first tokens, if they say all that its first key depends on,
                salt and adapter aside.
            salt: What keeps its chunks apart from those of others, if anything.
            adapter: Its LoRA adapter, or empty.
        """
        if num_tokens < self._chunk_tokens:
            evidence = self._begin("short")
            evidence.num_short += 1
            evidence.longest = max(evidence.longest, num_tokens)
        elif self._evidence is not None:
            self._evidence.num_long += 1
        if salt is None or beginning is None or len(beginning) < _LEAST_TOKENS // 4:
            return
        begins_with = hash((adapter, tuple(beginning)))
        is_known = self._beginnings.add(begins_with)
        is_salt_known = self._salted.add(hash((begins_with, salt)))
        if is_known:
            evidence = self._begin("salt")
            evidence.num_alike += 1
            evidence.num_salts += not is_salt_known

    @_unfailing
    def forget(self) -> None:
        """The cache was reset."""
        self._stored = _Seen()
        self._evidence = None

    # --- a request begins to run --------------------------------------------------------------

    @_unfailing
    def began(self, requests: Iterable[Request | None]) -> None:
        """These run now, with what was loaded for them or without. Before the step's end."""
        results = self._counters.requests
        for request in requests:
            if request is None:
                continue
            if request.loaded:
                self._evidence = None
                results["served"] += 1
                continue
            result = self._result(request)
            results[result] += 1
            if result in _AS_RESULTS:
                self._begin(result).results[result] += 1

    def _result(self, request: Request) -> str:
        asked, answers = request.asked, request.answers
        if not asked:
            return "unasked"
        if len(answers) == len(asked) and _HIT not in answers:  # by far the commonest
            return self._missed(request, asked)
        return self._in_vain(request)

    def _in_vain(self, request: Request) -> str:
        """Some chunk was found, and the engine did not go on to load."""
        asked = request.asked
        position_of, walks = request.position_of, request.walks
        last = request.group_of(asked[-1]) if request.group_of is not None else None
        usable = {group: bool(walk.usable(position_of)) for group, walk in walks.items()}
        if usable[last]:  # and the engine took it for too little
            blamed = [group for group in self._groups if group not in walks] or [last]
            if len(self._groups) == 1:
                return "unasked"
            return self._zeroed(max(blamed, key=lambda g: self._groups[g].chunk_tokens), "short")
        if any(usable.values()):
            walk = walks[last]
            if _HIT in walk.answers:
                return self._zeroed(last, "gaps")
            return self._zeroed(last, "end" if walk.descends(position_of) else "absent")
        return self._missed(request, walks[last].keys)

    def _zeroed(self, group: object, how: str) -> str:
        self._begin("group").zeroed[group, how] += 1
        return "group"

    def _missed(self, request: Request, keys: Sequence[ChunkKey]) -> str:
        """Nothing was found, and the walk was over `keys`."""
        if request.queued or request.failed_reads or request.denied:
            return "held_up"
        hierarchy, stored = self._hierarchy, self._stored.values
        is_one_down = bool(hierarchy.levels) and not all(each.usable for each in hierarchy.levels)
        if is_one_down and hierarchy.restores.why_absent(keys[-1])[1] == "unavailable":
            return "unavailable"
        then = next((stored[key] for key in keys if key in stored), None)
        if then is None:
            return "new"
        if then < 0:
            return "declined"
        if is_one_down:
            return "unavailable"
        self._begin("gone").see_distance(self._counters.stored_bytes - then)
        return "gone"

    # --- the verdict --------------------------------------------------------------------------

    def look(self) -> None:
        """At the end of a step: has it been in vain for long enough? Cost: a comparison."""
        if self._evidence is not None:
            self._look_at(self._evidence)

    @_unfailing
    def _look_at(self, evidence: Evidence) -> None:
        now_s = self.clock.now_s()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        ripe = {cause for cause, began_s in evidence.began_s.items() if now_s - began_s >= _LEAST_S}
        cause = self._cause(evidence, ripe)
        if cause is None or self._counters.self_check_warnings[cause]:
            return
        text = self._text(cause, evidence)
        if text:
            self._counters.self_check_warnings[cause] += 1
            _LOG.warning(
                "nothing was served from the cache for the last %d s: %s",
                now_s - evidence.began_s[cause],
                text,
            )

    def _cause(self, evidence: Evidence, ripe: set[str]) -> str | None:
        results = evidence.results
        for result, count in results.most_common(1):
            if result in ripe and count >= _LEAST_REQUESTS and 2 * count >= results.total():
                return result
        counters = self._counters
        if counters.stored_chunks == evidence.stored_before:
            lost = {
                "full": counters.declined_chunks[LEVEL_0, "full"] - evidence.full_before,
                "copy_failed": counters.dropped_chunks[LEVEL_0, "copy_failed"]
                - evidence.copy_failed_before,
            }
            cause = max(lost, key=lambda each: lost[each])
            if cause in ripe and lost[cause] >= _LEAST_CHUNKS:
                return cause
        if "salt" in ripe and evidence.num_salts == evidence.num_alike >= _LEAST_NEW_SALTS:
            return "salt"
        has_only_short = evidence.num_short >= _LEAST_PROMPTS and not evidence.num_long
        if "short" in ripe and has_only_short and evidence.longest >= _LEAST_TOKENS:
            return "short"
        return None

    def _text(self, cause: str, evidence: Evidence) -> str:
        if cause == "group":
            (group, how), _ = evidence.zeroed.most_common(1)[0]
            return texts.of_group(
                self._groups[group],
                how,
                num_requests=sum(n for (g, _), n in evidence.zeroed.items() if g == group),
                num_held=self._num_held(group),
                counters=self._counters,
            )
        if cause == "short":
            return texts.of_short(evidence, self._chunk_tokens)
        return texts.of_others(cause, evidence, self._hierarchy)

    def _num_held(self, group: object) -> int:
        """Chunks of `group` among the first of level 0."""
        group_of = self._group_of_key
        found: Counter[object] = Counter()
        for number, (key, _slot) in enumerate(self._hierarchy.pool.keys()):
            if number >= _MAX_COUNTED:
                break
            found[group_of(key)] += 1
        return found[group]

    def _group_of_key(self, key: ChunkKey) -> object:
        return None if None in self._groups else bytes(key[-4:])
