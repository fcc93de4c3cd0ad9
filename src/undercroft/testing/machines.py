"""An engine of several groups over the hierarchy, whose every transfer can be held up.

It walks as vLLM's offloading connector does (full attention from the root, sliding windows from the
end, all groups again until they agree), and like there loads and stores are jobs: a worker copies
them in a later step, and they are acknowledged later still, in any order, or never after a reset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from undercroft.hierarchy.hierarchy import Hierarchy
from undercroft.hierarchy.request import Lookup, Request
from undercroft.keys import ChunkKey
from undercroft.testing.mini_engine import content_of

__all__ = ["Group", "GroupEngine", "GroupRequest", "Job"]


@dataclass(frozen=True, slots=True)
class Group:
    """A group of layers.

    Args:
        id: The end of its keys.
        tokens_per_chunk: Tokens that a chunk spans.
        window: Chunks that a hit must end with; None: full attention, all chunks from the root.
    """

    id: int
    tokens_per_chunk: int
    window: int | None = None

    def keys(self, tokens: Sequence[str]) -> list[ChunkKey]:
        """The keys of the whole chunks of `tokens`; equal prefixes have equal keys."""
        size = self.tokens_per_chunk
        keys = []
        for end in range(size, len(tokens) + 1, size):
            digest = hashlib.sha256(repr(tuple(tokens[:end])).encode()).digest()
            keys.append(ChunkKey(digest + self.id.to_bytes(4, "big")))
        return keys


@dataclass(eq=False)
class Job:
    """Chunks on their way between the engine and level 0."""

    entry: GroupRequest
    keys: list[ChunkKey]
    slots: list[int]
    version: int
    store_id: int = 0
    fails: bool = False
    copied: bool = False
    lost: bool = False
    """Begun before a reset: copied, but never acknowledged."""

    @property
    def is_store(self) -> bool:
        """A store, not a load."""
        return self.store_id > 0


@dataclass(eq=False)
class GroupRequest:
    """One request and how far it is."""

    request: Request
    tokens: list[str]
    keys: list[list[ChunkKey]]
    num_asked: int = 0
    num_hit_tokens: int | None = None
    num_computed_tokens: int = 0
    num_stored_tokens: int = 0
    waits_since_s: float | None = None
    jobs: list[Job] = field(default_factory=list)
    aborted: bool = False
    outdated: bool = False
    """What it has computed is from before another engine's reset."""


class GroupEngine:
    """Runs requests over several groups; the caller decides what happens when.

    Args:
        hierarchy: Under test.
        groups: The groups, those of full attention first.
        now_s: For the time that a request is kept waiting.

    Raises:
        AssertionError: A load brought other bytes than were computed for that key.
    """

    def __init__(
        self, hierarchy: Hierarchy, groups: Sequence[Group], now_s: Callable[[], float]
    ) -> None:
        self.hierarchy = hierarchy
        self.groups = tuple(groups)
        self.version = 0
        self.waiting: list[GroupRequest] = []
        self.running: list[GroupRequest] = []
        self.jobs: list[Job] = []
        self.failed_stores: set[int] | None = set()
        self.longest_wait_s = 0.0
        self.num_wrong = 0
        self._now_s = now_s
        self._leaving: list[GroupRequest] = []
        self._num_requests = 0

    def submit(self, tokens: Sequence[str]) -> GroupRequest:
        """Queue a request."""
        keys = [group.keys(tokens) for group in self.groups]
        ends = {
            key: (index + 1) * group.tokens_per_chunk
            for group, of_group in zip(self.groups, keys, strict=True)
            for index, key in enumerate(of_group)
        }
        self._num_requests += 1
        request = Request(f"r{self._num_requests}", ends.get, lambda key: key[-4:])
        entry = GroupRequest(request, list(tokens), keys)
        self.waiting.append(entry)
        return entry

    def abort(self, entry: GroupRequest) -> None:
        """The client went away: the hierarchy hears of it in the next step."""
        entry.aborted = True
        for queue in (self.waiting, self.running):
            if entry in queue:
                queue.remove(entry)
                self._leaving.append(entry)

    def take_failed_stores(self) -> frozenset[int] | None:
        """What the workers report; see `Hierarchy`."""
        failed, self.failed_stores = self.failed_stores, set()
        return None if failed is None else frozenset(failed)

    # --- lookups ------------------------------------------------------------------------------

    def lookup(self, entry: GroupRequest) -> int | None:
        """Tokens that can be loaded; None: asked again in the next step."""
        entry.num_asked += 1
        limit = len(entry.tokens) - any(group.window for group in self.groups)
        hit_tokens, deferred = 0, False
        indices = list(range(len(self.groups)))
        windows = [i for i in indices if self.groups[i].window]
        todo = indices
        while todo:
            again: list[int] = []
            saw_window = False
            for index in todo:
                group, keys = self.groups[index], entry.keys[index]
                size = group.tokens_per_chunk
                limit = min(limit, len(keys) * size)
                if limit < size:
                    return 0
                count = self._walk(entry, index, -(-limit // size))
                if count == 0:
                    return 0
                if count is None:
                    deferred = True
                else:
                    limit = min(limit, count * size)
                if limit < size:
                    return 0
                if limit < hit_tokens:
                    if deferred:
                        deferred, again = False, indices
                    elif saw_window and not again:
                        again = windows
                saw_window |= group.window is not None
                hit_tokens = limit
            todo = again
        return None if deferred else hit_tokens

    def _walk(self, entry: GroupRequest, index: int, num_chunks: int) -> int | None:
        group, keys = self.groups[index], entry.keys[index][:num_chunks]
        ask = self.hierarchy.lookup
        if group.window is None:
            hits, pending = 0, False
            for key in keys:
                answer = ask(key, entry.request)
                if answer is Lookup.MISS:
                    break
                pending |= answer is Lookup.PENDING
                hits += 1
            return None if pending else hits
        in_a_row, pending = 0, False
        for place in range(len(keys) - 1, -1, -1):
            answer = ask(keys[place], entry.request)
            if answer is Lookup.MISS:
                in_a_row, pending = 0, False
            else:
                in_a_row += 1
                pending |= answer is Lookup.PENDING
            if in_a_row == group.window:
                return None if pending else place + in_a_row
        return None if pending else in_a_row

    # --- steps --------------------------------------------------------------------------------

    def schedule(self, *, blocked: bool = False, num_tokens: int = 4, fails: bool = False) -> None:
        """The scheduler's part of a step.

        Args:
            blocked: The engine has no room: it looks up, but begins nothing.
            num_tokens: How many tokens each running request computes.
            fails: The stores begun now will fail.
        """
        started: list[str] = []
        for entry in list(self.waiting):
            if entry.jobs:
                continue
            hits = self.lookup(entry)
            now_s = self._now_s()
            if hits is None:
                if entry.waits_since_s is None:
                    entry.waits_since_s = now_s
                self.longest_wait_s = max(self.longest_wait_s, now_s - entry.waits_since_s)
                continue
            entry.waits_since_s = None
            if blocked:
                continue
            self.waiting.remove(entry)
            self.running.append(entry)
            started.append(entry.request.id)
            entry.num_hit_tokens = hits
            entry.num_computed_tokens = entry.num_stored_tokens = hits
            if hits:
                self._begin_load(entry, hits)
        if self.hierarchy.end_step(started):
            self._distrust(started)
        for entry in list(self.running):
            self._compute(entry, num_tokens, fails=fails)
        leaving, self._leaving = self._leaving, []
        for entry in leaving:
            self.hierarchy.finish_request(entry.request)

    def _distrust(self, started: list[str]) -> None:
        for entry in self.running:
            began_now = entry.request.id in started and not entry.num_hit_tokens
            entry.outdated |= not began_now

    def _begin_load(self, entry: GroupRequest, hit_tokens: int) -> None:
        keys: list[ChunkKey] = []
        for group, of_group in zip(self.groups, entry.keys, strict=True):
            of_hit = of_group[: -(-hit_tokens // group.tokens_per_chunk)]
            keys += of_hit if group.window is None else of_hit[-group.window :]
        slots = self.hierarchy.prepare_load(keys, entry.request)
        self._begin(Job(entry, keys, slots, self.version))

    def _compute(self, entry: GroupRequest, num_tokens: int, *, fails: bool) -> None:
        if any(not job.is_store for job in entry.jobs):
            return
        entry.num_computed_tokens = min(len(entry.tokens), entry.num_computed_tokens + num_tokens)
        keys: list[ChunkKey] = []
        for group, of_group in zip(self.groups, entry.keys, strict=True):
            size = group.tokens_per_chunk
            keys += of_group[entry.num_stored_tokens // size : entry.num_computed_tokens // size]
        entry.num_stored_tokens = entry.num_computed_tokens
        if keys and not entry.outdated:
            plan = self.hierarchy.prepare_store(keys, entry.request)
            assert set(plan.keys) <= set(keys)
            assert plan.keys == [key for key in keys if key in set(plan.keys)]
            if plan.keys:
                job = Job(entry, plan.keys, plan.slots, self.version, plan.store_id, fails=fails)
                self._begin(job)
        if entry.num_computed_tokens == len(entry.tokens):
            self.running.remove(entry)
            self.hierarchy.finish_request(entry.request)

    def _begin(self, job: Job) -> None:
        self.jobs.append(job)
        job.entry.jobs.append(job)

    def work(self, chosen: Callable[[Job], bool] = lambda _job: True) -> None:
        """The workers copy those jobs that are `chosen`, and all begun before a reset."""
        for job in self.jobs:
            if job.copied or not (job.lost or chosen(job)):
                continue
            job.copied = True
            if job.is_store:
                self._copy_in(job)
            elif not job.lost:
                self._copy_out(job)
        self.jobs = [job for job in self.jobs if not job.lost]

    def _copy_in(self, job: Job) -> None:
        for key, slot in zip(job.keys, job.slots, strict=True):
            view = self.hierarchy.view(slot)
            content = content_of(key, len(view), job.version)
            view[:] = content[: len(view) // 2] + bytes(len(view) // 2) if job.fails else content
        if job.fails and self.failed_stores is not None:
            self.failed_stores.add(job.store_id)

    def _copy_out(self, job: Job) -> None:
        for key, slot in zip(job.keys, job.slots, strict=True):
            view = self.hierarchy.view(slot)
            if bytes(view) != content_of(key, len(view), job.version):
                self.num_wrong += 1
                raise AssertionError(
                    f"request {job.entry.request.id} loaded wrong bytes for {key.hex()}"
                )

    def acknowledge(self, chosen: Callable[[Job], bool] = lambda _job: True) -> None:
        """The copied jobs that are `chosen` are reported, latest first; the step has ended."""
        for job in [job for job in reversed(self.jobs) if job.copied and chosen(job)]:
            self.jobs.remove(job)
            job.entry.jobs.remove(job)
            if job.is_store:
                self.hierarchy.complete_store(set(job.keys), job.entry.request)
            else:
                self.hierarchy.complete_load(set(job.keys), job.entry.request)
        self.hierarchy.step_ended()

    def step(self) -> None:
        """One step with nothing held up."""
        self.schedule()
        self.work()
        self.acknowledge()

    @property
    def idle(self) -> bool:
        """Whether the engine itself has nothing to do."""
        return not (self.waiting or self.running or self.jobs or self._leaving)

    def reset(self, *, new_weights: bool) -> None:
        """As vLLM: requests that run are preempted if the weights change, else go on.

        Jobs under way are copied in the next step and never acknowledged.
        """
        for job in self.jobs:
            job.lost = True
            job.entry.jobs.clear()
        leaving, self._leaving = self._leaving, []
        for entry in leaving:
            self.hierarchy.finish_request(entry.request)
        self.hierarchy.reset()
        if new_weights:
            self.version += 1
            self.waiting[:0] = self.running
            self.running.clear()
        for entry in self.running:
            entry.num_stored_tokens = 0
