"""The manager alone: no fault of ours reaches the engine, and a request gets what it asked for."""

import time

import pytest
from managers import HOST, KEYS, context, disk, manager, settle, step, store, walk
from rig import running
from shapes import Group, prompt
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadPolicy,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from undercroft.errors import Bug, TierUnavailable
from undercroft.hierarchy.hierarchy import Hierarchy

# --- faults -----------------------------------------------------------------------------------

ABSENT = b"absent".ljust(32) + bytes(4)
CALLS = {
    "on_new_request": (None, lambda m, c: m.on_new_request(c)),
    "on_request_finished": ("finish_request", lambda m, c: m.on_request_finished(c)),
    "lookup": ("lookup_elsewhere", lambda m, c: m.lookup(ABSENT, c)),
    "lookup, the first of a step": ("lookup", lambda m, c: (step(m), m.lookup(KEYS[0], c))[1]),
    "get_load_source": ("source_of", lambda m, c: m.get_load_source(KEYS[0], c)),
    "complete_load": ("complete_load", lambda m, c: m.complete_load(set(KEYS), c)),
    "prepare_store": ("prepare_store", lambda m, c: m.prepare_store(KEYS, c)),
    "complete_store": ("complete_store", lambda m, c: m.complete_store(set(KEYS), c)),
    "on_schedule_end": ("end_step", lambda m, c: step(m, "r")),
    "has_pending_work": ("has_pending_work", lambda m, c: m.has_pending_work()),
    "get_stats": ("step_ended", lambda m, c: m.get_stats()),
    "reset_cache": ("reset", lambda m, c: m.reset_cache()),
    "shutdown": ("close", lambda m, c: m.shutdown()),
}


def assert_off(m):
    """Everything answers as if there were no cache, and says that there is none."""
    ctx = context("after")
    assert m.is_off
    assert m.on_new_request(ctx).policy is OffloadPolicy.CHUNK_LEVEL
    assert [m.lookup(key, ctx) for key in KEYS] == [LookupResult.MISS] * len(KEYS)
    out = m.prepare_store(KEYS, ctx)
    assert (out.keys_to_store, len(out.store_spec.offsets)) == ([], 0)
    m.complete_store(set(KEYS), ctx)
    m.complete_load(set(KEYS), ctx)
    step(m)
    assert m.has_pending_work() is False
    assert list(m.take_events()) == []
    m.on_request_finished(ctx)
    m.reset_cache()


@pytest.mark.parametrize("name", [name for name, (verb, _) in CALLS.items() if verb])
@pytest.mark.parametrize("error", [Bug("broken"), TierUnavailable("gone"), KeyError("k")], ids=repr)
def test_a_fault_in_the_hierarchy_never_reaches_the_engine(name, error, monkeypatch):
    """The call answers safely, the cache is off from then on, and the counter says so."""
    verb, call = CALLS[name]

    def fail(*_args, **_kwargs):
        raise error

    with manager() as m:
        store(m)
        ctx = context()
        m.on_new_request(ctx)
        m.get_stats()
        with monkeypatch.context() as patch:
            patch.setattr(Hierarchy, verb, fail)
            answer = call(m, ctx)
            if name == "get_stats":
                seen = answer
            elif name == "shutdown":
                return  # closed; a fault while closing changes nothing any more
            else:
                seen = None
        seen = seen or m.get_stats()
        assert seen.data["data"]["vllm:undercroft_broken_invariants"] == {(): 1}
        assert seen.data["data"]["vllm:undercroft_is_on"] == {(): 0}
        if name.startswith("lookup"):
            assert answer is LookupResult.MISS
        if name == "get_load_source":
            assert answer is CacheHitSource.EXTERNAL_UNSPECIFIED
        assert_off(m)


def test_a_fault_while_counting_never_reaches_the_engine(monkeypatch):
    """A gauge that cannot be read switches the cache off; counters are still reported."""
    with manager() as m:
        store(m)
        monkeypatch.setattr(type(m.hierarchy.pool), "residency", lambda _: 1 / 0)
        stats = m.get_stats()
        assert stats.data["data"]["vllm:undercroft_stored_chunks"] == {(): len(KEYS)}
        assert stats.data["data"]["vllm:undercroft_is_on"] == {(): 0}
        assert_off(m)
        assert m.get_stats() is None or m.get_stats() is None


def test_a_fault_in_events_never_reaches_the_engine(monkeypatch):
    """As any other."""
    with manager(events=True) as m:
        store(m)
        monkeypatch.setattr(m.hierarchy.events, "take", lambda: 1 / 0)
        assert list(m.take_events()) == []
        assert_off(m)


def test_a_load_of_what_was_no_hit_stops_the_engine():
    """The one exception: the engine would read whatever slots it is given."""
    with manager() as m:
        ctx = context()
        m.on_new_request(ctx)
        with pytest.raises(Bug, match="was not a hit"):
            m.prepare_load(KEYS[:1], ctx)
        assert m.hierarchy.pool.slots.num_pinned == 0
        assert not m.is_off


def test_a_load_under_way_ends_although_the_cache_went_off(monkeypatch):
    """Hits of this step can be loaded, from slots that nobody is given any more."""
    with manager() as m:
        store(m)
        ctx = context()
        m.on_new_request(ctx)
        assert walk(m, ctx) == len(KEYS)
        monkeypatch.setattr(Hierarchy, "lookup", lambda *_: 1 / 0)
        m.lookup(KEYS[0], context("other"))
        assert m.is_off
        spec = m.prepare_load(KEYS, ctx)
        assert len(spec.offsets) == len(KEYS)
        m.complete_load(set(KEYS), ctx)


def test_a_reset_reaches_the_disk_although_the_cache_is_off(tmp_path, monkeypatch):
    """Weights may change while it is off; no later engine may find the old chunks."""
    extra = {**HOST, **disk(tmp_path)}
    with manager(extra, engine_id="one") as m:
        store(m)
        settle(m)
        monkeypatch.setattr(Hierarchy, "lookup", lambda *_: 1 / 0)
        m.lookup(KEYS[0], context("other"))
        assert m.is_off
        m.reset_cache()
        monkeypatch.undo()
    with manager(extra, engine_id="two") as m:
        assert walk(m, context()) == 0


def test_a_reset_that_fails_half_way_still_reaches_the_disk(tmp_path, monkeypatch):
    """Level 0's bookkeeping may be broken: the epoch is raised all the same."""
    extra = {**HOST, **disk(tmp_path)}
    with manager(extra, engine_id="one") as m:
        store(m)
        settle(m)
        monkeypatch.setattr(type(m.hierarchy.pool), "void", lambda *_: 1 / 0)
        m.reset_cache()
        assert_off(m)
        monkeypatch.undo()
    with manager(extra, engine_id="two") as m:
        assert walk(m, context()) == 0


def test_requests_that_lived_through_a_reset_store_nothing(tmp_path):
    """Their bytes may be from before, or, with sliding windows, another request's by now."""
    with manager() as m:
        running, waiting, loading = (context(name) for name in ("running", "waiting", "loading"))
        store(m)
        for ctx in (running, waiting, loading):
            m.on_new_request(ctx)
        assert walk(m, loading) == len(KEYS)
        m.prepare_load(KEYS, loading)
        step(m, "running")
        m.reset_cache()

        for ctx in (running, waiting, loading):
            assert m.prepare_store(KEYS, ctx).keys_to_store == []
        step(m, "waiting", "loading")
        assert m.prepare_store(KEYS, loading).keys_to_store == [], "it computes on old chunks"
        assert m.prepare_store(KEYS[:2], waiting).keys_to_store == KEYS[:2]

        m.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=("running",)))
        assert m.prepare_store(KEYS[2:4], running).keys_to_store == KEYS[2:4]
        m.on_request_finished(loading)
        assert m.prepare_store(KEYS[4:], context("loading")).keys_to_store == KEYS[4:]


def test_requests_that_lived_through_the_reset_of_another_engine_store_nothing(tmp_path):
    """As after a reset of one's own, from the step on in which it is noticed; a request that
    begins only in that step has nothing from before."""
    extra = {**HOST, **disk(tmp_path)}
    with manager(extra, engine_id="one") as m, manager(extra, engine_id="two") as other:
        running, waiting, loading, begins = map(
            context, ("running", "waiting", "loading", "begins")
        )
        store(m)
        settle(m)
        for ctx in (running, waiting, loading, begins):
            m.on_new_request(ctx)
        assert walk(m, loading) == len(KEYS)
        m.prepare_load(KEYS, loading)
        step(m, "running")
        other.reset_cache()
        time.sleep(0.05)

        step(m, "loading", "begins")
        for ctx in (running, waiting, loading):
            assert m.prepare_store(KEYS, ctx).keys_to_store == []
        assert m.prepare_store(KEYS[:2], begins).keys_to_store == KEYS[:2]
        step(m, "waiting")
        assert m.prepare_store(KEYS[2:4], waiting).keys_to_store == KEYS[2:4]
        m.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=("running",)))
        assert m.prepare_store(KEYS[4:6], running).keys_to_store == KEYS[4:6]
        assert m.prepare_store(KEYS[6:], loading).keys_to_store == []
        assert m.get_stats().data["data"]["vllm:undercroft_declined_chunks"]


def test_a_disk_that_is_gone_is_a_miss_and_not_a_fault(tmp_path):
    """The directory vanishes under a running engine: misses, and host memory goes on."""
    with manager({"host": "64KiB", **disk(tmp_path)}) as m:  # eight slots
        store(m)
        settle(m)
        (tmp_path / "undercroft-v1").rename(tmp_path / "elsewhere")
        (tmp_path / "undercroft-v1").write_text("in the way")
        for n in range(4):
            more = [bytes([100 + 8 * n + i]) * 32 + bytes(4) for i in range(8)]
            store(m, more, f"more{n}")
            step(m)
            m.get_stats()
        ctx = context("again")
        hits = walk(m, ctx)
        assert 0 <= hits <= len(KEYS)
        assert not m.is_off
        m.on_request_finished(ctx)


# --- lookups that hit, the short way ----------------------------------------------------------


def test_a_hit_is_pinned_while_its_request_waits(tmp_path):
    """However short its way was: nothing may evict it before the rest is there."""
    extra = {**HOST, **disk(tmp_path)}
    with manager(extra, engine_id="one") as m:
        store(m)
        settle(m)
    with manager(extra, engine_id="two") as m:
        store(m, KEYS[:4], "first")
        ctx = context()
        m.on_new_request(ctx)
        answers = [m.lookup(key, ctx) for key in KEYS]
        assert answers == [LookupResult.HIT] * 4 + [LookupResult.HIT_PENDING] * 4
        slots = m.hierarchy.pool.slots
        assert slots.num_pinned == 0
        step(m)
        assert slots.num_pinned >= 4
        assert all(slots.pins[m.hierarchy.pool.find(key)] for key in KEYS[:4])
        assert walk(m, ctx) == len(KEYS)
        m.on_request_finished(ctx)
        settle(m)
        assert slots.num_pinned == 0


def test_every_lookup_is_counted_by_its_answer():
    """Hits once the step has ended; each time that a key is asked for."""
    with manager() as m:
        store(m)
        ctx = context()
        m.on_new_request(ctx)
        for key in [*KEYS, *KEYS, ABSENT]:
            m.lookup(key, ctx)
        step(m)
        m.lookup(KEYS[0], ctx)
        step(m)
        counters = m.hierarchy.counters
        assert (counters.lookup_hits, counters.lookup_misses) == (
            2 * len(KEYS) + 1,
            {("none", "absent"): 1},
        )


def test_a_filter_holds_for_every_lookup():
    """Also for a request's second in a step, and whoever asked before."""
    with manager() as m:
        store(m)
        plain, picky = context("plain"), context("picky", load_tier_filter=TierFilter(()))
        for _ in range(2):
            for ctx, answer in ((plain, LookupResult.HIT), (picky, LookupResult.MISS)):
                m.on_new_request(ctx)
                assert [m.lookup(key, ctx) for key in KEYS[:2]] == [answer] * 2
            step(m)


@pytest.mark.parametrize("by", ["fault", "reset", "other fault"])
def test_hits_end_in_the_middle_of_a_step(by, monkeypatch):
    """With the cache off, and after a reset, what was a hit is a miss."""
    with manager() as m:
        store(m)
        ctx = context()
        m.on_new_request(ctx)
        assert m.lookup(KEYS[0], ctx) is LookupResult.HIT
        if by == "fault":
            m.switch_off(Bug("broken"))
        elif by == "reset":
            m.reset_cache()
        else:
            monkeypatch.setattr(m, "_states", None)
            assert m.lookup(KEYS[0], ctx) is LookupResult.MISS
            assert m.is_off
        assert m.lookup(KEYS[0], ctx) is LookupResult.MISS
        step(m)
        assert m.lookup(KEYS[0], ctx) is LookupResult.MISS


def test_a_request_that_ended_leaves_no_trace_of_its_lookups():
    """Another of the same name starts anew."""
    with manager() as m:
        store(m)
        for _ in range(2):
            ctx = context()
            m.on_new_request(ctx)
            assert m.lookup(KEYS[0], ctx) is LookupResult.HIT
            m.on_request_finished(ctx)
        assert not m._asking
        step(m)
        assert m.hierarchy.pool.slots.num_pinned == 0
        assert not m.hierarchy._asking


# --- tiers a request may load from ------------------------------------------------------------

LOCAL_DISK = TierMatcher(Medium.STORAGE, Locality.LOCAL)
FILTERS = {
    "all": (TierFilter.ALL, True, True),
    "nothing": (TierFilter(()), False, False),
    "host": (TierFilter((TierMatcher(Medium.CPU),)), True, False),
    "storage": (TierFilter((TierMatcher(Medium.STORAGE),)), False, True),
    "local": (TierFilter((TierMatcher(None, Locality.LOCAL),)), True, True),
    "remote": (TierFilter((TierMatcher(None, Locality.REMOTE),)), False, False),
    "remote storage": (TierFilter((TierMatcher(Medium.STORAGE, Locality.REMOTE),)), False, False),
    "local disk": (TierFilter((LOCAL_DISK,)), False, True),
    "either": (TierFilter((TierMatcher(Medium.CPU), LOCAL_DISK)), True, True),
    "an equal of all": (TierFilter((TierMatcher(),)), True, True),
}


@pytest.mark.parametrize("name", FILTERS)
def test_load_tier_filter(name, tmp_path):
    """Chunks in host memory only, and on disk only, are hits for whom they may be."""
    chosen, from_host, from_disk = FILTERS[name]
    extra = {**HOST, **disk(tmp_path)}
    with manager(extra, engine_id="one") as m:
        store(m, KEYS[:4])
        settle(m)
    with manager(HOST, engine_id="two") as m:
        store(m)
        assert walk(m, context(load_tier_filter=chosen)) == (len(KEYS) if from_host else 0)
    with manager(extra, engine_id="three") as m:
        ctx = context(load_tier_filter=chosen)
        assert walk(m, ctx, KEYS[:4]) == (4 if from_disk else 0)
        assert m.hierarchy.counters.promoted_chunks["disk"] == (4 if from_disk else 0)


def test_load_tier_filter_and_a_tier_said_to_be_remote(tmp_path):
    """A tier's `locality` decides whether a request for local chunks may use it."""
    extra = {**HOST, **disk(tmp_path, locality="REMOTE")}
    with manager(extra, engine_id="one") as m:
        store(m)
        settle(m)
    with manager(extra, engine_id="two") as m:
        local = TierFilter((TierMatcher(None, Locality.LOCAL),))
        remote = TierFilter((TierMatcher(None, Locality.REMOTE),))
        assert walk(m, context("l", load_tier_filter=local)) == 0
        assert walk(m, context("r", load_tier_filter=remote)) == len(KEYS)


def test_load_tier_filter_through_the_connector():
    """As users write it, in `kv_transfer_params`."""
    with running(HOST) as rig:
        rig.run(prompt(1, 160))
        assert rig.run(prompt(1, 160), kv_load_tiers=[{"medium": "STORAGE"}]).num_hit_tokens == 0
        assert rig.run(prompt(1, 160), kv_load_tiers=[]).num_hit_tokens == 0
        assert rig.run(prompt(1, 160), kv_load_tiers=[{"medium": "cpu"}]).num_hit_tokens == 160


def test_load_sources(tmp_path):
    """DISK for what was read for this request, HOST for what was here."""
    extra = {**HOST, **disk(tmp_path)}
    with manager(extra, engine_id="one") as m:
        store(m, KEYS[:4])
        settle(m)
    with manager(extra, engine_id="two") as m:
        ctx = context("a")
        assert walk(m, ctx, KEYS[:4]) == 4
        sources = [m.get_load_source(key, ctx) for key in KEYS[:4]]
        assert sources == [CacheHitSource.DISK] * 4
        m.prepare_load(KEYS[:4], ctx)
        m.complete_load(set(KEYS[:4]), ctx)
        m.on_request_finished(ctx)
        other = context("b")
        assert walk(m, other, KEYS[:4]) == 4
        assert m.get_load_source(KEYS[0], other) is CacheHitSource.HOST


# --- admission of level 0 ---------------------------------------------------------------------


def test_store_threshold_counts_offers_as_in_stock_vllm():
    """A chunk is stored when it is offered the Nth time; compared with stock's own manager."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    stock = CPUOffloadingManager(num_chunks=128, store_threshold=3)
    offers = [KEYS[:4], KEYS[:6], KEYS[2:], KEYS, KEYS[:1], KEYS]
    with manager({"cpu_bytes_to_use": 1 << 20, "store_threshold": 3}) as m:
        for number, offer in enumerate(offers):
            theirs, mine = (context(f"{who}{number}") for who in ("stock", "ours"))
            for each, ctx in ((stock, theirs), (m, mine)):
                each.on_new_request(ctx)
            expected = stock.prepare_store(offer, theirs).keys_to_store
            stock.complete_store(expected, theirs)
            out = m.prepare_store(offer, mine)
            assert out.keys_to_store == expected, f"offer {number}"
            assert len(out.store_spec.offsets) == len(expected)
            m.complete_store(set(out.keys_to_store), mine)
            m.on_request_finished(mine)
        declined = m.hierarchy.counters.declined_chunks["host", "not_admitted"]
        assert declined == stock.stores_skipped_in_current_batch > 0


def test_store_threshold_end_to_end():
    """The second request of a prompt stores it, the third one hits."""
    with running({"cpu_bytes_to_use": 4 << 20, "store_threshold": 2}) as rig:
        hits = [rig.run(prompt(1, 160)).num_hit_tokens for _ in range(3)]
        assert hits == [0, 0, 160]


def test_groups_of_different_ids_get_their_own_counts():
    """`group_chunks` counts by the engine's ids, in its order, whatever they are."""
    groups = (Group(kept=False), Group(), Group(kept=False), Group())
    with manager(groups=groups) as m:
        keys = [bytes([n]) * 32 + (1 if n < 2 else 3).to_bytes(4, "big") for n in range(5)]
        ctx = context(keys=keys)
        out = m.prepare_store(keys, ctx)
        assert out.store_spec.group_chunks == (2, 3)


def test_a_tiers_admission_counts_requests(tmp_path):
    """With 2 sights a prompt goes to disk when a second request uses it, not before."""
    twice = {"type": "frequency", "sights": 2}
    with running({"host": "4MiB", **disk(tmp_path, admission=twice)}) as rig:
        counters = rig.hierarchy.counters
        rig.run(prompt(1, 160))
        assert counters.cascaded_chunks["disk"] == 0
        assert counters.declined_chunks["disk", "not_admitted"] == 10
        rig.run(prompt(1, 160))
        assert counters.cascaded_chunks["disk"] == 10
