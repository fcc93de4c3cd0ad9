"""More than the levels take, through vLLM's own connector: bursts, a full host memory, budgets."""

from managers import disk
from rig import running
from shapes import prompt

from undercroft.hierarchy.slots import SlotState

CHUNK = 8192
TOKENS = 16


def test_fifty_clients_read_a_prefix_once(tmp_path):
    """Each chunk is read from disk once, and loaded for each request that asks before the engine
    has it itself; all are answered within some steps, and what they load is right."""
    with running({"host": "1MiB", **disk(tmp_path)}, engine_id="one") as rig:
        rig.run(prompt(1, 20 * TOKENS))
    extra = {"host": 64 * CHUNK, **disk(tmp_path)}
    with running(extra, engine_id="two", num_blocks=50 * 22 + 8) as rig:
        jobs = [rig.submit([*prompt(1, 20 * TOKENS), label]) for label in range(50)]
        rig.settle()
        counters = rig.hierarchy.counters
        assert {job.num_hit_tokens for job in jobs} == {20 * TOKENS}
        assert counters.promoted_chunks["disk"] == 20
        assert rig.num_loads_checked == 50
        assert rig.hierarchy.pool.slots.num_pinned == 0
        assert not {reason for reason in counters.lookup_misses if reason[1] != "absent"}


def pin_everything(rig):
    """As if all of host memory were being loaded from."""
    slots = rig.hierarchy.pool.slots
    for slot in slots.taken():
        assert slots.states[slot] >= SlotState.READY
        slots.pin(slot)


def unpin_everything(rig):
    for slot in rig.hierarchy.pool.slots.taken():
        rig.hierarchy.pool.unpin(slot)


def test_a_declined_chunk_is_not_offered_again(tmp_path):
    """With host memory full of what may not go, a request that decodes for two hundred steps is
    declined once for each of its chunks, and never again: what is left out counts as done."""
    extra = {"host": 8 * CHUNK, "offload_prompt_only": False, **disk(tmp_path)}
    with running(extra, tokens_per_step=4 * TOKENS) as rig:
        rig.run(prompt(1, 8 * TOKENS))
        pin_everything(rig)
        offered = []
        inner = rig.manager.prepare_store

        def counted(keys, context):
            keys = list(keys)
            offered.extend(keys)
            return inner(keys, context)

        rig.manager.prepare_store = counted
        job = rig.submit(prompt(2, 20 * TOKENS), num_decode=200)
        num_steps = rig.settle(max_steps=1000)
        assert num_steps >= 200
        assert job.request.is_finished()
        num_chunks = job.request.num_tokens // TOKENS
        assert num_chunks >= 32
        assert len(offered) == len(set(offered)) <= num_chunks
        assert rig.hierarchy.counters.declined_chunks["host", "full"] == len(offered)
        unpin_everything(rig)


def test_budgets_of_a_tier_are_obeyed(tmp_path):
    """As written in the settings: a day's bytes, which the next engine finds spent, and a rate."""
    cost = 4096 + CHUNK + 3 * 4096
    budget = {"write_budget": 50 * cost, "write_rate": "1GiB"}
    extra = {"host": 200 * CHUNK, **disk(tmp_path, **budget)}
    with running(extra, engine_id="one") as rig:
        for label in range(6):
            rig.run(prompt(label, 20 * TOKENS))
            rig.await_movers()
            rig.step()
        counters, (level,) = rig.hierarchy.counters, rig.hierarchy.levels
        assert level.tier.written_bytes() <= 50 * cost
        written = counters.cascaded_chunks["disk"]
        assert 40 <= written < 120
        assert counters.declined_chunks["disk", "write_budget"] >= 120 - written
    with running(extra, engine_id="two") as rig:
        assert rig.run(prompt(0, 20 * TOKENS)).num_hit_tokens == 20 * TOKENS
        rig.run(prompt(9, 20 * TOKENS))
        assert rig.hierarchy.counters.cascaded_chunks["disk"] <= 2
    extra = {"host": 200 * CHUNK, **disk(tmp_path / "b", write_rate=CHUNK)}
    with running(extra) as rig:
        rig.run(prompt(0, 20 * TOKENS))
        rig.await_movers()
        rig.step()
        assert rig.hierarchy.counters.cascaded_chunks["disk"] < 20, "it goes slowly"
        assert rig.hierarchy.cascade.num_waiting("disk") > 0
