"""The Kubernetes manifests: settings that our code takes, and numbers that fit each other.

No cluster is asked. Settings go through the command's own parser and the library's own loader,
vLLM's options through vLLM's; sizes are compared as the kernel and the disk tier would.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_docs import vllm_flags
from undercroft.cli.flags import asked_for
from undercroft.cli.main import _parse, build_parser
from undercroft.engines.assemble import check_plugins
from undercroft.engines.vllm.version import SERVED
from undercroft.settings import Settings, load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
GIB = 1024**3
ENGINE_BYTES = 16 * GIB
"""What vLLM takes itself, at the least, of which this much may lie in /dev/shm:"""
ENGINE_SHARED_BYTES = 1 * GIB
CLOSING_S = 10
"""What ending takes beyond the drain and our own bound."""

_UNITS = {"": 1, "Ki": 1024, "Mi": 1024**2, "Gi": GIB, "Ti": 1024**4}


def in_bytes(quantity: str) -> int:
    """A Kubernetes quantity."""
    found = re.fullmatch(r"(\d+)(|Ki|Mi|Gi|Ti)", str(quantity))
    assert found, quantity
    return int(found[1]) * _UNITS[found[2]]


@cache
def documents() -> tuple[tuple[str, Mapping[str, Any]], ...]:
    return tuple(
        (path.name, document)
        for path in sorted(FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    )


@dataclass(frozen=True)
class Workload:
    """What runs vLLM."""

    file: str
    whole: Mapping[str, Any]

    @property
    def pod(self) -> Mapping[str, Any]:
        spec: Mapping[str, Any] = self.whole["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Mapping[str, Any]:
        (container,) = self.pod["containers"]
        assert isinstance(container, Mapping)
        return container

    @property
    def environ(self) -> dict[str, str]:
        return {entry["name"]: entry["value"] for entry in self.container.get("env", [])}

    def words(self) -> list[str]:
        assert self.container["command"][0] == "undercroft"
        return [*self.container["command"][1:], *self.container["args"]]

    def asked(self) -> Any:
        return asked_for(_parse(build_parser(["serve"]), self.words()))

    def settings(self) -> Settings:
        return load(self.asked().extra, environ=self.environ)

    def option(self, flag: str) -> str:
        """The value of one of vLLM's options, written with `=`."""
        found: list[str] = [w for w in self.asked().rest if w.startswith(f"{flag}=")]
        return found[-1].partition("=")[2]

    def volume_at(self, path: str) -> Mapping[str, Any]:
        """The volume or claim that is mounted there, or above."""
        mounts = [
            m for m in self.container["volumeMounts"] if Path(path).is_relative_to(m["mountPath"])
        ]
        name = max(mounts, key=lambda m: len(m["mountPath"]))["name"]
        claims = self.whole["spec"].get("volumeClaimTemplates", [])
        claimed = {c["metadata"]["name"]: {"claim": c["spec"]} for c in claims}
        given = {v["name"]: v for v in self.pod["volumes"]}
        assert not set(claimed) & set(given)
        volume: Mapping[str, Any] = {**claimed, **given}[name]
        return volume


def workloads() -> list[Workload]:
    return [Workload(f, d) for f, d in documents() if d["kind"] in ("StatefulSet", "Deployment")]


each_workload = pytest.mark.parametrize("workload", workloads(), ids=lambda w: w.file)


def test_every_manifest_is_seen() -> None:
    """Each document has what Kubernetes wants of all of them; both workloads are among them."""
    for file, document in documents():
        assert {"apiVersion", "kind", "metadata"} <= set(document), file
        assert re.fullmatch(r"[a-z0-9-]+", document["metadata"]["name"])
    assert {w.file for w in workloads()} == {"statefulset.yaml", "shared-disk.yaml"}


@each_workload
def test_settings_are_taken_by_our_own_code(workload: Workload) -> None:
    """As `undercroft serve` reads words and environment; the rest are options of vLLM's."""
    settings = workload.settings()
    check_plugins(settings)
    assert [tier.type for tier in settings.tiers] == ["disk"]
    rest = workload.asked().rest
    assert {word.partition("=")[0] for word in rest} <= vllm_flags()
    assert all("=" in word for word in rest)


@each_workload
def test_host_memory_fits_what_the_container_gets(workload: Workload) -> None:
    """`host` and vLLM's own into /dev/shm, that and vLLM's processes into the memory limit."""
    host_bytes = workload.settings().host_bytes
    shared = workload.volume_at("/dev/shm")["emptyDir"]
    assert shared["medium"] == "Memory"
    assert in_bytes(shared["sizeLimit"]) >= host_bytes + ENGINE_SHARED_BYTES
    resources = workload.container["resources"]
    limit = in_bytes(resources["limits"]["memory"])
    assert limit >= math.ceil(1.05 * host_bytes) + ENGINE_BYTES
    assert limit > in_bytes(shared["sizeLimit"])
    assert in_bytes(resources["requests"]["memory"]) == limit


@each_workload
def test_the_cache_lies_on_a_disk_that_lasts_and_is_large_enough(workload: Workload) -> None:
    """Not in the container's own file system, and a claim holds the capacity and the floor."""
    (tier,) = workload.settings().tiers
    volume = workload.volume_at(tier.options["path"])
    assert volume.keys() & {"hostPath", "claim"}
    if "hostPath" in volume:
        assert volume["hostPath"]["type"] == "Directory", "or an unmounted disk would be `/`"
        assert volume["hostPath"]["path"] in (FOLDER / workload.file).read_text().split("\napi")[0]
        return
    claim = in_bytes(volume["claim"]["resources"]["requests"]["storage"])
    floor = int(tier.options.get("free_space_floor", GIB))
    assert tier.capacity_bytes is not None
    assert claim >= 1.08 * (tier.capacity_bytes + floor), "file systems take some of it"
    by_name = {d["metadata"]["name"]: d for _, d in documents() if d["kind"] == "StorageClass"}
    assert by_name[volume["claim"]["storageClassName"]]["volumeBindingMode"] == (
        "WaitForFirstConsumer"
    )


def test_the_local_disk_can_be_claimed() -> None:
    """The volume is of the class that the StatefulSet asks for, and not smaller."""
    (volume,) = (d["spec"] for _, d in documents() if d["kind"] == "PersistentVolume")
    (owner,) = (w for w in workloads() if w.whole["kind"] == "StatefulSet")
    claim = owner.volume_at("/cache/kv")["claim"]
    assert volume["storageClassName"] == claim["storageClassName"]
    assert in_bytes(volume["capacity"]["storage"]) >= in_bytes(
        claim["resources"]["requests"]["storage"]
    )
    assert volume["persistentVolumeReclaimPolicy"] == "Retain"


@each_workload
def test_the_end_has_the_time_it_takes(workload: Workload) -> None:
    """Sleep, drain and our own close fit the grace period; without a drain vLLM kills at once."""
    (sleep,) = re.findall(r"\d+", workload.container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = int(workload.option("--shutdown-timeout"))
    settings = workload.settings()
    assert drain_s > settings.shutdown_deadline_s + 1
    grace_s = workload.pod["terminationGracePeriodSeconds"]
    assert grace_s >= int(sleep) + drain_s + settings.shutdown_deadline_s + CLOSING_S


@each_workload
def test_one_user_for_all(workload: Workload) -> None:
    """Nobody runs as root, and all that touch the directory are the same user."""
    security = workload.pod["securityContext"]
    assert security["runAsNonRoot"]
    assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"]
    assert {w.pod["securityContext"]["runAsUser"] for w in workloads()} == {security["runAsUser"]}
    for container in [workload.container, *workload.pod.get("initContainers", [])]:
        assert "runAsUser" not in container["securityContext"]
    assert workload.pod["enableServiceLinks"] is False


@each_workload
def test_probes_and_ports(workload: Workload) -> None:
    """vLLM's `/health`, on the port that vLLM listens on."""
    from vllm.entrypoints.serve.instrumentator.health import router

    container = workload.container
    assert container["ports"] == [{"name": "http", "containerPort": 8000}]
    paths = {getattr(route, "path", "") for route in router.routes}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in paths
        assert asked["port"] == "http"
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800


def test_selectors_find_their_pods() -> None:
    """Services, workloads and the monitor mean the pods that there are."""
    labels = [w.whole["spec"]["template"]["metadata"]["labels"] for w in workloads()]
    for workload in workloads():
        assert workload.whole["spec"]["selector"]["matchLabels"] in labels
    for file, document in documents():
        if document["kind"] == "Service":
            assert document["spec"]["selector"] in labels, file
            assert document["spec"]["ports"][0]["targetPort"] == "http"
        if document["kind"] == "PodMonitor":
            (expression,) = document["spec"]["selector"]["matchExpressions"]
            assert [{expression["key"]: value} for value in expression["values"]] == sorted(
                labels, key=lambda each: each["app"]
            )
            assert document["spec"]["podMetricsEndpoints"][0]["port"] == "http"


def test_an_update_of_replicas_on_one_disk_needs_no_gpu_more() -> None:
    """One goes before its successor comes, which takes its part of the disk over."""
    (shared,) = (w for w in workloads() if w.whole["kind"] == "Deployment")
    assert shared.whole["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert shared.whole["spec"]["replicas"] > 1


@each_workload
def test_commands_of_init_containers_are_ours(workload: Workload) -> None:
    """They parse, name the store that the engine uses, and never keep the pod from starting."""
    (tier,) = workload.settings().tiers
    for container in workload.pod.get("initContainers", []):
        shell, flag, line = container["command"]
        assert (shell, flag) == ("sh", "-c")
        command, _, otherwise = line.partition(" || ")
        assert otherwise == "true"
        program, *words = command.split()
        assert program == "undercroft"
        args = build_parser(words[:1]).parse_args(words)
        assert args.path == tier.options["path"]


def dockerfile() -> Iterator[tuple[str, str]]:
    for line in (FOLDER / "Dockerfile").read_text().splitlines():
        if line and not line.startswith("#"):
            instruction, _, rest = line.partition(" ")
            yield instruction, rest


def test_the_image_is_made_of_what_there_is() -> None:
    """A vLLM that is served; all that the package is built from is copied; `serve` is the entry."""
    lines = list(dockerfile())
    assert lines[0][0] == "FROM"
    version = lines[0][1].partition(":v")[2]
    assert version.rpartition(".")[0] in SERVED
    images = {w.container["image"] for w in workloads()}
    assert images == {f"vllm-undercroft:{version}"}
    copied = [word for name, rest in lines if name == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= set(copied)
    assert lines[-1] == ("ENTRYPOINT", '["undercroft", "serve"]')
    assert not re.search(r"index-url|https?://", (FOLDER / "Dockerfile").read_text())
