"""Managers alone, ours and stock's, driven through the interface that both have."""

import contextlib
import hashlib
import time
from typing import Any

import numpy as np
from rig import running
from shapes import Group, engine_config, kv_cache_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNK = 4096
KEYS = [bytes([n]) * 32 + bytes(4) for n in range(8)]
HOST = {"host": "1MiB"}


def disk(path, **more):
    return {"tiers": [{"type": "disk", "path": str(path), "capacity": "64MiB", **more}]}


@contextlib.contextmanager
def manager(extra=HOST, **kwargs):
    """A manager whose worker has really copied what it stores."""
    with running(extra, **kwargs) as rig:
        yield rig.manager


def context(req_id="r", keys=KEYS, **more):
    made = ReqContext(req_id, **more)
    for index, key in enumerate(keys):
        made.set_offload_key_position(key, 16 * (index + 1))
    return made


def step(m, *new):
    m.on_schedule_end(ScheduleEndContext(new_req_ids=new, preempted_req_ids=()))


def store(m, keys=KEYS, req_id="s"):
    ctx = context(req_id)
    m.on_new_request(ctx)
    out = m.prepare_store(keys, ctx)
    m.complete_store(set(out.keys_to_store), ctx)
    m.on_request_finished(ctx)
    return out


def settle(m, condition=lambda: False, seconds=60.0):
    """Steps until nothing is under way."""
    end = time.monotonic() + seconds
    while m.has_pending_work() and not condition():
        step(m)
        m.get_stats()
        time.sleep(0.001)
        assert time.monotonic() < end, "not in time"


def walk(m, ctx, keys=KEYS, max_steps=2000):
    """The engine's walk over a full-attention group, step by step; None: no answer in time."""
    for number in range(max_steps):
        hits, pending = 0, False
        for key in keys:
            answer = m.lookup(key, ctx)
            if answer is LookupResult.MISS:
                break
            pending |= answer is not LookupResult.HIT
            hits += answer is not LookupResult.RETRY
        if not pending:
            return hits
        step(m)
        time.sleep(0.003 if number < 50 else 0.03)  # a busy machine runs the movers late
    return None


# --- bytes ------------------------------------------------------------------------------------

ONE_PAGE = (Group(num_layers=1),)


def keys_of(label: Any, count: int) -> list[bytes]:
    """Keys as vLLM packs them: SHA-256 of a label, and group 0."""
    return [hashlib.sha256(f"{label}-{i}".encode()).digest() + bytes(4) for i in range(count)]


def content(key: bytes, version: int = 0) -> bytes:
    """What the chunk of `key` must hold."""
    return (hashlib.sha256(key + bytes([version])).digest() * (CHUNK // 32))[:CHUNK]


@contextlib.contextmanager
def ours(
    path: Any,
    ram: int,
    capacity: str = "64MiB",
    *,
    mover_process: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Ours with `ram` chunks of host memory over a disk."""
    tier = {"type": "disk", "path": str(path), "capacity": capacity, "free_space_floor": 0}
    if mover_process is not None:
        tier["mover_process"] = mover_process
    extra = {"host": ram * CHUNK, "tiers": [tier], "max_queued_write_bytes": "16MiB"}
    with running(extra | kwargs.pop("extra", {}), groups=ONE_PAGE, **kwargs) as rig:
        yield rig.manager


@contextlib.contextmanager
def stock(path: Any, ram: int, **changes: Any) -> Any:
    """vLLM's own tiering manager with as much, over its `fs` tier."""
    extra = {
        "cpu_bytes_to_use": ram * CHUNK,
        "secondary_tiers": [{"type": "fs", "root_dir": str(path)}],
    }
    config = engine_config(extra, engine_id="stock", **changes)
    cache = kv_cache_config(ONE_PAGE, 64)
    made = TieringOffloadingSpec(build_offloading_config(config, cache)).get_manager()
    try:
        yield made
    finally:
        made.shutdown()


def views(m: Any, spec: Any) -> list[memoryview]:
    """The bytes of the slots that a store or load spec names."""
    if hasattr(spec, "offsets"):
        buffer = m.hierarchy._buffer
        return [buffer[at : at + CHUNK] for at in spec.offsets.tolist()]
    whole = np.asarray(m.primary_tier.get_kv_memoryview()).view(np.uint8)
    return [memoryview(whole[chunk]) for chunk in spec.block_ids]


def put(m: Any, keys: list[bytes], req_id: str = "put", version: int = 0) -> int:
    """Store `keys` with their bytes, and step until they are where they go; how many were."""
    ctx = context(req_id, keys)
    m.on_new_request(ctx)
    step(m, req_id)
    out = m.prepare_store(keys, ctx)
    if out is None:
        return 0
    for key, view in zip(out.keys_to_store, views(m, out.store_spec), strict=True):
        view[:CHUNK] = content(key, version)
    m.complete_store(set(out.keys_to_store), ctx)
    m.on_request_finished(ctx)
    settle(m)
    return len(out.keys_to_store)


def get(m: Any, keys: list[bytes], req_id: str = "get", **limits: Any) -> tuple[int | None, int]:
    """Walk `keys` and load the hits: how many, and how many of them hold the right bytes."""
    ctx = context(req_id, keys)
    m.on_new_request(ctx)
    hits = walk(m, ctx, keys, **limits)
    right = 0
    if hits:
        spec = m.prepare_load(keys[:hits], ctx)
        for key, view in zip(keys, views(m, spec), strict=False):
            right += bytes(view) == content(key)
        m.complete_load(set(keys[:hits]), ctx)
    m.on_request_finished(ctx)
    step(m)
    return hits, right
