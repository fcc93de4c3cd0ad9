"""The spec, its manager and its worker inside the real connector, both of its roles."""

import time

import pytest
from rig import running
from shapes import TOKENS_PER_BLOCK, Group, prompt
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from undercroft.errors import KvError

SMALL = {"host": "4MiB"}
HYBRID = (Group(kept=False), Group(), Group(kept=False), Group(num_layers=1, window=64))


def disk(path, **more):
    return {"tiers": [{"type": "disk", "path": str(path), "capacity": "64MiB", **more}]}


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)


# --- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [159, 160, 161, 192])
def test_round_trip(blocks_per_chunk, num_tokens):
    """What was stored comes back byte for byte, in whole chunks, whatever the prompt's length."""
    extra = {**SMALL, "blocks_per_chunk": blocks_per_chunk}
    with running(extra) as rig:
        first = rig.run(prompt(1, num_tokens))
        assert first.num_hit_tokens == 0
        again = rig.run(prompt(1, num_tokens))
        per_chunk = blocks_per_chunk * TOKENS_PER_BLOCK
        assert again.num_hit_tokens == num_tokens // per_chunk * per_chunk
        assert rig.num_loads_checked == 1
        other = rig.run(prompt(2, num_tokens))
        assert other.num_hit_tokens == 0


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
def test_round_trip_of_two_groups_whose_ids_are_1_and_3(blocks_per_chunk):
    """Full attention and a window, with groups between them that are not kept at all."""
    extra = {**SMALL, "blocks_per_chunk": blocks_per_chunk}
    with running(extra, groups=HYBRID) as rig:
        rig.run(prompt(1, 512))
        stored = {key[-4:] for key in rig.host_keys()}
        assert stored == {bytes([0, 0, 0, 1]), bytes([0, 0, 0, 3])}
        for num_tokens in (512, 513, 520):
            job = rig.run([*prompt(1, 512), *prompt(9, num_tokens - 512)])
            assert job.num_hit_tokens is not None
            if num_tokens > 512:
                assert job.num_hit_tokens == 512
        assert rig.num_loads_checked >= 2


def test_a_window_group_larger_than_its_neighbour():
    """Chunks of two sizes share the bytes of host memory, and each comes back right."""
    groups = (Group(num_layers=1), Group(num_layers=3, head_size=64, window=96))
    with running({**SMALL, "blocks_per_chunk": 2}, groups=groups) as rig:
        assert len(rig.hierarchy.pool.slots.slot_bytes) == 2
        for label in range(6):
            rig.run(prompt(label, 320))
        for label in range(6):
            assert rig.run([*prompt(label, 320), 1]).num_hit_tokens == 320
        assert rig.num_loads_checked == 6


def test_round_trip_through_the_disk_of_an_engine_that_is_gone(tmp_path):
    """A second engine finds on disk what the first stored, and says where it came from."""
    extra = {**SMALL, **disk(tmp_path), "blocks_per_chunk": 2}
    with running(extra, groups=HYBRID, engine_id="one") as rig:
        rig.run(prompt(1, 512))
    with running(extra, groups=HYBRID, engine_id="two") as rig:
        job = rig.submit([*prompt(1, 512), 5])
        sources = {}
        ask = rig.on_scheduler.get_external_cache_hit_sources
        while not rig.num_loads_checked:
            rig.step()
            if job.loading and not sources:
                sources = ask(job.request, job.num_hit_tokens)
            assert len(rig.metas) < 400
        assert job.num_hit_tokens == 512
        assert set(sources) == {CacheHitSource.DISK}
        assert sum(sources.values()) == 512
        rig.settle()
        again = rig.submit([*prompt(1, 512), 6])
        rig.step()
        assert set(ask(again.request, again.num_hit_tokens)) == {CacheHitSource.HOST}


def test_a_chunked_prefill_and_decoding():
    """Chunks stored step by step, decoded ones included when asked, are one prefix."""
    extra = {**SMALL, "offload_prompt_only": False}
    with running(extra, tokens_per_step=40) as rig:
        job = rig.run(prompt(1, 150), num_decode=40)
        tokens = list(job.request.all_token_ids)
        again = rig.run([*tokens, 1, 2])
        assert again.num_hit_tokens == (len(tokens) - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    with running(SMALL, tokens_per_step=40) as rig:
        job = rig.run(prompt(1, 150), num_decode=40)
        again = rig.run([*job.request.all_token_ids, 1])
        assert again.num_hit_tokens == 144, "prompts only by default, as in stock vLLM"


def test_max_load_tokens_ends_a_load_within_a_chunk():
    """The engine may want only a part of the last chunk."""
    with running({**SMALL, "blocks_per_chunk": 4}) as rig:
        rig.run(prompt(1, 256))
        job = rig.run(prompt(1, 256), max_load_tokens=100)
        assert job.num_hit_tokens == 64
        assert rig.num_loads_checked == 1


# --- stores -----------------------------------------------------------------------------------


def test_stores_are_an_aligned_subset_of_the_offer_in_its_order():
    """`keys_to_store` keeps the offer's order, and the spec names one slot for each of them."""
    offers = []
    with running({"host": "160KiB"}, groups=(Group(), Group(num_layers=1))) as rig:
        real = rig.manager.prepare_store

        def watch(keys, context):
            keys = list(keys)
            out = real(keys, context)
            offers.append((keys, out))
            return out

        rig.manager.prepare_store = watch
        for label in range(4):
            rig.run(prompt(label, 320))
        for keys, out in offers:
            kept = set(out.keys_to_store)
            assert out.keys_to_store == [key for key in keys if key in kept]
            spec = out.store_spec
            assert len(spec.offsets) == len(out.keys_to_store) == sum(spec.group_chunks)
            assert len(set(spec.offsets.tolist())) == len(spec.offsets)
            groups = [key[-1] for key in out.keys_to_store]
            assert spec.group_chunks == (groups.count(0), groups.count(1))
            assert groups == sorted(groups)
        assert any(0 < len(out.keys_to_store) < len(keys) for keys, out in offers), "always fits"
        # What is left out is the end of the prefix, the same in both groups.
        keys, out = next(o for o in offers if 0 < len(o[1].keys_to_store) < len(o[0]))
        for group in (0, 1):
            mine = [key for key in keys if key[-1] == group]
            kept = [key for key in mine if key in set(out.keys_to_store)]
            assert kept == mine[: len(kept)]
        assert not [r for r in offers if r[1] is None], (
            "None makes the engine offer again each step"
        )


def test_a_prefix_larger_than_host_memory_keeps_its_root():
    """What does not fit is left out; what fits comes back right."""
    with running({"host": "80KiB"}) as rig:  # ten chunks
        rig.run(prompt(1, 20 * TOKENS_PER_BLOCK))
        job = rig.run(prompt(1, 20 * TOKENS_PER_BLOCK))
        assert job.num_hit_tokens == 10 * TOKENS_PER_BLOCK
        assert rig.num_loads_checked == 1


def test_blocks_that_are_reused_at_once_are_flushed_first():
    """A freed block handed out again is stored before it is overwritten."""
    with running({"host": "8MiB"}, num_blocks=25) as rig:
        for label in range(12):
            rig.submit(prompt(label, 320))
        rig.settle()
        assert any(meta.jobs_to_flush for meta in rig.metas), "no flush: the rig does not press"
        hits = [rig.run(prompt(label, 320)).num_hit_tokens for label in range(12)]
        assert hits == [320] * 12
        assert rig.num_loads_checked == 12


def test_completions_after_the_request_has_finished():
    """Acks that come steps later still make the chunks readable, and nothing is kept for ever."""
    with running(SMALL) as rig:
        rig.hold_acks = True
        job = rig.submit(prompt(1, 160))
        for _ in range(6):
            rig.step()
        assert job.request.status == RequestStatus.FINISHED_STOPPED
        assert not rig.manager._requests
        rig.hold_acks = False
        rig.settle()
        assert rig.run(prompt(1, 160)).num_hit_tokens == 160
        assert not rig.manager._requests
        assert rig.hierarchy.pool.slots.num_pinned == 0


def test_requests_that_were_never_tracked():
    """`on_new_request` and `on_request_finished` back to back leave nothing behind."""
    with running(SMALL) as rig:
        for label in range(3):
            job = rig.submit(prompt(label, 64))
            rig.on_scheduler.connector_scheduler._req_status.pop(job.request.request_id)
            rig.abort(job)
        rig.settle()
        assert not rig.manager._requests
        assert rig.run(prompt(1, 160)).num_hit_tokens == 0


# --- loads and aborts -------------------------------------------------------------------------


def test_abort_while_loading():
    """The load ends, its pins go, and the next request finds everything."""
    with running(SMALL) as rig:
        rig.run(prompt(1, 320))
        job = rig.submit(prompt(1, 320))
        rig.hold_acks = True
        rig.step()
        assert job.loading
        assert rig.hierarchy.pool.slots.num_pinned == 20
        rig.abort(job)
        rig.step()
        rig.hold_acks = False
        rig.settle()
        assert rig.hierarchy.pool.slots.num_pinned == 0
        assert not rig.manager._requests
        assert rig.run(prompt(1, 320)).num_hit_tokens == 320


def test_abort_at_every_step_of_a_restore(tmp_path):
    """Queued, restoring, loading, computing: the engine lives and no pin stays."""
    extra = {**SMALL, **disk(tmp_path)}
    with running(extra, engine_id="one") as rig:
        rig.run(prompt(1, 320))
    for num_steps in range(7):
        with running(extra, engine_id=f"two-{num_steps}") as rig:
            job = rig.submit([*prompt(1, 320), 1])
            for _ in range(num_steps):
                rig.step()
            if not job.request.is_finished():
                rig.abort(job)
            rig.settle()
            assert rig.hierarchy.pool.slots.num_pinned == 0
            assert not rig.manager._requests
            assert rig.run([*prompt(1, 320), 2]).num_hit_tokens == 320


def test_a_shared_prefix_asked_for_by_several_requests(tmp_path):
    """All are answered in full, and each chunk is read from disk once."""
    extra = {**SMALL, **disk(tmp_path)}
    with running(extra, engine_id="one") as rig:
        rig.run(prompt(1, 320))
    with running(extra, engine_id="two", num_blocks=200) as rig:
        jobs = [rig.submit([*prompt(1, 320), label]) for label in range(5)]
        rig.settle()
        assert [job.num_hit_tokens for job in jobs] == [320] * 5
        assert rig.num_loads_checked == 5
        assert rig.hierarchy.counters.promoted_chunks["disk"] == 20


def test_load_failure_of_the_worker_is_never_silent():
    """A load that cannot be copied stops the worker: the engine must not compute on its blocks."""
    with running(SMALL) as rig:
        rig.run(prompt(1, 64))
        worker = rig.on_worker.connector_worker.worker._worker
        worker._load_with = lambda *args: iter([1 / 0])
        rig.submit(prompt(1, 64))
        with pytest.raises(KvError, match="could not be copied"):
            rig.settle()


def test_a_store_that_fails_in_the_worker_is_a_miss():
    """The engine hears that the store is done; nobody ever hits its chunks."""
    with running(SMALL) as rig:
        worker = rig.on_worker.connector_worker.worker._worker
        good = worker._store_steps
        worker._store_steps = lambda *args: iter([1 / 0])
        rig.run(prompt(1, 160))
        worker._store_steps = good
        assert rig.hierarchy.counters.dropped_chunks["host", "copy_failed"] == 10
        assert rig.run(prompt(1, 160)).num_hit_tokens == 0
        assert rig.run(prompt(1, 160)).num_hit_tokens == 160
        assert rig.num_loads_checked == 1


# --- reset ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 30])
def test_reset_with_jobs_in_flight(tmp_path, num_steps):
    """After a reset: no old hit from any level, and what is stored from then on is right."""
    extra = {**SMALL, **disk(tmp_path)}
    with running(extra, num_blocks=200) as rig:
        rig.run(prompt(1, 320))
        rig.settle()
        rig.hold_acks = num_steps < 30
        old = [rig.submit(prompt(label, 320)) for label in (1, 2, 3)]
        for _ in range(num_steps):
            rig.step()
        assert rig.on_scheduler.reset_cache()
        rig.version = 1  # as after an update of the weights: same keys, other bytes
        for job in old:
            if not job.request.is_finished():
                rig.abort(job)
        rig.hold_acks = False
        new = rig.run(prompt(1, 320))
        assert new.num_hit_tokens == 0
        checked = rig.num_loads_checked
        assert rig.run(prompt(1, 320)).num_hit_tokens == 320
        assert rig.num_loads_checked == checked + 1
        rig.settle()
        assert rig.hierarchy.pool.slots.num_pinned == 0
        assert not rig.manager._requests


def test_reset_is_durable_and_reaches_other_replicas(tmp_path):
    """An engine that shares the directory, and one started later, find nothing old."""
    extra = {**SMALL, **disk(tmp_path)}
    with running(extra, engine_id="one") as one, running(extra, engine_id="two") as two:
        one.run(prompt(1, 320))
        wait_until(lambda: two.run([*prompt(1, 320), time.monotonic_ns()]).num_hit_tokens == 320)
        one.on_scheduler.reset_cache()
        one.version = two.version = 1
        time.sleep(0.15)
        two.step()
        assert two.run([*prompt(1, 320), 8]).num_hit_tokens == 0
    with running(extra, engine_id="three", version=1) as rig:
        # Only what engine two computed after the reset may be there; the rig compares its bytes.
        rig.run([*prompt(1, 320), 9])
        assert rig.num_loads_checked <= 1


def test_a_lookup_that_nobody_follows_up_does_not_hold_its_chunks():
    """A HIT needs no load to follow: with the request gone, everything can be evicted again."""
    with running({"host": "160KiB"}) as rig:  # twenty chunks
        rig.run(prompt(1, 320))
        job = rig.submit(prompt(1, 320))
        hit, _ = rig.on_scheduler.get_num_new_matched_tokens(job.request, 0)
        assert hit == 320
        rig.abort(job)
        rig.settle()
        assert rig.hierarchy.pool.slots.num_pinned == 0
        rig.run(prompt(2, 320))
        assert rig.run(prompt(2, 320)).num_hit_tokens == 320


def test_hits_stay_readable_within_their_step(tmp_path):
    """Between HIT and `prepare_load` of one step nothing evicts the chunk."""
    with running({"host": "160KiB", **disk(tmp_path)}) as rig:
        rig.run(prompt(1, 320))
        job = rig.submit(prompt(1, 320))
        status = rig.on_scheduler.connector_scheduler._req_status[job.request.request_id]
        hit, _ = rig.on_scheduler.get_num_new_matched_tokens(job.request, 0)
        assert hit == 320
        (group,) = status.group_states
        other = rig.submit(prompt(2, 320))
        out = rig.manager.prepare_store(
            [bytes([n]) * 32 + bytes(4) for n in range(20)],
            rig.on_scheduler.connector_scheduler._req_status[other.request.request_id].req_context,
        )
        assert not out.keys_to_store
        for key in group.offload_keys:
            assert rig.manager.lookup(key, status.req_context) is LookupResult.HIT
        rig.manager.prepare_load(group.offload_keys, status.req_context)
        rig.manager.complete_load(set(group.offload_keys), status.req_context)


def test_the_rig_notices_a_wrong_byte():
    """Negative control: one flipped byte in host memory fails a round trip."""
    with running(SMALL) as rig:
        rig.run(prompt(1, 320))
        slot = rig.hierarchy.pool.find(rig.host_keys()[0])
        rig.hierarchy.view(slot)[7] ^= 1
        with pytest.raises(AssertionError, match="wrong bytes in g0"):
            rig.run(prompt(1, 320))
