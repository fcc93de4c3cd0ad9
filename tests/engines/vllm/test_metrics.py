"""Our numbers through vLLM's own classes: what they do not accept would stop serving."""

import re
from pathlib import Path

import prometheus_client
import pytest
from rig import running
from shapes import Group, engine_config, kv_cache_config, prompt
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from undercroft import errors
from undercroft.engines.vllm.metrics import (
    DECLINE_REASONS,
    DROP_REASONS,
    MISS_REASONS,
    metric_definitions,
)
from undercroft.hierarchy.counters import Counters
from undercroft.hierarchy.level import drop_reason

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
KINDS = {
    OffloadingCounterMetadata: "counter",
    OffloadingGaugeMetadata: "gauge",
    OffloadingHistogramMetadata: "histogram",
}
TEN_CHUNKS = {"host": "80KiB", "max_queued_write_bytes": "1MiB"}


def disk(path, capacity="64MiB", **more):
    return {"tiers": [{"type": "disk", "path": str(path), "capacity": capacity, **more}]}


@pytest.fixture
def prometheus():
    """vLLM's metrics of our spec on a registry of their own, and how to read it."""
    registry = prometheus_client.CollectorRegistry()

    def on_registry(kind):
        return lambda **kwargs: kind(registry=registry, **kwargs)

    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    config = engine_config(
        {"spec_name": "UndercroftSpec", "spec_module_path": "undercroft.engines.vllm"}
    )
    made = OffloadPromMetrics(
        config,
        {kind: on_registry(kind) for kind in kinds},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )

    def read(name, **labels):
        labels = {"model_name": "m", "engine": "0", **labels}
        return registry.get_sample_value(name, labels)

    return made, read


def observe_all(made, rig):
    """What the API process does with each step's stats; checks the values on the way."""
    for stats in rig.stats:
        for name, values in stats.data["data"].items():
            for labels, value in values.items():
                assert isinstance(labels, tuple)
                assert all(type(label) is str for label in labels)
                for number in value if isinstance(value, list) else [value]:
                    assert type(number) in (int, float), f"{name}: {type(number)}"
                if stats.data["types"][name] == "counter":
                    assert value >= 0, name
        made.observe(stats.data)
        stats.reduce()  # what vLLM's logger does


def test_a_life_of_metrics_through_prometheus(prometheus, tmp_path):
    """Every value of a busy engine is accepted, and the totals are the hierarchy's."""
    made, read = prometheus
    with running({**TEN_CHUNKS, **disk(tmp_path, name="nvme:0")}) as rig:
        for label in (1, 2, 1, 3, 1):
            rig.run(prompt(label, 96))
        rig.on_scheduler.reset_cache()
        rig.run(prompt(1, 320))
        rig.settle()
        for _ in range(3):
            rig.step()
        counters = rig.hierarchy.counters
        counters.dropped_chunks["nvme:0", "corrupt"] += 1
        counters.declined_chunks["nvme:0", "backpressure"] += 1
        rig.step()
        observe_all(made, rig)
        total = "vllm:undercroft_{}_total".format
        assert read(total("lookups"), result="hit") == counters.lookup_hits > 0
        assert read(total("lookups"), result="miss") == counters.lookup_misses.total() > 0
        assert (
            read(total("lookup_misses"), level="none", reason="absent")
            == (counters.lookup_misses["none", "absent"])
        )
        for name in ("stored_chunks", "stored_bytes", "loaded_chunks", "loaded_bytes"):
            assert read(total(name)) == getattr(counters, name) > 0, name
        for name in ("cascaded_chunks", "cascaded_bytes", "promoted_chunks", "promoted_bytes"):
            assert read(total(name), level="nvme:0") == getattr(counters, name)["nvme:0"] > 0, name
        assert read(total("requests"), result="served") == counters.requests["served"] > 0
        assert read(total("requests"), result="new") == counters.requests["new"] > 0
        assert read(total("self_check_warnings"), cause="group") == 0
        assert read(total("evicted_chunks"), level="host") == counters.evicted_chunks["host"] > 0
        assert read(total("dropped_chunks"), level="nvme:0", reason="corrupt") == 1
        assert read(total("declined_chunks"), level="nvme:0", reason="backpressure") == 1
        assert read(total("declined_chunks"), level="host", reason="full") > 0
        assert read(total("resets")) == 1
        assert read("vllm:undercroft_level_usable", level="nvme:0") == 1
        assert read("vllm:undercroft_capacity_bytes", level="nvme:0") == 64 << 20
        assert 0 < read("vllm:undercroft_resident_bytes", level="nvme:0") <= 64 << 20
        assert read("vllm:undercroft_is_on") == 1
        assert read(total("hit_chunks"), level="host") == counters.hit_chunks["host"] > 0
        assert read(total("hit_tokens"), level="host") == counters.hit_tokens["host"] > 0
        assert read(total("saved_prefill_seconds"), level="host") > 0
        assert 0 < read("vllm:undercroft_prefill_seconds_per_token") < 1
        assert read("vllm:undercroft_store_seconds_count") > 0
        assert read("vllm:undercroft_load_seconds_sum") > 0
        assert read("vllm:undercroft_promote_seconds_count", level="nvme:0") > 0
        assert read("vllm:undercroft_cascade_seconds_count", level="nvme:0") > 0
        assert read("vllm:undercroft_max_queued_write_bytes", level="nvme:0") == 1 << 20


def test_residency_is_not_pins(prometheus):
    """With all chunks holding data residency is 1.0, and nothing is pinned: two names."""
    made, read = prometheus
    with running(TEN_CHUNKS) as rig:
        rig.run(prompt(1, 320))
        observe_all(made, rig)
        assert read("vllm:undercroft_residency_ratio", level="host") == 1.0
        assert read("vllm:undercroft_pinned_chunks", level="host") == 0.0
        assert read("vllm:undercroft_capacity_bytes", level="host") == 80 << 10


def test_pins_are_seen_while_a_load_is_under_way(prometheus):
    """A gauge that is never anything but zero would tell nothing."""
    made, read = prometheus
    with running(TEN_CHUNKS) as rig:
        rig.run(prompt(1, 160))
        rig.hold_acks = True
        rig.submit(prompt(1, 160))
        rig.step()
        observe_all(made, rig)
        assert read("vllm:undercroft_pinned_chunks", level="host") == 10
        rig.hold_acks = False
        rig.settle()


def test_an_idle_engine_reports_nothing():
    """No gauge is sent again while it stays as it is."""
    with running(TEN_CHUNKS) as rig:
        rig.run(prompt(1, 96))
        rig.step()
        rig.stats.clear()
        for _ in range(3):
            rig.step()
        ours = [name for stats in rig.stats for name in stats.data["data"] if "undercroft" in name]
        assert ours == []


def test_every_counter_of_the_hierarchy_has_a_metric():
    """A counter that nobody exports is not seen by anybody."""
    names = {name.removeprefix("vllm:undercroft_") for name in metric_definitions()}
    missing = {
        field
        for field in Counters.__dataclass_fields__
        if field not in names and not field.startswith("lookup_")
    }
    assert not missing
    assert {"lookups", "lookup_misses"} <= names


def test_definitions_depend_on_nothing():
    """The API process has only the user's configuration, and may not have a valid one yet."""
    from undercroft.engines.vllm import UndercroftSpec

    for extra in ({}, {"host": "1GiB"}, {"nonsense": 1}):
        assert UndercroftSpec.build_metric_definitions(extra) == metric_definitions()
    for name, metadata in metric_definitions().items():
        assert re.fullmatch(r"vllm:undercroft_[a-z_]+", name)
        assert type(metadata) in KINDS
        assert metadata.documentation.endswith(".")


def test_the_reference_lists_every_metric_and_no_other():
    """docs/reference/metrics.md: name, kind and labels of each, as declared."""
    row = re.compile(r"^\| `([a-z_]+)` \| (counter|gauge|histogram) \| ([^|]*)\|", re.MULTILINE)
    rows = row.findall(PAGE.read_text())
    documented = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
    }
    declared = {
        name.removeprefix("vllm:undercroft_"): (
            KINDS[type(metadata)],
            metadata.labelnames,
        )
        for name, metadata in metric_definitions().items()
    }
    assert documented == declared


def reasons_in_the_source():
    source = Path(__file__).parents[3] / "src" / "undercroft"
    folders = (source / "hierarchy", source / "engines" / "vllm")
    text = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    misses = set(re.findall(r'_miss\([^)]*"(\w+)"\)', text))
    misses |= set(re.findall(r'lookup_misses\[NO_LEVEL, "(\w+)"\]', text))
    misses |= set(re.findall(r'return (?:level\.name|NO_LEVEL), "(\w+)"', text))
    for pair in re.findall(r'why = \(level\.name, "(\w+)" if .* else "(\w+)"\)', text):
        misses |= set(pair)
    misses |= set(re.findall(r'why_denied(?:, [\w.]+)? = "(\w+)"', text))
    declined = set(re.findall(r'(?:_decline|decline_waiting)\("(\w+)"', text))
    declined |= set(re.findall(r'declined(?:_chunks)?\[[^\]]*"(\w+)"\]', text))
    dropped = set(re.findall(r'dropped_chunks\[[^\]]*"(\w+)"\]', text))
    disk = "".join(path.read_text() for path in (source / "tiers" / "disk").glob("*.py"))
    dropped |= set(re.findall(r'note_lost\(.*?, "(\w+)"', disk))
    dropped |= set(re.findall(r'\.keys, "(\w+)"\n', disk))
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.TierError | errors.CorruptChunk):
            dropped.add(drop_reason(kind("x")))
    return misses, declined, dropped | {drop_reason(errors.FormatTooNew("x"))}


def test_the_label_values_are_bounded_and_known():
    """All reasons that the code can give are declared, start at zero, and are on the page."""
    misses, declined, dropped = reasons_in_the_source()
    assert misses == {reason for part in MISS_REASONS.values() for reason in part}
    assert declined == {reason for part in DECLINE_REASONS.values() for reason in part}
    assert dropped - {"error"} == {reason for part in DROP_REASONS.values() for reason in part}
    page = PAGE.read_text()
    assert not {r for r in misses | declined | dropped - {"error"} if f"| `{r}` |" not in page}


def test_a_counter_is_there_before_it_counts(prometheus, tmp_path):
    """A rate misses the first event of a series that begins with it: all begin at 0."""
    made, read = prometheus
    with running({**TEN_CHUNKS, **disk(tmp_path, name="nvme")}) as rig:
        rig.step()
        observe_all(made, rig)
        total = "vllm:undercroft_{}_total".format
        for place, level in (("none", "none"), ("host", "host"), ("below", "nvme")):
            for reason in MISS_REASONS[place]:
                assert read(total("lookup_misses"), level=level, reason=reason) == 0
        for reason in DROP_REASONS["below"]:
            assert read(total("dropped_chunks"), level="nvme", reason=reason) == 0
        for reason in DECLINE_REASONS["host"]:
            assert read(total("declined_chunks"), level="host", reason=reason) == 0
        for name in ("hit_tokens", "saved_prefill_seconds", "evicted_chunks"):
            assert read(total(name), level="nvme") == read(total(name), level="host") == 0
        for name in ("promoted_chunks", "cascaded_bytes", "breaker_openings", "tier_bugs"):
            assert read(total(name), level="nvme") == 0
        assert read(total("mover_deaths"), level="nvme") == 0
        assert read("vllm:undercroft_mover_process_up", level="nvme") == 0
        assert read("vllm:undercroft_promote_seconds_count", level="nvme") == 0
        for name in ("store_seconds", "load_seconds", "restore_wait_seconds"):
            assert read(f"vllm:undercroft_{name}_count") == 0
            assert read(f"vllm:undercroft_{name}_bucket", le="0.001") == 0


# --- events -----------------------------------------------------------------------------------


def test_no_events_when_the_engine_wants_none(tmp_path):
    """Nothing is published, and nothing piles up either."""
    with running({**TEN_CHUNKS, **disk(tmp_path, "1MiB")}) as rig:
        for label in range(6):
            rig.run(prompt(label, 160))
        assert rig.events == []
        assert rig.hierarchy.events.take() == []


def test_events_of_every_level(tmp_path):
    """What was stored and not removed, by the events, is what each level holds."""
    extra = {**TEN_CHUNKS, **disk(tmp_path, "512KiB", free_space_floor=0)}
    with running(extra, events=True) as rig:
        for label in (1, 2, 3, 1, 4, 5, 1, 6, 7, 8, 1):
            rig.run(prompt(label, 160))
        rig.settle()
        rig.step()
        held = {"CPU": set(), "STORAGE": set()}
        removed = {"CPU": 0, "STORAGE": 0}
        for event in rig.events:
            assert isinstance(event, BlockStored | BlockRemoved)
            assert event.locality == "LOCAL"
            assert event.ownership == (None if event.medium == "CPU" else "disk")
            if isinstance(event, BlockStored):
                held[event.medium].update(event.block_hashes)
            else:
                removed[event.medium] += len(event.block_hashes)
                held[event.medium].difference_update(event.block_hashes)
        assert min(removed.values()) > 0
        host = {key[:-4] for key in rig.host_keys()}
        on_disk = {key[:-4] for key, _ in rig.hierarchy.levels[0].tier.evictable()}
        hashed = _as_published(host | on_disk)
        assert held["CPU"] == {hashed[key] for key in host}
        assert held["STORAGE"] == {hashed[key] for key in on_disk}


def test_a_reset_removes_everything_in_events(tmp_path):
    """After a reset no level is said to hold anything."""
    with running({**TEN_CHUNKS, **disk(tmp_path)}, events=True) as rig:
        rig.run(prompt(1, 160))
        rig.settle()
        rig.events.clear()
        rig.on_scheduler.reset_cache()
        rig.step()
        gone = dict.fromkeys(("CPU", "STORAGE"), 0)
        for event in rig.events:
            assert isinstance(event, BlockRemoved)
            gone[event.medium] += len(event.block_hashes)
        assert gone == {"CPU": 10, "STORAGE": 10}


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_self_describing_events(blocks_per_chunk):
    """With the option, stores name their tokens and parents, and removals the same hashes."""
    extra = {"host": "320KiB", "blocks_per_chunk": blocks_per_chunk}
    extra["self_describing_kv_events"] = True
    with running(extra, events=True) as rig:
        rig.run(prompt(1, 320))
        stored = [e for e in rig.events if isinstance(e, BlockStored)]
        assert [t for e in stored for t in e.token_ids] == prompt(1, 320)
        assert stored[0].parent_block_hash is None
        assert stored[1].parent_block_hash == stored[0].block_hashes[-1]
        for label in range(2, 6):
            rig.run(prompt(label, 320))
        said = {h for e in stored for h in e.block_hashes}
        gone = {h for e in rig.events if isinstance(e, BlockRemoved) for h in e.block_hashes}
        assert said <= gone


def _as_published(hashes):
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return {each: maybe_convert_block_hash(each) for each in hashes}


def test_two_engines_in_one_api_process(prometheus):
    """Definitions of the connector and ours meet on one registry without a clash."""
    made, _ = prometheus
    names = set(made._offloading_metric_defs)
    assert set(metric_definitions()) < names
    config = engine_config(
        {"spec_name": "UndercroftSpec", "spec_module_path": "undercroft.engines.vllm"}
    )
    with pytest.raises(Exception, match="host is missing"):
        OffloadingConnector(config, KVConnectorRole.WORKER, kv_cache_config((Group(),), 8))
