"""A small engine over the hierarchy: real bytes, the order of vLLM's calls, no model.

It walks, defers, loads, computes and stores chunks of requests, step by step, and checks each
loaded byte. What a chunk must contain is a function of its key, so a wrong byte cannot hide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from undercroft.hierarchy.hierarchy import Hierarchy
from undercroft.hierarchy.request import Lookup, Request
from undercroft.keys import ChunkKey

__all__ = ["MiniEngine", "MiniRequest", "chunk_key", "content_of"]


def chunk_key(label: str, group_id: int = 0) -> ChunkKey:
    """A key shaped like vLLM's: SHA-256 and a 4-byte big-endian group id."""
    return ChunkKey(hashlib.sha256(label.encode()).digest() + group_id.to_bytes(4, "big"))


def content_of(key: ChunkKey, num_bytes: int, version: int = 0) -> bytes:
    """The bytes the chunk of `key` must have; `version` stands for the model's weights."""
    seed = hashlib.sha256(key + version.to_bytes(4, "big")).digest()
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


@dataclass
class MiniRequest:
    """One request: its chunks from the root on, and what became of it."""

    request: Request
    keys: list[ChunkKey]
    num_asked: int = 0
    num_hits: int | None = None
    num_stored: int = 0
    version: int = 0
    loading: list[ChunkKey] = field(default_factory=list)


class MiniEngine:
    """Runs requests over a hierarchy, one `step` at a time.

    Args:
        hierarchy: Under test.
        between_steps: Called after each step; lets movers or a clock get on.

    Raises:
        AssertionError: A load brought other bytes than were computed for that key.
    """

    def __init__(
        self, hierarchy: Hierarchy, between_steps: Callable[[], None] = lambda: None
    ) -> None:
        self.hierarchy = hierarchy
        self.version = 0
        self._between_steps = between_steps
        self._waiting: list[MiniRequest] = []
        self._stores: list[tuple[MiniRequest, list[ChunkKey], list[int]]] = []
        self._num_requests = 0

    def submit(self, keys: Sequence[ChunkKey]) -> MiniRequest:
        """Queue a request over `keys`, root first."""
        positions = {key: index + 1 for index, key in enumerate(keys)}
        self._num_requests += 1
        request = Request(f"r{self._num_requests}", positions.get)
        entry = MiniRequest(request, list(keys), version=self.version)
        self._waiting.append(entry)
        return entry

    def abort(self, entry: MiniRequest) -> None:
        """The client went away."""
        if entry in self._waiting:
            self._waiting.remove(entry)
            self.hierarchy.finish_request(entry.request)

    def walk(self, entry: MiniRequest) -> int | None:
        """VLLM's prefix walk: None defers the request to the next step."""
        entry.num_asked += 1
        hits, pending = 0, False
        for key in entry.keys:
            answer = self.hierarchy.lookup(key, entry.request)
            if answer is Lookup.MISS:
                break
            pending |= answer is Lookup.PENDING
            hits += 1
        return None if pending else hits

    def step(self) -> None:
        """Schedule, load, compute and store once, in vLLM's order."""
        hierarchy = self.hierarchy
        scheduled: list[MiniRequest] = []
        for entry in list(self._waiting):
            hits = self.walk(entry)
            if hits is None:
                continue
            entry.num_hits = hits
            if hits:
                self._load(entry, entry.keys[:hits])
            self._waiting.remove(entry)
            scheduled.append(entry)
        hierarchy.end_step([entry.request.id for entry in scheduled])
        finished_stores, self._stores = self._stores, []
        for entry in scheduled:
            self._store(entry, entry.keys[entry.num_hits or 0 :])
            hierarchy.finish_request(entry.request)
        for entry, keys, slots in finished_stores:
            for key, slot in zip(keys, slots, strict=True):
                view = hierarchy.view(slot)
                view[:] = content_of(key, len(view), entry.version)
            hierarchy.complete_store(set(keys), entry.request)
        hierarchy.step_ended()
        self._between_steps()

    def _load(self, entry: MiniRequest, keys: list[ChunkKey]) -> None:
        slots = self.hierarchy.prepare_load(keys, entry.request)
        for key, slot in zip(keys, slots, strict=True):
            view = self.hierarchy.view(slot)
            assert bytes(view) == content_of(key, len(view), self.version), (
                f"request {entry.request.id} loaded wrong bytes for {key.hex()}"
            )
        self.hierarchy.complete_load(set(keys), entry.request)

    def _store(self, entry: MiniRequest, keys: list[ChunkKey]) -> None:
        if not keys:
            return
        plan = self.hierarchy.prepare_store(keys, entry.request)
        entry.num_stored = len(plan.keys)
        if plan.keys:
            self._stores.append((entry, plan.keys, plan.slots))

    def run(self, keys: Sequence[ChunkKey], max_steps: int = 400) -> MiniRequest:
        """Submit one request and step until it is answered and everything is settled."""
        entry = self.submit(keys)
        self.settle(max_steps)
        assert entry.num_hits is not None, f"no answer after {max_steps} steps"
        return entry

    def settle(self, max_steps: int = 400) -> int:
        """Step until nothing is under way; returns how many steps it took."""
        for count in range(max_steps):
            if not (self._waiting or self._stores or self.hierarchy.has_pending_work()):
                return count
            self.step()
        return max_steps

    def reset(self) -> None:
        """As vLLM's reset: what workers have in flight is acknowledged no more."""
        for _entry, keys, slots in self._stores:
            for key, slot in zip(keys, slots, strict=True):
                view = self.hierarchy.view(slot)
                view[:] = content_of(key, len(view), self.version)
        self._stores.clear()
        self.hierarchy.reset()
