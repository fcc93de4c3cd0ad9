"""Never zero without a word: one warning for each cause, and none where nothing is wrong."""

import contextlib
import logging

import pytest
from managers import CHUNK, context, keys_of, step
from rig import running
from shapes import Group, prompt

from undercroft.clock import SystemClock
from undercroft.engines.vllm.connector import UndercroftConnector
from undercroft.testing.clock import ManualClock

ROOMY = {"host": "2MiB"}
FULL, WINDOW = Group(), Group(window=64)


@contextlib.contextmanager
def checked(extra=ROOMY, **kwargs):
    """A rig whose self-check has a clock of its own."""
    with running(extra, **kwargs) as rig:
        clock = ManualClock()
        rig.manager.check.clock = clock
        yield rig, clock


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "nothing was served" in record.getMessage()
    ]


def results(rig):
    return dict(rig.hierarchy.counters.requests)


def spread(rig, clock, prompts, seconds=10.0, **kwargs):
    """One prompt after another, so many seconds apart, and a step of an engine at work later."""
    for tokens in prompts:
        rig.run(tokens, **kwargs)
        clock.advance(seconds)
    rig.step()


# --- silence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,)])
def test_prompts_that_are_new_are_no_fault(groups, caplog):
    """Minutes of prompts that share nothing, evictions included: counted, and not a word."""
    with checked({"host": "256KiB"}, groups=groups) as (rig, clock):
        spread(rig, clock, [prompt(n, 100) for n in range(1, 40)], 15.0)
        assert rig.hierarchy.counters.evicted_chunks["host"] > 0
        assert results(rig) == {"new": 39}
        assert warnings(caplog) == []


def test_a_warm_up_is_no_fault(caplog):
    """First prompts, then the same again: served, and not a word, however slowly."""
    with checked(groups=(FULL, WINDOW)) as (rig, clock):
        spread(rig, clock, [prompt(n, 100) for n in (1, 2, 3, 1, 2, 3)], 40.0)
        assert results(rig) == {"new": 3, "served": 3}
        assert warnings(caplog) == []


def test_trouble_that_passes_within_a_minute_is_no_fault(caplog):
    """Requests that miss what is gone, and then one that is served."""
    with checked({"host": "128KiB"}) as (rig, clock):
        spread(rig, clock, [prompt(n % 6, 160) for n in range(12)], 4.0)
        assert results(rig) == {"new": 6, "gone": 6}
        spread(rig, clock, [prompt(5, 160)] * 3, 80.0)
        assert results(rig)["served"] == 3
        spread(rig, clock, [prompt(9, 100)])
        assert warnings(caplog) == []


@pytest.mark.parametrize("method", ["_begin", "_missed", "_cause"])
def test_its_own_fault_ends_it_and_costs_nothing_else(method, caplog, monkeypatch):
    """One line; the cache stays on, and serves."""

    def fails(*_args):
        raise RuntimeError("a fault of the self-check")

    with checked({"host": "128KiB"}) as (rig, clock):
        monkeypatch.setattr(rig.manager.check, method, fails)
        spread(rig, clock, [prompt(n % 6, 160) for n in range(1, 30)], 10.0)
        assert rig.manager.check.is_over
        assert not rig.manager.is_off
        spread(rig, clock, [prompt(80, 100)] * 2)
        assert rig.hierarchy.counters.hit_chunks["host"] > 0
        lines = [each for each in caplog.records if each.name.endswith("self_check")]
        assert ["fault in the self-check" in line.getMessage() for line in lines] == [True]


def test_a_prompt_it_cannot_read_ends_it_and_costs_nothing_else(caplog):
    """A request as a later engine may have it."""
    with checked(connector=UndercroftConnector) as (rig, _):
        rig.manager.prompt_came(object())
        rig.manager.prompt_came(object())
        assert rig.manager.check.is_over
        assert not rig.manager.is_off
        assert caplog.text.count("fault in the self-check") == 1


# --- a group that makes a miss of everything ------------------------------------------------


def test_a_group_that_zeroes_every_request_is_named(caplog):
    """A window is stored at the ends of prompts; those that only share a beginning never hit."""
    with checked(groups=(FULL, WINDOW)) as (rig, clock):
        rig.run(prompt(1, 320))
        lost = [key for key in rig.host_keys() if key[-4:] == bytes([0, 0, 0, 1])]
        for key in lost:  # as if they had been stored elsewhere
            rig.hierarchy.pool.void(key, rig.hierarchy.pool.find(key))
        for n in range(8):
            tail = prompt(50 + n, 64)
            job = rig.run(prompt(1, 320)[:160] + tail)
            void_window(rig, job)
            clock.advance(10)
        rig.run(prompt(77, 64))
        (said,) = warnings(caplog)
        assert "group 1 (chunks of 16 tokens" in said
        assert "made a miss of all" in said
        assert results(rig)["group"] >= 5
        spread(rig, clock, [prompt(1, 320)[:160] + prompt(90, 64)] * 3, 60.0)
        assert len(warnings(caplog)) == 1
        warned = rig.hierarchy.counters.self_check_warnings
        assert dict(warned) == {"group": 1}


def void_window(rig, job):
    pool = rig.hierarchy.pool
    for key, slot in list(pool.keys()):
        if key[-4:] == bytes([0, 0, 0, 1]):
            pool.void(key, slot)


def test_chunks_that_are_never_whole_are_named(caplog):
    """Blocks of a window are freed while a prompt is computed: half a chunk is not stored."""
    with checked(groups=(FULL, WINDOW)) as (rig, clock):
        check = rig.manager.check
        failed = rig.hierarchy.counters.dropped_chunks
        for n in range(8):
            rig.run(prompt(1, 160) + prompt(60 + n, 32))
            void_window(rig, None)
            failed["host", "copy_failed"] += 4
            clock.advance(10)
        check.look()
        (said,) = warnings(caplog)
        assert "group 1" in said
        assert "none of its chunks stays" in said
        assert "chunks were not whole" in said
        assert "blocks_per_chunk" in said


# --- one level too small, too slow, down, or closed ---------------------------------------


def test_a_host_too_small_is_named_with_what_would_do(caplog):
    """All is evicted before it comes again: how much was stored in between is said."""
    with checked({"host": "128KiB"}) as (rig, clock):
        spread(rig, clock, [prompt(n % 6, 160) for n in range(1, 30)], 10.0)
        (said,) = warnings(caplog)
        assert "requests began as an earlier one whose chunks are gone" in said
        assert "host memory holds 128 KiB" in said
        assert "Raise host, or add a disk tier" in said
        distance = 6 * 10 * 2 * 4096  # the prompt itself has to fit too
        assert f"{distance // 1024} KiB" in said


def fill_by_hand(m, clock, label, req_id):
    """A request that is computed and stored, and one step."""
    keys = keys_of(label, 4)
    ctx = context(req_id, keys)
    m.on_new_request(ctx)
    m.lookup(keys[0], ctx)
    step(m, req_id)
    out = m.prepare_store(keys, ctx)
    m.complete_store(set(out.keys_to_store), ctx)
    m.on_request_finished(ctx)
    clock.advance(10)
    return out


def test_a_host_that_declines_everything_is_named(caplog):
    """All of it is pinned by loads that do not end: nothing is stored."""
    with checked({"host": 8 * CHUNK}, groups=(Group(num_layers=1),)) as (rig, clock):
        m = rig.manager
        for label in "ab":
            fill_by_hand(m, clock, label, label)
            ctx = context(f"hold-{label}", keys_of(label, 4))
            m.on_new_request(ctx)
            for key in keys_of(label, 4):
                m.lookup(key, ctx)
            m.prepare_load(keys_of(label, 4), ctx)
            step(m)
        for n in range(12):
            assert fill_by_hand(m, clock, f"n{n}", f"n{n}").keys_to_store == []
        step(m)
        (said,) = warnings(caplog)
        assert "nothing is stored: host memory declined" in said


def break_copies(rig):
    """From now on the worker copies nothing out of the engine; gives what undoes it."""
    worker = rig.on_worker.connector_worker.worker._worker
    good = worker._store_steps
    worker._store_steps = lambda *args: iter([1 / 0])
    return lambda: setattr(worker, "_store_steps", good)


def test_copies_that_all_fail_are_named(caplog):
    """Prompts that never come again: nothing but the copies themselves says that all is in vain."""
    with checked() as (rig, clock):
        break_copies(rig)
        spread(rig, clock, [prompt(n, 100) for n in range(1, 12)])
        assert results(rig) == {"new": 11}
        (said,) = warnings(caplog)
        assert "nothing is stored: " in said
        assert "chunks were not whole or not copied by the workers" in said
        assert dict(rig.hierarchy.counters.self_check_warnings) == {"copy_failed": 1}


def test_copies_that_fail_for_a_while_are_no_fault(caplog):
    """Half a minute of failures, and then all is stored again."""
    with checked() as (rig, clock):
        heal = break_copies(rig)
        spread(rig, clock, [prompt(n, 100) for n in range(1, 7)], 5.0)
        heal()
        spread(rig, clock, [prompt(n, 100) for n in range(10, 30)])
        assert rig.hierarchy.counters.dropped_chunks["host", "copy_failed"] > 16
        assert warnings(caplog) == []


def test_an_admission_that_keeps_out_what_comes_again_is_named(caplog):
    """Prompts that recur are declined again and again; prompts that do not recur are no fault."""
    admission = {"type": "frequency", "sights": 50}
    with checked({"host": "1MiB", "admission": admission}) as (rig, clock):
        spread(rig, clock, [prompt(n, 100) for n in range(100, 120)])
        assert warnings(caplog) == []
        spread(rig, clock, [prompt(1, 100)] * 12)
        (said,) = warnings(caplog)
        assert "not_admitted" in said
        assert "relax the admission" in said


def test_a_disk_that_is_left_alone_is_named(caplog, tmp_path):
    """What is asked for is on disk only, and the disk is not asked."""
    extra = {
        "host": "128KiB",
        "tiers": [{"type": "disk", "path": str(tmp_path), "capacity": "64MiB"}],
        "max_queued_write_bytes": "1MiB",
    }
    with checked(extra) as (rig, clock):
        for n in (1, 2, 3):
            rig.run(prompt(n, 160))
            rig.await_movers()
            rig.step()
        (level,) = rig.hierarchy.levels
        breaker, now_s = level.transfers.breaker, SystemClock().now_s()
        for _ in range(5):  # and it is not tried again while this lasts
            breaker.on_failure(breaker.admit(now_s), now_s + 1e6)
        assert not level.usable
        spread(rig, clock, [prompt(n % 3 + 1, 160) for n in range(12)])
        (said,) = warnings(caplog)
        assert "only a level has which is left alone after failures" in said


def test_lookups_that_all_run_out_of_time_are_named(caplog):
    """Each waits for a chunk that does not come, then runs without it."""
    with checked({"host": 64 * CHUNK}, groups=(Group(num_layers=1),)) as (rig, clock):
        m = rig.manager
        m.hierarchy.counters.lookup_misses["disk", "deadline"] = 8
        m.hierarchy.counters.lookup_misses["host", "deadline"] = 8
        for n in range(8):
            keys = keys_of(f"k{n}", 4)
            ctx = context(f"k{n}", keys)
            m.on_new_request(ctx)
            m.lookup(keys[0], ctx)
            m._requests[f"k{n}"].denied.add(keys[0])
            step(m, f"k{n}")
            m.on_request_finished(ctx)
            clock.advance(10)
        step(m)
        (said,) = warnings(caplog)
        assert "waited for chunks below, and got none in time" in said
        assert "promote_deadline_s" in said


# --- prompts ----------------------------------------------------------------------------------


def salted(rig, clock, salts, seconds=5.0):
    """One system prompt, with one salt after another."""
    for salt in salts:
        request = rig.submit(prompt(1, 100)).request
        request.cache_salt = f"salt {salt}"
        rig.manager.prompt_came(request)
        clock.advance(seconds)
        rig.manager.check.look()


def test_a_salt_for_each_request_is_named(caplog):
    """The same prompt again and again, each with a salt of its own."""
    with checked(connector=UndercroftConnector) as (rig, clock):
        salted(rig, clock, range(110))
        (said,) = warnings(caplog)
        assert "cache_salt" in said
        assert "or take no notice if each was a tenant's first" in said


def test_tenants_that_start_on_one_system_prompt_are_no_fault(caplog):
    """Minutes in which each request is a tenant's first; then they come again."""
    with checked(connector=UndercroftConnector) as (rig, clock):
        salted(rig, clock, range(90))
        assert warnings(caplog) == []
        salted(rig, clock, [3, *range(90, 300)])
        assert warnings(caplog) == []


def test_a_salt_for_each_tenant_is_no_fault(caplog):
    """Tenants share nothing, and each comes again."""
    with checked(connector=UndercroftConnector) as (rig, clock):
        salted(rig, clock, [n % 10 for n in range(60)])
        assert warnings(caplog) == []


def test_prompts_shorter_than_a_chunk_are_named(caplog):
    """With eight blocks in a chunk, none is ever filled. Greetings alone are no fault."""
    chunky = {**ROOMY, "blocks_per_chunk": 8}
    with checked(chunky, connector=UndercroftConnector) as (rig, clock):
        spread(rig, clock, [prompt(n, 20) for n in range(1, 30)], 5.0)
        assert warnings(caplog) == []
        spread(rig, clock, [prompt(n, 100) for n in range(1, 30)], 5.0)
        (said,) = warnings(caplog)
        assert "shorter than one chunk (128 tokens; the longest had 100)" in said
