"""Reads from disk that are late or fail, for a model of several groups, in the real connector."""

import threading
import time

import pytest
from rig import running
from shapes import TOKENS_PER_BLOCK, Group, prompt
from vllm.v1.kv_offload.base import make_offload_key

from undercroft.errors import CorruptChunk
from undercroft.tiers.disk import DiskTier

DEADLINE_S = 4.0
NUM_TOKENS = 512
FULL, WINDOW = 1, 3
HYBRID = (Group(kept=False), Group(), Group(kept=False), Group(num_layers=1, window=64))


@pytest.fixture
def refused(monkeypatch):
    """Keys whose reads hang until the test ends, or fail; and every key that was read."""
    let_go, how, read = threading.Event(), {}, []
    read_into = DiskTier.read_into

    def wrapped(self, key, out):
        read.append(bytes(key))
        if how.get(bytes(key)) == "hangs":
            let_go.wait(60)
        if how.get(bytes(key)) == "is corrupt":
            raise CorruptChunk("the test says so", tier=self.name, key=key)
        return read_into(self, key, out)

    monkeypatch.setattr(DiskTier, "read_into", wrapped)
    yield how, read, let_go
    let_go.set()


@pytest.mark.parametrize("what", ["hangs", "is corrupt"])
@pytest.mark.parametrize("group", [FULL, WINDOW])
def test_what_is_verified_is_used(tmp_path, refused, group, what):
    """All before a chunk that does not come is loaded, and right: the window at the cut as well."""
    how, read, let_go = refused
    tier = {"type": "disk", "path": str(tmp_path), "capacity": "64MiB"}
    extra = {"host": "4MiB", "tiers": [tier], "promote_deadline_s": DEADLINE_S}
    with running(extra, groups=HYBRID, engine_id="one") as rig:
        rig.run(prompt(1, NUM_TOKENS))
    with running(extra, groups=HYBRID, engine_id="two") as rig:
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
