"""Requests with LoRA adapters: keys of the engine have its name and path, ours its content."""

import logging
import os

import pytest
from managers import disk
from rig import running
from shapes import Group, prompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from undercroft.engines.vllm import UndercroftConnector
from undercroft.engines.vllm.adapters import Adapters, untagged
from undercroft.testing.clock import ManualClock

SMALL = {"host": "4MiB"}
TOKENS = 160
HYBRID = (Group(), Group(num_layers=1, window=64))


@pytest.fixture
def adapter(tmp_path):
    """Writes the adapter's files, in place, and names it to the engine."""

    def make(content, adapter_id=1):
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        if content is not None:
            (folder / "adapter_model.safetensors").write_bytes(content)
        return LoRARequest("helpful", adapter_id, str(folder))

    return make


def connected(extra=SMALL, **more):
    return running(extra, connector=UndercroftConnector, **more)


@pytest.mark.parametrize("groups", [(Group(),), HYBRID])
def test_an_adapter_overwritten_in_place_finds_nothing_of_the_old_one(tmp_path, adapter, groups):
    """Nor in another process, from disk; what the old one stored is found when it is back."""
    extra = {**SMALL, **disk(tmp_path / "kv")}
    with connected(extra, groups=groups, engine_id="one") as rig:
        old = adapter(b"old")
        assert rig.run(prompt(1, TOKENS), adapter=old).num_hit_tokens == 0
        assert rig.run([*prompt(1, TOKENS), 1], adapter=old).num_hit_tokens == TOKENS
        rig.settle()
    with connected(extra, groups=groups, engine_id="two", version=1) as rig:
        new = adapter(b"new")
        assert rig.run(prompt(1, TOKENS), adapter=new).num_hit_tokens == 0
        assert rig.run([*prompt(1, TOKENS), 1], adapter=new).num_hit_tokens == TOKENS
        assert rig.num_loads_checked == 1
    with connected(extra, groups=groups, engine_id="three") as rig:
        back = adapter(b"old", adapter_id=7)
        assert rig.run([*prompt(1, TOKENS), 1], adapter=back).num_hit_tokens == TOKENS
        assert rig.num_loads_checked == 1
        assert not rig.manager.is_off


def test_the_plain_spec_knows_adapters_by_name_and_path_only(tmp_path, adapter):
    """The control, and what the docs say the plain spec lacks."""
    with running(SMALL) as rig:
        rig.run(prompt(1, TOKENS), adapter=adapter(b"old"))
        again = rig.run(prompt(1, TOKENS), adapter=adapter(b"new"))
        assert again.num_hit_tokens == TOKENS


def test_requests_without_an_adapter_keep_the_engine_s_keys(adapter):
    """Base and adapter share nothing, and the base's keys are as without adapters."""
    with connected() as rig:
        plain = rig.run(prompt(1, TOKENS))
        keys = set(rig.host_keys())
        assert keys == {bytes(h) + bytes(4) for h in plain.request.block_hashes}
        rig.run(prompt(1, TOKENS), adapter=adapter(b"a"))
        tagged = set(rig.host_keys()) - keys
        assert len(tagged) == len(keys)
        assert not {untagged(key) for key in tagged} & keys
        assert rig.run(prompt(1, TOKENS)).num_hit_tokens == TOKENS


def test_files_that_change_under_a_live_adapter(adapter, caplog):
    """Nobody knows what the engine computes with: nothing is kept, until another id comes."""
    with connected() as rig:
        rig.run(prompt(1, TOKENS), adapter=adapter(b"old"))
        running_on = rig.submit(prompt(2, TOKENS), adapter=adapter(None))
        num_before = len(rig.host_keys())
        with caplog.at_level(logging.WARNING):
            changed = rig.run(prompt(1, TOKENS), adapter=adapter(b"newer"))
            rig.run(prompt(1, TOKENS), adapter=adapter(None))
        assert sum("changed while it was in use" in line for line in caplog.messages) == 1
        assert changed.num_hit_tokens == 0
        assert running_on.num_hit_tokens == 0
        assert len(rig.host_keys()) == num_before
        fresh = adapter(None, adapter_id=2)
        assert rig.run(prompt(1, TOKENS), adapter=fresh).num_hit_tokens == 0
        assert rig.run(prompt(1, TOKENS), adapter=fresh).num_hit_tokens == TOKENS


def test_events_name_the_engine_s_keys(adapter):
    """A router knows block hashes only."""
    with connected({"host": "128KiB"}, events=True) as rig:
        job = rig.run(prompt(1, TOKENS), adapter=adapter(b"a"))
        other = rig.run(prompt(2, TOKENS), adapter=adapter(None))
        rig.settle()
        known = {maybe_convert_block_hash(h) for j in (job, other) for h in j.request.block_hashes}
        named = {h for event in rig.events for h in event.block_hashes}
        assert {type(event).__name__ for event in rig.events} == {"BlockStored", "BlockRemoved"}
        assert named <= known


def test_an_abort_while_its_chunks_are_on_their_way(tmp_path, adapter):
    """Completions that come after the end still find the tagged keys."""
    with connected({**SMALL, **disk(tmp_path / "kv")}) as rig:
        rig.run(prompt(1, TOKENS), adapter=adapter(b"a"))
        rig.settle()
        rig.hold_acks = True
        for label in (1, 2):
            rig.submit(prompt(label, TOKENS), adapter=adapter(None))
        rig.step()
        for job in [*rig.waiting, *rig.running]:
            rig.abort(job)
        rig.step()
        rig.hold_acks = False
        rig.settle()
        assert rig.hierarchy.pool.slots.num_pinned == len(list(rig.hierarchy.fresh.kept_slots()))
        assert not rig.manager.is_off
        assert rig.run([*prompt(1, TOKENS), 1], adapter=adapter(None)).num_hit_tokens == TOKENS


def test_a_salt_and_an_adapter_of_one_name_share_nothing(adapter):
    """The engine's hashes say which of both a name is; so every level tells them apart."""
    with connected() as rig:
        job = rig.run(prompt(1, TOKENS), adapter=adapter(b"a"))
        salted = Request(
            "salted",
            prompt(1, TOKENS),
            SamplingParams(max_tokens=1),
            None,
            cache_salt="helpful",
            block_hasher=rig.hasher,
        )
        assert not {*job.request.block_hashes} & {*salted.block_hashes}


# --- tags -------------------------------------------------------------------------------------


def test_files_that_change_while_they_are_read_are_not_trusted(tmp_path):
    """Which of both contents the digest is of, nobody can say."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")

    def read(path, _environ):
        (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
        return path

    assert not Adapters({}, read).tag(1, "a", str(tmp_path)).is_sure
    assert Adapters({}).tag(1, "a", str(tmp_path)).is_sure


def test_files_that_were_only_touched_are_the_same(tmp_path):
    """A copy tool that writes the same bytes again changes nothing."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    adapters = Adapters({})
    tag = adapters.tag(1, "a", str(tmp_path))
    os.utime(weights, ns=(1, 1))
    assert adapters.tag(1, "a", str(tmp_path)) is tag
    assert tag.is_sure
    weights.write_bytes(b"two")
    assert not adapters.tag(1, "a", str(tmp_path)).is_sure
    weights.write_bytes(b"one")
    assert not adapters.tag(1, "a", str(tmp_path)).is_sure, "what was loaded meanwhile?"


def test_a_name_that_is_no_path_has_a_tag_of_its_own():
    """A hub name that is in no cache: known by its name, as the engine knows it."""
    adapters = Adapters({"HOME": "/nowhere"})
    one, other = adapters.tag(1, "a", "some/adapter"), adapters.tag(2, "b", "other/adapter")
    assert one.is_sure
    assert one.value != other.value
    assert untagged(one.on(b"key")) == b"key" == untagged(b"key")


def test_files_are_read_once_an_adapter(tmp_path):
    """A request costs a look at the folder."""
    (tmp_path / "w.safetensors").write_bytes(b"w")
    num_reads = []
    adapters = Adapters({}, lambda path, _: num_reads.append(path) or path)
    tags = {adapters.tag(1, "a", str(tmp_path)).value for _ in range(5)}
    assert len(num_reads) == len(tags) == 1


def test_many_adapters_do_not_fill_the_log(caplog):
    """What is noted of each, such as that only its name is known, is said once a minute."""
    clock = ManualClock()
    adapters = Adapters({"HOME": "/nowhere"}, clock=clock)
    for number in range(50):
        adapters.tag(number, f"a{number}", f"some/adapter-{number}")
    assert len(caplog.messages) == 1
    assert "some/adapter-0" in caplog.messages[0]
    clock.advance(61)
    adapters.tag(99, "b", "other/adapter")
    assert "49 times more" in caplog.messages[1]


def test_adapters_beyond_the_bound_cost_nothing_and_keep_nothing(monkeypatch, caplog):
    """A server that goes through ever new adapters: no read of files for those, and one line."""
    monkeypatch.setattr("undercroft.engines.vllm.adapters._MAX_KNOWN", 3)
    reads = []
    adapters = Adapters({}, lambda path, _: reads.append(path) or path, ManualClock())
    tags = [adapters.tag(number, "a", f"some/adapter-{number}") for number in range(6)]
    assert [tag.is_sure for tag in tags] == [True] * 3 + [False] * 3
    assert len(reads) == 3
    assert len(caplog.messages) == 1
    assert adapters.tag(0, "a", "some/adapter-0") is tags[0]
