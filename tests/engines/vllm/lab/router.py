"""What a router would know of one engine: a subscriber of its KV events, by the wire alone."""

import time
from collections import Counter, defaultdict
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from tests.engines.vllm.lab.driver import Driver
from tests.engines.vllm.lab.ports import free_port
from tests.engines.vllm.lab.storm import manager_of

_SEQUENCE_BYTES = 8
_LAST = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)


class Router:
    """Keeps, per level, the block hashes that an engine's events say it holds.

    A level is (medium, ownership): the engine's own cache is ("GPU", None), host memory
    ("CPU", None), a tier ("STORAGE", its name).
    """

    def __init__(self) -> None:
        self.replay_endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._events.bind("tcp://127.0.0.1:*")
        self.endpoint = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        """Without a `*`, so that vLLM's publisher connects to it."""
        self._next = 0
        self.held: dict[tuple[str, str | None], set[int]] = defaultdict(set)
        self.num_removed: Counter[tuple[str, str | None]] = Counter()
        self.doubts: list[str] = []
        """Removals of what was not there, and stores of what was, below the engine's own cache."""

    @property
    def config(self) -> dict[str, Any]:
        """`kv_events_config` of the engine to follow."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
        }

    def follow(self, quiet_s: float = 0.5) -> None:
        """Apply what is published until nothing has come for a while; ask for what was missed."""
        last_s = time.monotonic()
        while time.monotonic() - last_s < quiet_s:
            if self._events.poll(50):
                _, sequence, payload = self._events.recv_multipart()
                self._take(int.from_bytes(sequence, "big"), payload)
                last_s = time.monotonic()
        self._catch_up()

    def _take(self, number: int, payload: bytes) -> None:
        if number > self._next:
            self._catch_up()  # what was published before the connection stood
        if number == self._next:
            self._next += 1
            self._apply(payload)

    def _catch_up(self) -> None:
        with self._context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.connect(self.replay_endpoint)
            replay.send_multipart([b"", self._next.to_bytes(_SEQUENCE_BYTES, "big")])
            while replay.poll(60_000):
                sequence, payload = replay.recv_multipart()[-2:]
                if sequence == _LAST:
                    return
                if int.from_bytes(sequence, "big") == self._next:
                    self._next += 1
                    self._apply(payload)
        raise TimeoutError("the engine does not answer a replay request")

    def _apply(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self.held["GPU", None].clear()
                continue
            level = (event.get("medium"), event.get("ownership"))
            for block in event["block_hashes"]:
                is_there = block in self.held[level]
                if level[0] != "GPU" and is_there != (kind == "BlockRemoved"):
                    self.doubts.append(f"{kind} {level} {block:x}")
                if kind == "BlockRemoved":
                    self.num_removed[level] += 1
                    self.held[level].discard(block)
                else:
                    self.held[level].add(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)


def holdings(driver: Driver) -> dict[str, list[int]]:
    """In the engine: the block hashes, as published, that each level of ours has now."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
    from vllm.v1.kv_offload.base import get_offload_block_hash

    hierarchy = manager_of(driver).hierarchy
    levels = {"host": list(dict(hierarchy.pool.keys()))}
    for level in hierarchy.levels:
        levels[level.name] = [key for key, _ in level.tier.evictable()]
    return {
        name: sorted(maybe_convert_block_hash(get_offload_block_hash(key)) for key in keys)
        for name, keys in levels.items()
    }
