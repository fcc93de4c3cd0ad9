"""Reads from disk that are late or fail, for a model of several groups, in the real connector."""

import threading
import time

import pytest
from between import stand_between
from rig import running
from shapes import TOKENS_PER_BLOCK, Group, prompt
from vllm.v1.kv_offload.base import make_offload_key

from undercroft.errors import CorruptChunk

DEADLINE_S = 4.0
NUM_TOKENS = 512
FULL, WINDOW = 1, 3
HYBRID = (Group(kept=False), Group(), Group(kept=False), Group(num_layers=1, window=64))


@pytest.fixture
def refused(monkeypatch):
    """Keys whose reads hang until the test ends, or fail; and every key that was read."""
    let_go, how, read = threading.Event(), {}, []

    def hangs(go):
        let_go.wait(60)
        return go()

    def is_corrupt(_go):
        raise CorruptChunk("the test says so", tier="disk")

    def choose(verb, key):
        if verb != "read_into":
            return None
        read.append(bytes(key))
        return {"hangs": hangs, "is corrupt": is_corrupt}.get(how.get(bytes(key)))

    stand_between(monkeypatch, choose)
    yield how, read, let_go
    let_go.set()


@pytest.mark.parametrize("what", ["hangs", "is corrupt"])
@pytest.mark.parametrize("group", [FULL, WINDOW])
@pytest.mark.parametrize("by_process", [False, True])
def test_what_is_verified_is_used(tmp_path, refused, group, what, by_process):
    """All before a chunk that does not come is loaded, and right: the window at the cut as well."""
    how, read, let_go = refused
    tier = {"type": "disk", "path": str(tmp_path), "capacity": "64MiB"}
    tier["mover_process"] = by_process
    extra = {"host": "4MiB", "tiers": [tier], "promote_deadline_s": DEADLINE_S}
    with running(extra, groups=HYBRID, engine_id="one") as rig:
        rig.run(prompt(1, NUM_TOKENS))
    with running(extra, groups=HYBRID, engine_id="two") as rig:
        assert rig.hierarchy.levels[0].tier.inner.await_mover(60) == by_process
        job = rig.submit([*prompt(1, NUM_TOKENS), 5])
        place = 11 if group == FULL else NUM_TOKENS // TOKENS_PER_BLOCK - 2
        how[bytes(make_offload_key(job.request.block_hashes[place], group))] = what
        began = time.monotonic()
        while job.num_hit_tokens is None:
            rig.step()
            assert time.monotonic() - began < 60
        waited = time.monotonic() - began
        let_go.set()
        rig.settle()
        assert job.num_hit_tokens == place * TOKENS_PER_BLOCK
        assert rig.num_loads_checked == 1
        assert waited < DEADLINE_S + 3.0  # a busy machine
        if what == "hangs":
            assert waited > DEADLINE_S / 2
        assert len(read) == len(set(read)), "a chunk was read twice"
        # Of full attention all, and two windows at most.
        assert len(read) <= NUM_TOKENS // TOKENS_PER_BLOCK + 2 * 64 // TOKENS_PER_BLOCK
        assert not rig.manager.is_off
