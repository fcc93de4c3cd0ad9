"""Faults that people met with offloaded KV caches, as recipes; ours beside stock vLLM 0.32.

Chunks are 4096 bytes, "RAM n" is host memory for n of them. A recipe that stock vLLM passes too
would prove nothing, so where it is cheap stock runs first and must fail as it is known to.
Not here: b02 and b21 with a real engine (a smaller b21 is), b20 (object stores are not served yet).
"""

import os
import random
import stat
import time

import pytest
from between import between
from managers import CHUNK, ONE_PAGE, content, context, get, keys_of, ours, put, settle, stock, walk
from rig import running
from shapes import prompt

from undercroft.errors import TierUnavailable
from undercroft.tiers.disk.usage import Wanted

A = keys_of("a", 64)
FOUR = A[:4]


def files(path, pattern="*"):
    return sorted(p for p in path.rglob(pattern) if p.is_file())


def du(path):
    return sum(p.stat().st_blocks * 512 for p in path.rglob("*"))


def place_of(path, key):
    """The slab that holds the chunk of `key`, and where in it the payload begins."""
    for slab in files(path, "*.slab"):
        at = slab.read_bytes().find(content(key))
        if at >= 0:
            return slab, at
    raise AssertionError("not on disk")


def overwrite(path, at, data):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


# --- hangs ------------------------------------------------------------------------------------


def test_b01_stock_never_answers(tmp_path):
    """The recipe bites: stock is asked in vain, and reads the disk again and again."""
    with stock(tmp_path, 28) as m:
        assert put(m, A[:20]) == 20
    with stock(tmp_path, 16) as m:
        assert get(m, A[:20], max_steps=60) == (None, 0)


@pytest.mark.parametrize(("num_chunks", "ram"), [(20, 16), (64, 60), (64, 16)])
def test_b01_a_prefix_larger_than_host_memory(num_chunks, ram, tmp_path):
    """As many hits as fit, soon, and no more reads than hits."""
    with ours(tmp_path, 80, engine_id="one") as m:
        assert put(m, A[:num_chunks]) == num_chunks
    with ours(tmp_path, ram, engine_id="two") as m:
        hits, right = get(m, A[:num_chunks], max_steps=100)
        assert hits == right == ram
        assert m.hierarchy.counters.promoted_chunks["disk"] == ram
        assert m.hierarchy.pool.slots.num_pinned == 0


# --- identity ---------------------------------------------------------------------------------


def test_b03_a_weight_update_leaves_nothing(tmp_path):
    """After `reset_cache` no level has anything; stock's disk still has all of it."""
    with stock(tmp_path / "stock", 16) as m:
        put(m, FOUR)
        m.reset_cache()
        assert get(m, FOUR) == (4, 4), "stock has learned to reset its disk: rethink this recipe"
    with ours(tmp_path, 16, engine_id="one") as m:
        put(m, FOUR)
        m.reset_cache()
        assert get(m, FOUR) == (0, 0)
        assert put(m, FOUR, version=1) == 4
    with ours(tmp_path, 16, engine_id="two") as m:
        hits, right = get(m, FOUR)
        assert (hits, right) == (4, 0), "only what was stored after the reset, of version 1"


# --- bad bytes --------------------------------------------------------------------------------


def test_b07_b08_same_length_wrong_bytes_and_the_repair(tmp_path):
    """One hit, then a miss, counted; stored again, it is good again. Stock serves the damage."""
    path = tmp_path / "stock"
    with stock(path, 16) as m:
        put(m, FOUR)
    bad = next(f for f in files(path, "*") if f.read_bytes() == content(FOUR[1]))
    overwrite(bad, 100, b"sixteen bad byte")
    with stock(path, 16) as m:
        assert get(m, FOUR) == (4, 3)
    with stock(path, 16) as m:
        put(m, FOUR)
    with stock(path, 16) as m:
        assert get(m, FOUR) == (4, 3), "stock never repairs a file that is there"

    path = tmp_path / "ours"
    with ours(path, 16, engine_id="one") as m:
        put(m, FOUR)
    slab, at = place_of(path, FOUR[1])
    overwrite(slab, at + 100, b"sixteen bad byte")
    with ours(path, 16, engine_id="two", events=True) as m:
        assert get(m, FOUR) == (1, 1)
        assert m.hierarchy.counters.dropped_chunks["disk", "corrupt"] == 1
        gone = [key for e in m.take_events() if e.removed for key in e.keys]
        assert gone == [FOUR[1]]
        assert get(m, FOUR, "again") == (1, 1)
        assert m.hierarchy.counters.dropped_chunks["disk", "corrupt"] == 1, "read again"
        put(m, FOUR)
    with ours(path, 16, engine_id="three") as m:
        assert get(m, FOUR) == (4, 4)


@pytest.mark.parametrize("part", ["first byte", "last byte", "header", "key"])
def test_b07_any_flipped_bit_is_a_miss(part, tmp_path):
    """Header, key, payload: wherever it is."""
    with ours(tmp_path, 16, engine_id="one") as m:
        put(m, FOUR)
    slab, at = place_of(tmp_path, FOUR[1])
    block = slab.read_bytes()[at - CHUNK : at]
    where = {"first byte": at, "last byte": at + CHUNK - 1, "header": at - CHUNK + 2}
    where["key"] = at - CHUNK + block.index(FOUR[1][:16])
    overwrite(slab, where[part], bytes([slab.read_bytes()[where[part]] ^ 1]))
    with ours(tmp_path, 16, engine_id="two") as m:
        assert get(m, FOUR) == (1, 1)


def test_b07_two_chunks_that_changed_places_are_misses(tmp_path):
    """Each chunk carries its own key: another request's bytes are never served."""
    with ours(tmp_path, 16, engine_id="one") as m:
        put(m, FOUR)
    slab, a = place_of(tmp_path, FOUR[1])
    _, b = place_of(tmp_path, FOUR[2])
    whole = slab.read_bytes()
    records = [whole[at - CHUNK : at + CHUNK] for at in (a, b)]
    overwrite(slab, a - CHUNK, records[1])
    overwrite(slab, b - CHUNK, records[0])
    with ours(tmp_path, 16, engine_id="two") as m:
        assert get(m, FOUR) == (1, 1)
        assert get(m, FOUR[2:], "rest")[0] == 0
        assert get(m, FOUR[3:], "last") == (1, 1)


def test_b09_a_longer_file(tmp_path):
    """Bytes that nobody wrote are never served, behind a slab's end as anywhere."""
    with ours(tmp_path, 16, engine_id="one") as m:
        put(m, FOUR)
    (slab,) = files(tmp_path, "*.slab")
    with slab.open("ab") as file:
        file.write(content(FOUR[2]))
    with ours(tmp_path, 16, engine_id="two") as m:
        hits, right = get(m, FOUR)
        assert hits == right
        assert not m.is_off


def test_b10_a_truncated_file(tmp_path):
    """What is cut off is a miss, and said to be gone; the next store makes it good."""
    with ours(tmp_path, 16, engine_id="one") as m:
        for num_chunks in range(1, len(FOUR) + 1):  # one by one: threads choose the order on disk
            put(m, FOUR[:num_chunks])
    with ours(tmp_path, 16, engine_id="two", events=True) as m:
        slab, at = place_of(tmp_path, FOUR[1])
        os.truncate(slab, at + CHUNK // 2)
        hits, right = get(m, FOUR)
        # One, or none where the tier noticed the short file by itself and gave it up as a whole.
        assert hits == right <= 1
        if hits:
            assert FOUR[1] in [key for e in m.take_events() if e.removed for key in e.keys]
        put(m, FOUR)
        assert not m.is_off
    with ours(tmp_path, 16, engine_id="three") as m:
        hits, right = get(m, FOUR)
        assert hits == right


def test_b11_a_deleted_file(tmp_path):
    """Deleted while nobody runs: misses; the engine that comes next stores anew."""
    with ours(tmp_path, 16, engine_id="one") as m:
        put(m, FOUR)
    for slab in files(tmp_path, "*.slab"):
        slab.unlink()
    with ours(tmp_path, 16, engine_id="two") as m:
        assert get(m, FOUR) == (0, 0)
        assert put(m, FOUR) == 4
    with ours(tmp_path, 16, engine_id="three") as m:
        assert get(m, FOUR) == (4, 4)


@pytest.mark.parametrize("by_process", [False, True])
def test_b12_one_chunk_that_cannot_be_written(tmp_path, by_process):
    """It alone is missing: 1 1 0 1 1 1 1 1."""

    def refused(_go):
        raise TierUnavailable("no such path", tier="disk")

    def choose(verb, key):
        return refused if verb == "write_from" and key == A[2] else None

    more = {"engine_id": "one", "mover_process": by_process}
    with between(choose), ours(tmp_path, 16, **more) as m:
        tier = m.hierarchy.levels[0].tier
        assert tier.inner.await_mover(60) == by_process
        put(m, A[:8])
        stored = [int(tier.has(key)) for key in A[:8]]
        assert stored == [1, 1, 0, 1, 1, 1, 1, 1]
        assert m.hierarchy.counters.dropped_chunks["disk", "unavailable"] >= 1


# --- bounds -----------------------------------------------------------------------------------


def test_b13_the_disk_is_bounded_and_says_what_left(tmp_path):
    """200 chunks through RAM 16: never more than the capacity, an event for each deletion."""
    capacity = 512 << 10
    with ours(tmp_path, 16, f"{capacity >> 10}KiB", events=True) as m:
        keys, most = keys_of("many", 200), 0
        for at in range(0, 200, 8):
            put(m, keys[at : at + 8], f"r{at}")
            most = max(most, du(tmp_path))
        assert most <= capacity
        level = m.hierarchy.levels[0]
        held = set()
        for event in m.take_events():
            if event.medium.value == "STORAGE":
                (held.difference_update if event.removed else held.update)(event.keys)
        assert held == {key for key, _ in level.tier.evictable()}
        assert 8 <= len(held) < 100
        assert m.hierarchy.counters.evicted_chunks["disk"] > 100
        assert level.tier.used_bytes() <= capacity
    with ours(tmp_path, 16, f"{capacity >> 10}KiB", engine_id="later") as m:
        put(m, keys_of("more", 16))
        assert du(tmp_path) <= capacity, "what earlier runs left counts"


def test_b14_orphans_of_a_crash_are_removed(tmp_path):
    """Half-written temporary files go at the next start, and are no data."""
    with ours(tmp_path, 16, engine_id="one") as m:
        put(m, FOUR)
    folder = files(tmp_path, "*.slab")[0].parent
    orphans = [folder / "seg-0123456789abcdef.index.tmp", folder / "manifest.json.tmp"]
    for orphan in orphans:
        orphan.write_bytes(b"x" * 5000)
        os.utime(orphan, (1, 1))
    with ours(tmp_path, 16, engine_id="two") as m:
        assert get(m, FOUR) == (4, 4)
        put(m, A[4:8])
        settle(m)
    assert not [orphan for orphan in orphans if orphan.exists()]


def test_b17_residency_and_pins_are_two_numbers(tmp_path):
    """Every slot holds data: stock's gauge says 0.0, ours 1.0, and 0 pins."""
    with stock(tmp_path / "stock", 16) as m:
        put(m, A[:16])
        gauges = m.get_stats().data["data"]
        assert gauges["vllm:kv_offload_cpu_cache_usage_perc"] == {(): 0.0}
    with running({"host": 16 * CHUNK}, groups=ONE_PAGE) as rig:
        assert put(rig.manager, A[:16]) == 16
        from undercroft.clock import SystemClock
        from undercroft.engines.vllm.metrics import StepStats
        from undercroft.engines.vllm.tally import Pace

        gauges = StepStats(rig.hierarchy, Pace(SystemClock())).take().data["data"]
        assert gauges["vllm:undercroft_residency_ratio"] == {("host",): 1.0}
        assert gauges["vllm:undercroft_pinned_chunks"] == {("host",): 0}


def test_b18_nobody_else_can_read_it(tmp_path):
    """0600 and 0700 under any umask; stock's files are open to all."""

    def modes(path):
        found = [(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in path.rglob("*")]
        return {m for is_dir, m in found if is_dir}, {m for is_dir, m in found if not is_dir}

    before = os.umask(0o022)
    try:
        with stock(tmp_path / "stock", 16) as m:
            put(m, FOUR)
        assert modes(tmp_path / "stock") == ({0o755}, {0o644})
        os.umask(0)
        with ours(tmp_path / "ours", 16) as m:
            put(m, FOUR)
            assert modes(tmp_path / "ours") == ({0o700}, {0o600})
    finally:
        os.umask(before)


@pytest.mark.parametrize("chunk_kib", [4, 64, 1024, 16384])
def test_b19_ten_million_chunks_make_few_directory_entries(chunk_kib):
    """By the arithmetic of segments: at most 4096 entries in any directory."""
    record = (chunk_kib << 10) + 4096
    capacity = 10_000_000 * record
    slots = Wanted(capacity, num_replicas=1).target_slots(record)
    assert 2 * -(-10_000_000 // slots) + 10 <= 4096


def test_b19_a_real_folder_stays_small(tmp_path):
    """A thousand chunks are a handful of files."""
    with ours(tmp_path, 1100) as m:
        put(m, keys_of("flat", 1000))
        assert m.hierarchy.levels[0].tier.has(keys_of("flat", 1000)[-1])
    most = max(len(list(p.iterdir())) for p in tmp_path.rglob("*") if p.is_dir())
    assert most <= 100


# --- everything at once -----------------------------------------------------------------------


@pytest.mark.parametrize("by_process", [False, True])
def test_b21_reads_that_fail_and_hang_and_lie(tmp_path, seed, by_process):
    """Of many restores some fail, some are late, some find flipped bits: every byte is right."""
    rng = random.Random(seed)
    extra = {
        "host": "320KiB",
        "max_queued_write_bytes": "4MiB",
        "promote_deadline_s": 0.4,
        "tiers": [{"type": "disk", "path": str(tmp_path), "capacity": "32MiB"}],
    }
    extra["tiers"][0]["mover_process"] = by_process
    faults = {"error": 0, "late": 0, "flip": 0}

    def fail(_go):
        raise TierUnavailable("injected", tier="disk")

    def late(go):
        time.sleep(0.8)
        return go()

    def choose(verb, _key):
        roll = rng.random() if verb == "read_into" else 1.0
        if roll < 0.03:
            faults["error"] += 1
            return fail
        if roll < 0.05 and faults["late"] < 4:
            faults["late"] += 1
            return late
        return None

    with between(choose), running(extra) as rig:
        assert rig.hierarchy.levels[0].tier.inner.await_mover(60) == by_process
        for _ in range(60):
            label, length = rng.randrange(8), rng.randrange(100, 500)
            rig.run([*prompt(label, length), rng.randrange(1000)])
            if rng.random() < 0.3:
                for slab in files(tmp_path, "*.slab")[:1]:
                    at = rng.randrange(slab.stat().st_size)
                    overwrite(slab, at, bytes([rng.randrange(256)]))
                    faults["flip"] += 1
        rig.settle()
        assert min(faults.values()) > 0
        assert rig.num_loads_checked > 20
        assert rig.hierarchy.counters.promoted_chunks["disk"] > 50
        assert not rig.manager.is_off
        assert rig.hierarchy.pool.slots.num_pinned == 0


@pytest.mark.parametrize("by_process", [False, True])
def test_fault_5_a_lookup_after_a_failed_load_is_answered(tmp_path, by_process):
    """One failed read, and the same request goes on within a few steps: no retry for ever."""
    with ours(tmp_path, 16, engine_id="one") as m:
        put(m, FOUR)

    def choose(verb, _key):
        return (lambda _go: False) if verb == "read_into" else None

    more = {"engine_id": "two", "mover_process": by_process}
    with between(choose), ours(tmp_path, 16, **more) as m:
        assert m.hierarchy.levels[0].tier.inner.await_mover(60) == by_process
        assert walk(m, context("r", FOUR), FOUR, max_steps=100) == 0
