"""Traffic that an engine process makes for itself: arrivals, aborts and resets at random."""

import random
import threading
import time
from itertools import islice
from typing import Any

from tests.engines.vllm.lab.driver import Driver
from undercroft.tiers.disk import upkeep

UNDER_WAY = (
    "requests", "filling", "draining", "fresh", "pins", "holders", "loaders", "stores",
    "restores", "waiting", "cascade", "fresh_entries",
)  # fmt: skip
"""What `census` shows as zero when nothing is under way."""


def core_of(driver: Driver) -> Any:
    """The engine core in this process."""
    return driver.llm.llm_engine.engine_core.engine_core


def manager_of(driver: Driver) -> Any:
    """Our manager, as vLLM's connector holds it."""
    return core_of(driver).scheduler.connector.connector_scheduler.manager


def storm(  # noqa: C901 - one loop, read from top to bottom
    driver: Driver,
    *,
    prompts: list[list[int]],
    order: list[int],
    seed: int,
    arrivals: float = 0.3,
    aborts: float = 0.0,
    resets: float = 0.0,
    wipes: float = 0.0,
    max_tokens: int = 4,
    most_running: int = 16,
    timeout_s: float = 120.0,
) -> list[dict[str, Any]]:
    """Send `prompts` in `order`, each step perhaps also aborting one or resetting caches.

    Args:
        arrivals: Chance per step that the next prompt arrives.
        aborts: Chance per step that some request is aborted.
        resets: Chance per step that the engine's own prefix cache is reset.
        wipes: Chance per step that the connector is reset too.

    Returns:
        What each request that was not aborted gave, with its `prompt` index.
    """
    dice = random.Random(seed)
    todo = list(order)
    running: dict[str, dict[str, Any]] = {}
    results: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    engine = driver.llm.llm_engine
    deadline = time.perf_counter() + timeout_s
    while todo or running:
        while todo and len(running) < most_running and dice.random() < arrivals:
            index = todo.pop(0)
            request = {"prompt": prompts[index], "max_tokens": max_tokens}
            results.append({"prompt": index})
            driver._add(len(results) - 1, request, running, results, 0)
        if running and dice.random() < aborts:
            victim = dice.choice(list(running))
            engine.abort_request([victim])
            del running[victim]
        if dice.random() < resets:
            _reset(driver, preempt=False, connector=False)
        if dice.random() < wipes:
            _reset(driver, preempt=dice.random() < 0.5, connector=True)
        outputs = engine.step()
        for output in outputs:
            if output.request_id not in running:
                continue
            index = running[output.request_id]["index"]
            driver._take(output, running, results, 0)
            if output.finished:
                answers.append(results[index])
        if not outputs:
            time.sleep(0.001)
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{len(running)} running, {len(todo)} not yet: {census(driver)}")
    return answers


def _reset(driver: Driver, *, preempt: bool, connector: bool) -> None:
    # While blocks wait for a load, an aborted request's too, vLLM 0.32 preempts first and refuses
    # then. And it asserts that a request it preempted so is not loading one step later: such a
    # request must not hit, so the connector is reset all the same. Whatever the backend.
    scheduler = core_of(driver).scheduler
    try:
        scheduler.reset_prefix_cache(preempt, connector)
    except RuntimeError as error:
        if "waiting for remote KV" not in str(error):
            raise
        scheduler.reset_connector_cache()


def census(driver: Driver) -> dict[str, Any]:
    """What is left in the adapter and the hierarchy; all zero when nothing is under way."""
    manager = manager_of(driver)
    hierarchy = manager.hierarchy
    slots = hierarchy.pool.slots
    states = [int(state) for state in slots.states]
    return {
        "is_off": bool(manager.is_off),
        "requests": len(manager._requests),
        "filling": states.count(1),
        "draining": states.count(2),
        "fresh": states.count(4),
        "ready": states.count(3),
        "pins": sum(slots.pins),
        "holders": len(hierarchy.holds.requests),
        "loaders": len(hierarchy.loads.requests),
        "stores": len(hierarchy.stores),
        "restores": len(hierarchy.restores),
        "waiting": hierarchy.restores.num_waiting,
        "cascade": len(hierarchy.cascade),
        "fresh_entries": len(hierarchy.fresh._entries),
        "pending": bool(manager.has_pending_work()),
        "table": len(list(hierarchy.pool.keys())),
        "busy": bool(core_of(driver).scheduler.has_requests()),
        "broken_invariants": hierarchy.counters.broken_invariants,
        "resets": hierarchy.counters.resets,
        "loaded": hierarchy.counters.loaded_chunks,
        "evicted": dict(hierarchy.counters.evicted_chunks),
        "promoted": dict(hierarchy.counters.promoted_chunks),
        "cascaded": dict(hierarchy.counters.cascaded_chunks),
        "dropped": {str(k): v for k, v in hierarchy.counters.dropped_chunks.items()},
        "declined": {str(k): v for k, v in hierarchy.counters.declined_chunks.items()},
        "misses": {str(k): v for k, v in hierarchy.counters.lookup_misses.items()},
    }


def idle(driver: Driver, *, seconds: float) -> dict[str, float]:
    """Be vLLM's busy loop without requests: step while there is work, else wait for some.

    Returns:
        `steps` made and `cpu_s`, what all threads of the process used in that time.
    """
    steps, cpu_s = 0, time.process_time()
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        if core_of(driver).scheduler.has_requests():
            driver.llm.llm_engine.step()
            steps += 1
            time.sleep(0.001)
        else:
            time.sleep(0.05)  # vLLM sleeps until a request comes
    return {"steps": steps, "cpu_s": time.process_time() - cpu_s}


class _Hang:
    """A system call that does not come back until told so."""

    def __init__(self, call: Any, gate: threading.Event) -> None:
        self._call = call
        self._gate = gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._gate.wait()
        return self._call(*args, **kwargs)


_GATES: list[threading.Event] = []


def hang_disk(driver: Driver, *, on: bool, epoch: bool = False) -> None:
    """While on, every system call of the disk tier hangs; that of its epoch file if told so."""
    if not on:
        for gate in _GATES:
            gate.set()
        _GATES.clear()
        return
    upkeep._EPOCH_WAIT_S = 0.05  # as it is: this is what it is for
    tier = manager_of(driver).hierarchy.levels[0].tier
    gate = threading.Event()
    _GATES.append(gate)
    for owner in (tier._files,):
        for name in (*HUNG_CALLS, *(["pread"] if epoch else [])):
            setattr(owner, name, _Hang(getattr(owner, name), gate))


class _Failure:
    """A system call that fails until told otherwise."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.num_calls = 0

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        self.num_calls += 1
        raise OSError(self.error, "injected")


def fail_disk(driver: Driver, *, error: int, calls: list[str]) -> int:
    """From now on these system calls of the disk tier fail so; the others work again.

    Returns:
        How many calls failed since the last time.
    """
    files = manager_of(driver).hierarchy.levels[0].tier._files
    failed = 0
    for name, call in list(vars(files).items()):
        if isinstance(call, _Failure):
            failed += call.num_calls
            delattr(files, name)
    for name in calls:
        setattr(files, name, _Failure(error))
    return failed


def begin(driver: Driver, *, prompts: list[list[int]], max_tokens: int, steps: int) -> int:
    """Send `prompts` and leave them running after so many steps; how many still run."""
    for index, tokens in enumerate(prompts):
        request = {"prompt": tokens, "max_tokens": max_tokens}
        driver._add(index, request, {}, [{} for _ in prompts], 0)
    for _ in range(steps):
        driver.llm.llm_engine.step()
    return int(driver.llm.llm_engine.get_num_unfinished_requests())


def reset_running(driver: Driver) -> None:
    """As a trainer does with new weights: forget the engine's own cache, compute all anew."""
    _reset(driver, preempt=True, connector=False)


def finish(driver: Driver, *, timeout_s: float = 60.0) -> int:
    """Run what `begin` left running to its end, whatever it answers; how many came to it."""
    deadline, finished = time.perf_counter() + timeout_s, 0
    while driver.llm.llm_engine.has_unfinished_requests():
        finished += sum(output.finished for output in driver.llm.llm_engine.step())
        if time.perf_counter() > deadline:
            raise TimeoutError(f"unfinished: {census(driver)}")
    return finished


def change_weights(driver: Driver) -> int:
    """Change what every token means, in the same way in every engine; how many tensors change."""

    def change(model: Any) -> int:
        # The matrices of the CPU's kernels are packed copies; this one is read as it is.
        changed = [
            p for name, p in model.named_parameters() if name.endswith("embed_tokens.weight")
        ]
        for weights in changed:
            weights.data.copy_(weights.data.roll(1, dims=1))
        return len(changed)

    (num_changed,) = driver.llm.apply_model(change)
    return int(num_changed)


HUNG_CALLS = (
    "open", "preadv", "pwrite", "pwritev", "fdatasync", "stat", "fstat", "list",
    "free_bytes", "allocate", "unlink", "lock", "rename", "sync_directory",
)  # fmt: skip


def watch_stores(driver: Driver) -> None:
    """From now on count the blocks that are stored for one request and belong to another."""
    scheduler = core_of(driver).scheduler
    connector = scheduler.connector.connector_scheduler
    build = connector._build_store_jobs
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers

    def watched(output: Any) -> Any:
        jobs = build(output)
        owners: dict[int, set[tuple[str, int]]] = {}
        for group, manager in enumerate(managers):
            for request_id, blocks in manager.req_to_blocks.items():
                for block in blocks:
                    owners.setdefault(block.block_id, set()).add((request_id, group))
        for job in jobs.values():
            block_ids = iter(job.src_spec.block_ids.tolist())
            for group, size in enumerate(job.src_spec.group_sizes):
                for block_id in islice(block_ids, size):
                    owned_by = owners.get(block_id)
                    driver.probe.counts["stored_blocks_seen"] += 1
                    if owned_by and (job.req_id, group) not in owned_by:
                        driver.probe.counts["stray_blocks_stored"] += 1
        return jobs

    connector._build_store_jobs = watched


def learned(driver: Driver) -> dict[str, int]:
    """Of the host's policy: requests it was told of, and the most uses of a prefix."""
    known = manager_of(driver).hierarchy.pool._policies[0].known
    return {"requests": known.serial, "most_sights": int(known._state.max()) >> 9}


def mover_process(driver: Driver, *, timeout_s: float = 60.0) -> dict[str, int | None]:
    """Of the first level's disk tier: the process, once it is ready, and how many died before."""
    mover = manager_of(driver).hierarchy.levels[0].tier._mover
    deadline_s = time.monotonic() + timeout_s
    while mover.pid is None and time.monotonic() < deadline_s:
        mover._find_child()
        time.sleep(0.01)
    return {"pid": mover.pid, "num_deaths": mover.num_deaths}
