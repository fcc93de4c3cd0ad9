"""Random lives of an engine around the real connector: every loaded byte is compared."""

import random
from types import SimpleNamespace

import pytest
from rig import running
from shapes import Group, prompt

SHAPES = {
    "one group": ((Group(),), 1),
    "big chunks": ((Group(),), 4),
    "a window": ((Group(), Group(num_layers=1, window=64)), 1),
    "a window in big chunks": ((Group(), Group(num_layers=3, window=96)), 2),
    "sizes and ids": ((Group(kept=False), Group(num_layers=1), Group(num_layers=3)), 1),
}


class Life:
    """Random steps of one engine, and what they did."""

    def __init__(self, rig, rng):
        self.rig, self.rng = rig, rng
        self.did = SimpleNamespace(aborts=0, preemptions=0, resets=0, submits=0)
        self.jobs = []

    def tick(self):
        rig, rng = self.rig, self.rng
        roll = rng.random()
        if roll < 0.35 and len(rig.waiting) < 6:
            tokens = [*prompt(rng.randrange(5), rng.randrange(20, 400)), rng.randrange(3)]
            self.jobs.append(rig.submit(tokens, num_decode=rng.choice((0, 0, 20))))
            self.did.submits += 1
        elif roll < 0.40 and (rig.running or rig.waiting):
            rig.abort(rng.choice([*rig.running, *rig.waiting]))
            self.did.aborts += 1
        elif roll < 0.45 and rig.running:
            rig.preempt(rng.choice(rig.running))
            self.did.preemptions += 1
        elif roll < 0.46:
            for job in [*rig.running, *rig.waiting]:
                rig.abort(job)
            rig.on_scheduler.reset_cache()
            rig.version += 1  # other weights: the same keys stand for other bytes from now on
            self.did.resets += 1
        rig.hold_acks = rng.random() < 0.2
        rig.step()

    @property
    def has_seen_all(self):
        """What a life must have had to prove anything; on some machines, and seldom, it is late."""
        did = self.did
        flushed = any(meta.jobs_to_flush for meta in self.rig.metas)
        loaded = self.rig.num_loads_checked > 3
        return min(did.aborts, did.preemptions, did.submits) > 0 and flushed and loaded

    def end(self):
        self.rig.hold_acks = False
        self.rig.settle(2000)
        # Two more steps: what a reset set aside is let go when the next step has ended.
        self.rig.step()
        self.rig.step()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_random_life(shape, where, tmp_path, seed):
    """Submits, aborts, preemptions, resets, late acks, little memory: right bytes, no pin left."""
    groups, blocks_per_chunk = SHAPES[shape]
    extra = {
        "host": "640KiB",
        "blocks_per_chunk": blocks_per_chunk,
        "max_queued_write_bytes": "4MiB",
        "offload_prompt_only": False,
    }
    if where == "disk":
        tier = {"type": "disk", "path": str(tmp_path), "capacity": "3MiB", "free_space_floor": 0}
        extra["tiers"] = [tier]
    with running(extra, groups=groups, num_blocks=120, tokens_per_step=96) as rig:
        life = Life(rig, random.Random(seed))
        for number in range(3000):
            life.tick()
            if number >= 300 and life.has_seen_all:
                break
        life.end()
        did, counters = life.did, rig.hierarchy.counters
        assert min(did.aborts, did.preemptions, did.submits) > 0
        assert not rig.manager.is_off
        assert rig.num_loads_checked > 3
        assert any(meta.jobs_to_flush for meta in rig.metas)
        assert rig.hierarchy.pool.slots.num_pinned == 0
        assert not rig.manager._requests
        assert all(job.request.is_finished() for job in life.jobs)
        assert counters.dropped_chunks["host", "copy_failed"] == 0
