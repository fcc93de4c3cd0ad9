"""What the self-check says, in the words of the settings and of the glossary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.hierarchy import LEVEL_0, Hierarchy
from undercroft.hierarchy.level import Level
from undercroft.settings import format_bytes

__all__ = ["Evidence", "GroupSeen", "of_group", "of_others", "of_short"]

_MAX_DISTANCES = 256


@dataclass(slots=True)
class GroupSeen:
    """A group of the engine.

    Args:
        id: The engine's.
        chunk_tokens: Tokens that a chunk spans.
        num_stored: Chunks that were planned to be stored since the start.
    """

    id: int
    chunk_tokens: int
    num_stored: int = 0


@dataclass(slots=True)
class Evidence:
    """What came together while no request was served.

    Args:
        stored_before: Chunks stored before, as the next three are of their counters.
        evicted_before: From level 0.
        full_before: Declined by level 0 because it was full.
        copy_failed_before: Not copied by the workers.
    """

    stored_before: int
    evicted_before: int
    full_before: int
    copy_failed_before: int
    began_s: dict[str, float] = field(default_factory=dict)
    """When the first evidence of each cause was seen."""
    results: Counter[str] = field(default_factory=Counter)
    zeroed: Counter[tuple[object, str]] = field(default_factory=Counter)
    """Requests that a group made a miss of, and how it did."""
    distances: list[int] = field(default_factory=list)
    """Bytes stored between a prompt and the next one like it."""
    num_alike: int = 0
    num_salts: int = 0
    num_short: int = 0
    num_long: int = 0
    longest: int = 0

    def see_distance(self, num_bytes: int) -> None:
        """So many bytes were stored between a prompt and the next one like it."""
        if len(self.distances) < _MAX_DISTANCES:
            self.distances.append(num_bytes)


def of_group(
    group: GroupSeen, how: str, *, num_requests: int, num_held: int, counters: Counters
) -> str:
    """A group that makes a miss of whatever the others have.

    Args:
        group: Which.
        how: `short`, `gaps`, `end` or `absent`.
        num_requests: Of how many requests.
        num_held: Its chunks in level 0 now.
        counters: What became of chunks.
    """
    return (
        f"group {group.id} (chunks of {group.chunk_tokens} tokens, {group.num_stored} stored) has "
        f"made a miss of all {num_requests} requests for which the other groups had chunks: "
        f"{_why_zero(group, how, num_held, counters)}"
    )


_HOW_ZERO = {
    "short": "what is found is shorter than one of its chunks; lower blocks_per_chunk, or the "
    "engine's block size",
    "gaps": "some of its chunks are found, but never a whole window in a row; lower "
    "blocks_per_chunk if it is above 1",
    "end": "it is asked for from the end of what the others have, as sliding windows and recurrent "
    "states are, and was stored elsewhere; such chunks are stored where a prompt or a step of it "
    "ended, so only prompts that go on from an earlier one can hit",
    "absent": "its chunks are not found where it is asked for them",
}


def _why_zero(group: GroupSeen, how: str, num_held: int, counters: Counters) -> str:
    failed = counters.dropped_chunks[LEVEL_0, "copy_failed"]
    if how == "short" or num_held:
        return _HOW_ZERO[how]
    if not group.num_stored:
        return (
            "the engine never offered a chunk of it; set blocks_per_chunk to 1 if it is above: a "
            "recurrent state is kept at the last whole block of a prompt, where no larger chunk "
            "may end. If it is 1, please report this, with the model's name"
        )
    if failed:
        return (
            f"none of its chunks stays, {failed} chunks were not whole or not copied (copy_failed "
            "in undercroft_dropped_chunks); lower blocks_per_chunk if it is above 1: at the edge "
            "of a window blocks are missing"
        )
    if counters.evicted_chunks[LEVEL_0]:
        return "its chunks are evicted before they are asked for; raise host"
    return _HOW_ZERO[how]


def of_short(evidence: Evidence, chunk_tokens: int) -> str:
    """No prompt fills a chunk."""
    return (
        f"all {evidence.num_short} prompts were shorter than one chunk ({chunk_tokens} tokens; the "
        f"longest had {evidence.longest}), so there was nothing to store or to load; lower "
        "blocks_per_chunk, or the engine's block size"
    )


def of_others(cause: str, evidence: Evidence, hierarchy: Hierarchy) -> str:
    """Any other cause; empty if it turns out to be no fault."""
    if cause == "salt":
        return (
            f"{evidence.num_alike} prompts began as an earlier one, and each had a cache_salt of "
            "its own, so none can use what another stored; give one salt to all who may share, "
            "or take no notice if each was a tenant's first"
        )
    return _OTHERS[cause](evidence, hierarchy)


def _of_declined(evidence: Evidence, hierarchy: Hierarchy) -> str:
    reason = _most(hierarchy.counters.declined_chunks, [LEVEL_0])
    return (
        f"{evidence.results['declined']} requests began as earlier ones of which no chunk had been "
        f"let into host memory ({reason}); relax the admission, or raise host"
    )


def _of_unavailable(evidence: Evidence, hierarchy: Hierarchy) -> str:
    down = ", ".join(level.name for level in hierarchy.levels if not level.usable) or "none now"
    return (
        f"{evidence.results['unavailable']} requests asked for chunks that only a level has which "
        f"is left alone after failures ({down}); see the lines about it, and its disk"
    )


def _of_full(evidence: Evidence, hierarchy: Hierarchy) -> str:
    declined = hierarchy.counters.declined_chunks[LEVEL_0, "full"] - evidence.full_before
    return (
        f"nothing is stored: host memory declined {declined} chunks, since all of it is pinned or "
        "being filled; raise host"
    )


def _of_copy_failed(evidence: Evidence, hierarchy: Hierarchy) -> str:
    failed = hierarchy.counters.dropped_chunks[LEVEL_0, "copy_failed"]
    return (
        f"nothing is stored: {failed - evidence.copy_failed_before} chunks were not whole or not "
        "copied by the workers; see their lines, and lower blocks_per_chunk if it is above 1"
    )


def _of_gone(evidence: Evidence, hierarchy: Hierarchy) -> str:
    counters, num_requests = hierarchy.counters, evidence.results["gone"]
    evicted = counters.evicted_chunks[LEVEL_0] - evidence.evicted_before
    began = f"{num_requests} requests began as an earlier one whose chunks are gone"
    if not counters.evicted_chunks[LEVEL_0]:
        failed = counters.dropped_chunks[LEVEL_0, "copy_failed"]
        if not failed:
            return ""  # given up by the engine, such as those of requests that were aborted
        return (
            f"{began}: {failed} chunks were not whole or not copied by the workers (copy_failed); "
            "see their lines, and lower blocks_per_chunk if it is above 1"
        )
    distances = sorted(evidence.distances)
    middle = format_bytes(distances[len(distances) // 2])
    _, capacity = hierarchy.pool.residency()
    below = "".join(_of_level(level, counters) for level in hierarchy.levels)
    raised = "host, or the capacity below" if hierarchy.levels else "host, or add a disk tier"
    return (
        f"{began}: {evicted} were evicted meanwhile. Between the two, {middle} were stored at the "
        f"median and {format_bytes(distances[-1])} at most; host memory holds "
        f"{format_bytes(capacity)}{below}. Raise {raised}, to more than that"
    )


def _of_level(level: Level, counters: Counters) -> str:
    down = counters.cascaded_chunks[level.name]
    declined = sum(n for (name, _), n in counters.declined_chunks.items() if name == level.name)
    why = f" ({_most(counters.declined_chunks, [level.name])})" if declined else ""
    return f", {level.name} was given {down} chunks and declined {declined}{why}"


_ADVICE = {
    "deadline": "the level is too slow or overloaded, or promote_deadline_s too short",
    "not_restored": "they do not fit into host memory together; raise host",
    "too_slow": "computing is predicted to be quicker than reading; nothing to do, or use a "
    "faster disk",
    "evicted_again": "host memory is too small for them; raise host",
    "read_failed": "see the lines about the level, and undercroft verify",
}


def _of_held_up(evidence: Evidence, hierarchy: Hierarchy) -> str:
    names = [LEVEL_0, *(level.name for level in hierarchy.levels)]
    reason = _most(hierarchy.counters.lookup_misses, names)
    advice = _ADVICE.get(reason.rpartition(" ")[2], "see undercroft_lookup_misses")
    return (
        f"{evidence.results['held_up']} requests waited for chunks below, and got none in "
        f"time; most often {reason}: {advice}"
    )


def _most(counted: Counter[tuple[str, str]], names: Sequence[str]) -> str:
    """The commonest reason of those levels since the start: `<count> of <level>: <reason>`."""
    of_names = Counter({each: n for each, n in counted.items() if each[0] in names and n})
    if not of_names:
        return "no reason counted"
    (name, reason), count = of_names.most_common(1)[0]
    return f"{count} times {name}: {reason}"


_OTHERS = {
    "gone": _of_gone,
    "declined": _of_declined,
    "held_up": _of_held_up,
    "unavailable": _of_unavailable,
    "full": _of_full,
    "copy_failed": _of_copy_failed,
}
