"""How `UndercroftConnector` is named, what it fills in, and what ranks tell the scheduler."""

import pickle

import pytest
from rig import running
from shapes import ONE_GROUP, engine_config, kv_cache_config, prompt
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from undercroft.engines.vllm import UndercroftConnector, connector
from undercroft.errors import ConfigError

HOST = {"host": "1MiB"}


def test_it_needs_no_spec_name_and_leaves_the_user_s_settings_alone():
    """Found by name and path, as vLLM finds it; what the user gave is not written to."""
    config = engine_config(HOST)
    config.kv_transfer_config.kv_connector = "UndercroftConnector"
    config.kv_transfer_config.kv_connector_module_path = "undercroft.engines.vllm"
    found = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert found is UndercroftConnector
    assert found(config, KVConnectorRole.WORKER, kv_cache_config(ONE_GROUP, 8)) is not None
    assert config.kv_transfer_config.kv_connector_extra_config == HOST == {"host": "1MiB"}


@pytest.mark.parametrize("name", ["UndercroftSpec", "CPUOffloadingSpec", "TieringOffloadingSpec"])
def test_another_spec_is_refused(name):
    """Ours may stay where it was written; stock's would not be what the user gets."""
    config = engine_config({**HOST, "spec_name": name})
    cache = kv_cache_config(ONE_GROUP, 8)
    if name == "UndercroftSpec":
        UndercroftConnector(config, KVConnectorRole.WORKER, cache).shutdown()
        return
    with pytest.raises(ConfigError, match="brings its own"):
        UndercroftConnector(config, KVConnectorRole.WORKER, cache)


def test_the_policy_for_failed_loads_is_set_where_the_scheduler_reads_it():
    """On the engine's own configuration, after the connector was made."""
    with running(HOST, connector=UndercroftConnector) as rig:
        assert rig.config.kv_transfer_config.kv_load_failure_policy == "recompute"
    with running(HOST) as rig:
        assert not hasattr(rig.config.kv_transfer_config, "kv_load_failure_policy")


def test_both_ways_of_naming_us_lead_to_the_same_chunks(tmp_path):
    """What decides bytes comes from rank 0, whichever connector it runs under."""
    disk = {**HOST, "tiers": [{"type": "disk", "path": str(tmp_path), "capacity": "64MiB"}]}
    with running(disk, engine_id="plain") as rig:
        assert rig.run(prompt(1, 160)).num_hit_tokens == 0
    with running(disk, engine_id="connected", connector=UndercroftConnector) as rig:
        assert rig.run(prompt(1, 160)).num_hit_tokens == 160
        found = rig.hierarchy.levels[0].tier.namespace.manifest["model"]["facts"]
        assert found["cache"]["cache_dtype"] == "auto"


def test_reports_of_several_ranks_add_up():
    """Whichever rank comes first, failed or not, and after the way between processes."""

    def output(jobs, failed, is_failed):
        report = connector._WorkerReport(jobs, failed_loads=failed)
        return ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=pickle.loads(
                pickle.dumps(
                    KVConnectorOutput(
                        finished_recving={"r"},
                        failed_recving={"r"} if is_failed else set(),
                        kv_connector_worker_meta=report,
                    )
                )
            ),
        )

    good, bad = ({7: 1}, {}, False), ({7: 1}, {"r": (4096,)}, True)
    worse = ({7: 1}, {"r": (8192, 4096)}, True)
    for outputs in ([good, bad], [bad, good], [bad, worse]):
        both = KVOutputAggregator(2).aggregate([output(*o) for o in outputs])
        summed = both.kv_connector_output
        assert (summed.finished_recving, summed.failed_recving) == ({"r"}, {"r"})
        assert summed.kv_connector_worker_meta.completed_jobs == {7: 2}
        failed = summed.kv_connector_worker_meta.failed_loads["r"]
        assert set(failed) == ({4096, 8192} if worse in outputs else {4096})


def test_a_load_that_fails_on_several_ranks_failed_once():
    """Each rank ends it in a step of its own; a request has three tries with any number of them."""
    with running(HOST, connector=UndercroftConnector) as rig:
        ranks = KVOutputAggregator(2)
        for failing in (0, 1):
            outputs = [
                ModelRunnerOutput(
                    req_ids=[],
                    req_id_to_index={},
                    kv_connector_output=KVConnectorOutput(
                        finished_recving={"r"} if rank == failing else set(),
                        failed_recving={"r"} if rank == failing else set(),
                        kv_connector_worker_meta=connector._WorkerReport(
                            failed_loads={"r": (0,)} if rank == failing else {}
                        ),
                    ),
                )
                for rank in (0, 1)
            ]
            summed = ranks.aggregate(outputs).kv_connector_output
            rig.on_scheduler.update_connector_output(summed)
            assert rig.on_scheduler._num_failed_loads["r"] == failing
        rig.on_scheduler._num_failed_loads.clear()


def test_every_report_of_a_rank_is_one_of_ours():
    """Stock's sum of two reports forgets what the other knows."""
    with running(HOST, connector=UndercroftConnector) as rig:
        rig.run(prompt(1, 64))
        rig.on_worker.bind_connector_metadata(OffloadingConnectorMetadata({}, {}, set()))
        assert rig.on_worker.build_connector_worker_meta() is None
        rig.on_worker.connector_worker._connector_worker_meta.mark_completed(3)
        report = rig.on_worker.build_connector_worker_meta()
        assert type(report) is connector._WorkerReport
        assert isinstance(report, OffloadingWorkerMetadata)


def test_nothing_is_remembered_of_requests_that_are_gone():
    """After many requests the connector is as it began."""
    with running(HOST, connector=UndercroftConnector) as rig:
        for label in range(20):
            rig.submit(prompt(label, 48))
        rig.settle()
        for books in ("_queued", "_looked_ahead", "_num_failed_loads"):
            assert not getattr(rig.on_scheduler, books), books
        assert not rig.on_worker._load_requests
        assert not rig.on_worker._failed_loads
        assert not rig.manager._tags
