"""Requests that queue behind others: their chunks come up meanwhile."""

import logging

import pytest
from managers import disk
from rig import running
from shapes import TOKENS_PER_BLOCK, Group, prompt

from undercroft.engines.vllm import UndercroftConnector

TOKENS = 160
NUM_CHUNKS = TOKENS // TOKENS_PER_BLOCK
HYBRID = (Group(), Group(num_layers=1, window=64))


def extra(path, **more):
    return {"host": "4MiB", **disk(path), **more}


def primed(path, labels, num_tokens=TOKENS, connector=UndercroftConnector, **more):
    """A disk that holds these prompts, written by an engine that is gone."""
    with running(extra(path), engine_id="primer", connector=connector, **more) as rig:
        for label in labels:
            rig.run(prompt(label, num_tokens))
        rig.settle()


def wait_for_reads(rig, steps=200):
    for _ in range(steps):
        rig.await_movers()
        rig.step()
        if not len(rig.hierarchy.restores):
            return


@pytest.mark.parametrize("groups", [(Group(),), HYBRID])
def test_chunks_of_a_queued_request_are_read_before_its_turn(tmp_path, groups):
    """Its first lookup finds everything in host memory, and what is loaded is right."""
    primed(tmp_path, [1], groups=groups)
    # Room for one request at a time: the second queues behind the first.
    blocks = 24 if len(groups) == 1 else 50
    with running(
        extra(tmp_path), groups=groups, connector=UndercroftConnector, num_blocks=blocks
    ) as rig:
        long = rig.submit(prompt(9, 256), num_decode=60)
        rig.step()
        queued = rig.submit([*prompt(1, TOKENS), 5])
        rig.step()
        assert len(rig.hierarchy.restores) > 0
        wait_for_reads(rig)
        num_promoted = rig.hierarchy.counters.promoted_chunks.total()
        assert num_promoted >= NUM_CHUNKS
        assert queued.num_asked == 0
        keys = [bytes(h) + bytes(4) for h in queued.request.block_hashes]
        slots = [rig.hierarchy.pool.find(key) for key in keys]
        assert all(slot >= 0 and not rig.hierarchy.pool.slots.pins[slot] for slot in slots)
        assert long in rig.running
        rig.settle()
        assert (queued.num_asked, queued.num_hit_tokens) == (1, TOKENS)
        assert rig.hierarchy.counters.promoted_chunks.total() == num_promoted
        assert rig.num_loads_checked == 1


def test_the_plain_connector_reads_at_the_first_lookup_only(tmp_path):
    """The control: without ours nothing is read while a request queues."""
    primed(tmp_path, [1], connector=None)
    with running(extra(tmp_path), num_blocks=24) as rig:
        rig.submit(prompt(9, 256), num_decode=60)
        rig.step()
        queued = rig.submit([*prompt(1, TOKENS), 5])
        for _ in range(20):
            rig.step()
        assert rig.hierarchy.counters.promoted_chunks.total() == 0
        rig.settle()
        assert queued.num_asked > 1
        assert queued.num_hit_tokens == TOKENS


def test_only_the_head_of_the_queue_is_looked_at(tmp_path):
    """However long the queue: four of it, in the step after they came."""
    primed(tmp_path, range(1, 9))
    with running(extra(tmp_path), connector=UndercroftConnector, num_blocks=24) as rig:
        rig.submit(prompt(9, 256), num_decode=100)
        rig.step()
        queued = [rig.submit([*prompt(label, TOKENS), 5]) for label in range(1, 9)]
        rig.step()
        assert NUM_CHUNKS < len(rig.hierarchy.restores) <= 4 * NUM_CHUNKS
        for _ in range(30):
            rig.await_movers()
            rig.step()
        assert rig.hierarchy.counters.promoted_chunks.total() == 4 * NUM_CHUNKS
        for job in queued[:6]:
            rig.abort(job)
        for _ in range(30):
            rig.await_movers()
            rig.step()
        assert rig.hierarchy.counters.promoted_chunks.total() == 6 * NUM_CHUNKS
        rig.settle(2000)
        assert rig.on_scheduler._queued == {}
        assert rig.on_scheduler._looked_ahead == set()


def test_reading_ahead_takes_half_of_the_room_at_most(tmp_path):
    """A queued request whose chunks would fill host memory gets them at its turn."""
    primed(tmp_path, [1], num_tokens=40 * TOKENS_PER_BLOCK)
    small = extra(tmp_path, host="512KiB")
    with running(small, connector=UndercroftConnector, num_blocks=80) as rig:
        rig.submit(prompt(9, 900), num_decode=40)
        rig.step()
        queued = rig.submit([*prompt(1, 40 * TOKENS_PER_BLOCK), 5])
        for _ in range(10):
            rig.step()
        assert rig.hierarchy.counters.promoted_chunks.total() == 0
        rig.settle(2000)
        assert queued.num_hit_tokens == 40 * TOKENS_PER_BLOCK


def test_nothing_is_looked_up_without_a_level_below(monkeypatch):
    """Host memory only: a queued request costs nothing."""
    with running({"host": "4MiB"}, connector=UndercroftConnector, num_blocks=24) as rig:
        rig.submit(prompt(9, 256), num_decode=20)
        rig.step()
        rig.submit([*prompt(1, TOKENS), 5])
        rig.step()
        before = rig.hierarchy.counters.lookup_misses.total()
        monkeypatch.setattr(rig.hierarchy.ahead, "finds", None)
        for _ in range(5):
            rig.step()
        assert rig.hierarchy.counters.lookup_misses.total() == before
        rig.settle()


def test_a_fault_in_it_is_told_once_and_harms_nobody(tmp_path, monkeypatch, caplog):
    """Engine internals move: then queued requests wait for their turn, as without it."""
    primed(tmp_path, [1])
    with running(extra(tmp_path), connector=UndercroftConnector, num_blocks=24) as rig:
        monkeypatch.setattr(
            UndercroftConnector, "_num_tokens_here", lambda *_: {}["a name that moved"]
        )
        rig.submit(prompt(9, 256), num_decode=20)
        rig.step()
        queued = rig.submit([*prompt(1, TOKENS), 5])
        with caplog.at_level(logging.ERROR):
            for _ in range(5):
                rig.step()
        assert sum("looking ahead" in line for line in caplog.messages) == 1
        assert rig.manager._scout is None
        rig.settle()
        assert queued.num_hit_tokens == TOKENS
