"""What a policy that learns is told of requests, over the real connectors."""

from types import SimpleNamespace

import pytest
from rig import running
from shapes import Group, prompt
from vllm.v1.kv_offload.base import ReqContext

from undercroft.engines.vllm.connector import UndercroftConnector
from undercroft.engines.vllm.every_key import EveryKey
from undercroft.hierarchy.request import Request

HAZARD = {"host": "4MiB", "policy": "hazard"}
NO_SPEC = {"spec_name": "UndercroftSpec", "spec_module_path": "undercroft.engines.vllm"}
HYBRID = (Group(), Group(num_layers=1, window=64))


def listen(rig):
    """What its policies are told of from now on: keys, kind, how many of them before."""
    told = []
    for policy in rig.hierarchy.pool._policies:
        tell = policy.on_request

        def on_request(keys, now_s, kind=0, num_told=0, tell=tell):
            told.append((list(keys), kind, num_told))
            tell(keys, now_s, kind, num_told)

        policy.on_request = on_request
    return told


@pytest.mark.parametrize("connector", [UndercroftConnector, None])
@pytest.mark.parametrize(("prompts_only", "num_chunks"), [(True, 6), (False, 8)])
def test_all_full_chunks_of_a_request_root_first(connector, prompts_only, num_chunks):
    """What was loaded, what was stored, what was generated if that is stored; once a request."""
    extra = {**HAZARD, "offload_prompt_only": prompts_only, **({} if connector else NO_SPEC)}
    with running(extra, connector=connector) as rig:
        told = listen(rig)
        rig.run(prompt(1, 100))
        rig.run(prompt(1, 100), num_decode=40)
        rig.settle()
        first, second = told
        assert len(first[0]) == 6
        assert second[0][:6] == first[0]
        assert len(second[0]) == num_chunks
        assert set(second[0]) == set(rig.host_keys())
        assert [kind for _, kind, _ in told] == [int(connector is not None)] * 2
        assert [num_told for *_, num_told in told] == [0, 0]


def test_each_group_by_itself():
    """Full attention and a window, whose chunks end at the same tokens."""
    with running(HAZARD, connector=UndercroftConnector, groups=HYBRID) as rig:
        told = listen(rig)
        rig.run(prompt(1, 160))
        rig.settle()
        assert sorted(len(keys) for keys, *_ in told) == [10, 10]
        for keys, *_ in told:
            assert len({key[-4:] for key in keys}) == 1


def test_the_names_are_those_of_its_adapter(tmp_path):
    """A policy must know chunks as they are called in the hierarchy."""
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter = SimpleNamespace(
        lora_int_id=1, lora_name="one", lora_path=str(tmp_path), tensorizer_config_dict=None
    )
    with running(HAZARD, connector=UndercroftConnector) as rig:
        told = listen(rig)
        rig.run(prompt(1, 100), adapter=adapter)
        rig.settle()
        ((keys, *_),) = told
        assert len(keys) == 6
        assert set(keys) == set(rig.host_keys())


def test_one_that_never_ran_is_not_told_of():
    """One that ran and was aborted is: somebody asked for that."""
    with running(HAZARD, connector=UndercroftConnector) as rig:
        told = listen(rig)
        rig.abort(rig.submit(prompt(1, 64)))
        rig.settle()
        assert told == []
        job = rig.submit(prompt(2, 64), num_decode=9)
        rig.step()
        rig.abort(job)
        rig.settle()
        ((keys, kind, _),) = told
        assert (len(keys), kind) == (4, 0)
        assert not rig.manager._every_key._coming


def test_a_vllm_that_keeps_keys_elsewhere_tells_what_it_stores(monkeypatch):
    """And goes on."""
    with running(HAZARD, connector=UndercroftConnector) as rig:
        told = listen(rig)
        monkeypatch.setattr(
            rig.manager._every_key, "_ends", lambda context: context.keys_are_not_here
        )
        rig.run(prompt(1, 100))
        assert rig.run(prompt(1, 100)).num_hit_tokens == 96
        rig.settle()
        assert not rig.manager.is_off
        assert [len(keys) for keys, *_ in told] == [6, 6]


def test_what_ends_within_a_chunk_comes_last_if_it_is_stored():
    """The last state of a recurrent group; one that was only asked for is nobody's."""
    context = ReqContext("r")
    for number in range(3):
        context.set_offload_key_position(b"chunk %d" % number, 32 * (number + 1))
    context.set_offload_key_position(b"asked for", 80)
    context.set_offload_key_position(b"stored", 112)
    every = EveryKey(lambda keys, _context: keys, None, {None: 32}, prompts_only=True)
    every.came(context)
    request = Request("r")
    every.began([None, request])
    context.set_offload_key_position(b"generated", 128)
    chunks = [b"chunk 0", b"chunk 1", b"chunk 2"]
    assert request.use.every_key([]) == [chunks]
    assert request.use.every_key([b"stored", b"chunk 1", b"generated"]) == [[*chunks, b"stored"]]


def test_nothing_is_kept_for_a_policy_that_learns_nothing():
    """No contexts, no keys."""
    with running({"host": "4MiB"}, connector=UndercroftConnector) as rig:
        rig.submit(prompt(1, 100))
        assert rig.manager._every_key is None
        rig.settle()
        assert not rig.hierarchy.telling.is_needed
