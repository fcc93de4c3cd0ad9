"""Loads that fail in the worker, seen from both sides of `UndercroftConnector`."""

import pytest
from managers import disk
from rig import running
from shapes import TOKENS_PER_BLOCK, Group, prompt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.engines.vllm.lab.failing import FailingCopies
from undercroft.engines.vllm import UndercroftConnector
from undercroft.errors import KvError

SMALL = {"host": "4MiB"}
NUM_CHUNKS = 10
TOKENS = NUM_CHUNKS * TOKENS_PER_BLOCK


def connected(extra=SMALL, **more):
    return running(extra, connector=UndercroftConnector, **more)


@pytest.fixture
def failing():
    """Makes the copies of a rig fail, until the end of the test."""
    made = []

    def make(rig):
        made.append(FailingCopies(rig.on_worker.connector_worker.worker._worker._engine))
        return made[0]

    yield make
    for copies in made:
        copies.stop()


def offset_of(rig, job, index, group=0):
    """Where the chunk of a job's block `index` is in the region."""
    key = bytes(job.request.block_hashes[index]) + group.to_bytes(4, "big")
    slot = rig.hierarchy.pool.find(key)
    return rig.hierarchy.pool.slots.offset(slot) if slot >= 0 else None


def clean(rig):
    """Nothing is pinned or under way any more, and every slot is accounted for."""
    rig.settle()
    slots = rig.hierarchy.pool.slots
    held = set(rig.hierarchy.fresh.kept_slots())
    assert slots.num_pinned == len(held)
    assert len(rig.free) == 255


@pytest.mark.parametrize("bad", [0, 4, NUM_CHUNKS - 1])
def test_a_chunk_that_cannot_be_loaded_is_dropped_and_computed(failing, bad):
    """What comes before it is loaded all the same; it and what follows are computed."""
    with connected() as rig:
        first = rig.run(prompt(1, TOKENS))
        copies = failing(rig)
        copies.slots.add(offset_of(rig, first, bad))
        again = rig.run(prompt(1, TOKENS))
        assert (again.num_failed, again.num_hit_tokens) == (1, bad * TOKENS_PER_BLOCK)
        assert copies.num_failures == 2
        assert rig.hierarchy.counters.dropped_chunks["host", "load_failed"] == 1
        assert rig.num_loads_checked == (1 if bad else 0)
        clean(rig)


def test_a_dropped_chunk_comes_back_from_the_disk(failing, tmp_path):
    """The disk's copy was verified: it is brought up into another slot."""
    with connected({**SMALL, **disk(tmp_path)}) as rig:
        first = rig.run(prompt(1, TOKENS))
        rig.settle()
        copies = failing(rig)
        copies.slots.add(offset_of(rig, first, 4))
        copies.heals_after = 2
        again = rig.run(prompt(1, TOKENS))
        assert (again.num_failed, again.num_hit_tokens) == (1, TOKENS)
        assert rig.hierarchy.counters.promoted_chunks.total() == 1
        assert rig.num_loads_checked == 1
        clean(rig)


def test_a_slot_that_stays_bad_costs_no_more_than_its_chunk(failing, tmp_path):
    """The disk's copy comes into the same slot and fails, too; the prefix before it is loaded."""
    with connected({**SMALL, **disk(tmp_path)}) as rig:
        first = rig.run(prompt(1, TOKENS))
        rig.settle()
        failing(rig).slots.add(offset_of(rig, first, 4))
        again = rig.run(prompt(1, TOKENS))
        assert (again.num_failed, again.num_hit_tokens) == (2, 4 * TOKENS_PER_BLOCK)
        clean(rig)


def test_a_dropped_chunk_is_stored_again(failing):
    """The next request that computes it stores it, and from then on it is a hit."""
    with connected() as rig:
        first = rig.run(prompt(1, TOKENS))
        copies = failing(rig)
        copies.slots.add(offset_of(rig, first, 4))
        rig.run(prompt(1, TOKENS))
        copies.slots.clear()
        assert rig.run(prompt(1, TOKENS)).num_hit_tokens == TOKENS
        clean(rig)


def test_a_request_gives_up_loading_when_every_copy_fails(failing, tmp_path):
    """Tried from host memory, then from the disk; then it is computed."""
    with connected({**SMALL, **disk(tmp_path)}) as rig:
        rig.run(prompt(1, TOKENS))
        rig.settle()
        failing(rig).everything = True
        again = rig.run(prompt(1, TOKENS))
        assert (again.num_failed, again.num_hit_tokens) == (2, 0)
        assert rig.hierarchy.counters.dropped_chunks["host", "load_failed"] == 2 * NUM_CHUNKS
        assert rig.on_scheduler._num_failed_loads == {}
        clean(rig)


def test_the_windowed_group_of_a_hybrid_model(failing):
    """A request is one unit over its groups: it starts anew, and finds what all groups have."""
    groups = (Group(), Group(num_layers=1, window=64))
    with connected(groups=groups, num_blocks=512) as rig:
        first = rig.run(prompt(1, 512))
        in_window = offset_of(rig, first, 31, group=1)
        failing(rig).slots.add(in_window)
        again = rig.run([*prompt(1, 512), 7])
        assert again.num_failed == 1
        assert again.num_hit_tokens in range(512)
        rig.settle()
        assert rig.hierarchy.counters.dropped_chunks["host", "load_failed"] == 1


def test_a_request_that_is_gone_when_its_load_fails(failing):
    """Its blocks are freed, its chunk is dropped, nobody waits."""
    with connected() as rig:
        first = rig.run(prompt(1, TOKENS))
        failing(rig).slots.add(offset_of(rig, first, 4))
        rig.hold_acks = True
        gone = rig.submit(prompt(1, TOKENS))
        rig.step()
        assert gone.loading
        rig.abort(gone)
        rig.hold_acks = False
        clean(rig)
        assert offset_of(rig, first, 4) is None
        assert rig.run(prompt(1, TOKENS)).num_hit_tokens == 4 * TOKENS_PER_BLOCK


def test_a_chunk_that_its_storer_still_counts_on(failing):
    """The request that stored it runs on; its books forget the chunk, and the slot is free."""
    with connected(tokens_per_step=TOKENS) as rig:
        storer = rig.submit(prompt(1, TOKENS), num_decode=40)
        for _ in range(6):
            rig.step()
        failing(rig).slots.add(offset_of(rig, storer, 4))
        reader = rig.submit(prompt(1, TOKENS))
        for label in range(2, 40):
            rig.submit(prompt(label, TOKENS))
        rig.settle()
        assert reader.num_failed == 1
        assert not rig.manager.is_off
        assert rig.run(prompt(39, TOKENS)).num_hit_tokens == TOKENS


def test_a_failed_load_after_a_reset(failing):
    """Its chunks are not there any more; the request is computed anew."""
    with connected() as rig:
        first = rig.run(prompt(1, TOKENS))
        failing(rig).slots.add(offset_of(rig, first, 4))
        rig.hold_acks = True
        job = rig.submit(prompt(1, TOKENS))
        rig.step()
        assert rig.on_scheduler.reset_cache()
        rig.hold_acks = False
        rig.settle()
        assert (job.num_failed, job.num_hit_tokens) == (1, 0)
        assert rig.hierarchy.counters.dropped_chunks["host", "load_failed"] == 0
        clean(rig)


class Forgetful(UndercroftConnector):
    """As a runner would be that only asks which requests are finished."""

    def get_transfer_results(self, finished_req_ids):
        return KVConnectorTransferResults(*self.get_finished(finished_req_ids))


def test_an_engine_that_does_not_ask_is_stopped(failing):
    """Nothing is computed on blocks that failed because nobody asked."""
    with running(SMALL, connector=Forgetful) as rig:
        assert rig.run(prompt(1, TOKENS)).num_hit_tokens == 0
        assert rig.run(prompt(1, TOKENS)).num_hit_tokens == TOKENS
        failing(rig).everything = True
        with pytest.raises(KvError, match="does not ask which did"):
            rig.run(prompt(1, TOKENS))


def test_the_plain_spec_still_stops_the_engine(failing):
    """Without the connector nobody would hear of a failed load."""
    with running(SMALL) as rig:
        rig.run(prompt(1, TOKENS))
        failing(rig).everything = True
        with pytest.raises(KvError, match="cannot be told that a load failed"):
            rig.run(prompt(1, TOKENS))
