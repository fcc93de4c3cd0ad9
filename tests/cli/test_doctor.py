"""`undercroft doctor`: good set-ups are good, and each broken one is told, with what to do."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.cli.rig import undercroft
from tests.engines.vllm.lab.engine import environment
from tests.engines.vllm.lab.models import model_path
from undercroft.cli import check_disk, doctor
from undercroft.cli.check_disk import mount_of, try_out
from undercroft.cli.main import main
from undercroft.clock import SystemClock
from undercroft.errors import KvError, TierFull
from undercroft.keys import ChunkKey, Namespace
from undercroft.settings import Bound, HostLimits, load
from undercroft.tiers.disk import DiskTier

LOOKED: dict[str, Any] = {
    "version": "0.32.0",
    "doubt": None,
    "device": "cpu",
    "device_served": True,
}
MODEL: dict[str, Any] = LOOKED | {
    "refused": None,
    "dtype": "bfloat16",
    "block_tokens": 32,
    "hash_algorithm": "sha256",
    "prefix_caching": True,
    "revision": None,
    "max_model_tokens": 4096,
    "replicas": 1,
    "chunk": {"bytes": 65536, "tokens": 32},
}


@pytest.fixture
def examined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[tuple[str, str, str]], list[dict[str, Any]]]]:
    """Runs doctor with what vLLM is said to be; code, (severity, check, message), and all facts."""

    def run(*words: str, looked: dict[str, Any] = LOOKED) -> Any:
        monkeypatch.setattr(doctor, "look_at", lambda _words: looked)
        code = main(["doctor", "--json", *words])
        found = json.loads(capsys.readouterr().out)["findings"]
        return code, [(f["severity"], f["check"], f["message"]) for f in found], found

    return run


def worst_of(found: list[tuple[str, str, str]], check: str) -> tuple[str, str]:
    order = ("ok", "note", "warning", "error")
    severity, _, message = max((f for f in found if f[1] == check), key=lambda f: order.index(f[0]))
    return severity, message


# --- for real ---


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("disk")
    return folder


@pytest.fixture(scope="module")
def real(disk: Path) -> dict[str, CompletedProcess[str]]:
    """A good set-up and one that an engine would refuse; side by side, for a core each is slow."""
    words = ["doctor", str(model_path("llama")), "--host", "32MiB", "--block-size", "32"]
    good = ["--json", "--disk", f"{disk}:8MiB", "--dtype", "float32", "--max-model-len", "4096"]
    good += ["--shutdown-timeout", "10"]
    spread = ["-tp", "2", "--nnodes", "2"]
    bound = environment(VLLM_CPU_OMP_THREADS_BIND="0|1")
    with ThreadPoolExecutor(2) as pool:
        runs = {
            "good": pool.submit(undercroft, *words, *good, env=environment(), timeout_s=280),
            "refused": pool.submit(undercroft, *words, *spread, env=bound, timeout_s=280),
        }
        return {name: run.result() for name, run in runs.items()}


@pytest.mark.engine
def test_a_good_set_up_is_good(real: dict[str, CompletedProcess[str]], disk: Path) -> None:
    """Real vLLM, model and disk: exit code 0, every part looked at, nothing left behind."""
    done = real["good"]
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    found = {(f["check"], f["severity"]) for f in shown["findings"]}
    assert found == {
        (c, "ok") for c in ("settings", "disk", "memory", "engine", "model", "keys", "namespace")
    }
    fits = next(f["facts"]["tokens"] for f in shown["findings"] if "tokens" in f["facts"])
    # 4 layers, K and V, 2 heads of 32 float32: 2 KiB a token
    assert fits == {"host": 16384, "disk": 4096}
    assert shown["worst"] == "ok"
    assert list(disk.iterdir()) == []


@pytest.mark.engine
def test_what_an_engine_would_refuse_is_refused_in_seconds(
    real: dict[str, CompletedProcess[str]],
) -> None:
    """Ranks on two hosts: the line that an engine shows only after the model is loaded."""
    done = real["refused"]
    assert done.returncode == 1, done.stdout
    assert "are on 2 hosts" in done.stdout


# --- the disk ---


def test_a_folder_that_is_missing_is_mistyped_or_not_mounted(examined: Any, tmp_path: Path) -> None:
    """Below a missing folder: a warning that says so. Nothing is made."""
    path = tmp_path / "nvme" / "kv"
    code, found, _ = examined("--host", "32MiB", "--disk", f"{path}:8MiB")
    severity, message = worst_of(found, "disk")
    assert (code, severity) == (0, "warning")
    assert f"neither it nor {path.parent} exists, so it may be mistyped" in message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_on_the_root_file_system_is_warned_about(
    examined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is not mounted: the folder would silently fill `/`."""
    root = check_disk.Mount(Path("/"), "ext4", "/dev/sda1")
    monkeypatch.setattr(check_disk, "mount_of", lambda _place: root)
    _, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}/kv:8MiB")
    severity, message = worst_of(found, "disk")
    assert severity == "warning"
    assert "would lie on the root ext4 file system" in message
    assert "is the disk mounted?" in message
    other = check_disk.Mount(tmp_path, "xfs", "/dev/nvme0n1")
    monkeypatch.setattr(check_disk, "mount_of", lambda _place: other)
    _, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}/kv:8MiB")
    assert worst_of(found, "disk")[0] == "note"


@pytest.mark.parametrize(("kind", "word"), [("tmpfs", "in memory"), ("nfs4", "shared file system")])
def test_file_systems_that_are_no_local_disk(
    examined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, word: str
) -> None:
    """Memory forgets, and shared file systems may not lock."""
    monkeypatch.setattr(
        check_disk, "mount_of", lambda _place: check_disk.Mount(tmp_path, kind, "somewhere")
    )
    _, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}:8MiB")
    assert worst_of(found, "disk")[0] == "warning"
    assert word in worst_of(found, "disk")[1]


def test_a_capacity_beyond_the_disk_is_an_error(examined: Any, tmp_path: Path) -> None:
    """Wrong size: both numbers, and what to do."""
    code, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}:4PiB")
    severity, message = worst_of(found, "disk")
    assert (code, severity) == (1, "error")
    assert "lower capacity" in message


def test_a_disk_with_less_room_than_capacity_is_a_warning(examined: Any, tmp_path: Path) -> None:
    """It fits the file system, but others hold it."""
    status = os.statvfs(tmp_path)
    total = status.f_blocks * status.f_frsize - (2 << 30)
    code, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}:{total}")
    severity, message = worst_of(found, "disk")
    assert (code, severity) == (0, "warning")
    assert "it will not get beyond" in message


def test_a_tier_that_goes_wrong_on_purpose_is_a_warning(examined: Any, tmp_path: Path) -> None:
    """The disk itself is tried, and nothing of it goes wrong meanwhile."""
    control = tmp_path / "faults.json"
    control.write_text('{"faults": [{"effect": "error"}]}')
    inner = {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "8MiB"}
    tiers = [{"type": "faulty", "control": str(control), "inner": inner}]
    code, found, _ = examined("--host", "32MiB", "--set", f"tiers={json.dumps(tiers)}")
    assert code == 0
    assert worst_of(found, "tiers")[0] == "warning"
    assert "will go wrong on purpose" in worst_of(found, "tiers")[1]
    assert worst_of(found, "disk")[0] != "error"


def test_a_path_below_a_file_is_an_error(examined: Any, tmp_path: Path) -> None:
    """As the engine says it, but before it."""
    (tmp_path / "kv").write_text("a file")
    code, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}/kv/deeper:8MiB")
    assert (code, worst_of(found, "disk")[0]) == (1, "error")
    assert "is not a folder, or lies below a file" in worst_of(found, "disk")[1]


def test_a_root_that_is_a_link_is_an_error(examined: Any, tmp_path: Path) -> None:
    """The disk tier refuses it, so doctor does."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "undercroft-v1").symlink_to(tmp_path / "elsewhere")
    code, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}:8MiB")
    assert (code, worst_of(found, "disk")[0]) == (1, "error")


def _tiers(path: str, capacity: str, floor: str) -> str:
    tier = {"type": "disk", "path": path, "capacity": capacity, "free_space_floor": floor}
    return f"tiers={json.dumps([tier])}"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("has_chunks", [True, False])
def test_a_read_only_folder(
    examined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, has_chunks: bool
) -> None:
    """An error with the system's reason; with chunks a warning, as an engine would serve them."""
    if has_chunks:
        (tmp_path / "undercroft-v1").mkdir(mode=0o700)

    def refuse(*_: object, **__: object) -> str:
        raise OSError(code, os.strerror(code), str(tmp_path))

    monkeypatch.setattr(check_disk.tempfile, "mkdtemp", refuse)
    exit_code, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}:8MiB")
    severity, message = worst_of(found, "disk")
    assert (exit_code, severity) == ((0, "warning") if has_chunks else (1, "error"))
    assert os.strerror(code) in message
    assert ("nothing new can be stored" in message) is has_chunks


def test_the_trial_uses_no_more_than_half_and_leaves_nothing(tmp_path: Path) -> None:
    """Chunks of real bytes, through the tier, in a folder that goes."""
    (tier,) = load(
        {
            "host": "32MiB",
            "tiers": [{"type": "disk", "path": str(tmp_path), "capacity": "16MiB"}],
        }
    ).tiers
    speed = try_out(tier, tmp_path, SystemClock())
    assert speed.num_bytes == 8 << 20
    assert speed.write_bytes_per_s > 0
    assert speed.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_who_would_move_the_bytes_is_tried_and_told(
    examined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, or a process that was really started; a warning if it cannot be, with the reason."""

    def look() -> tuple[str, str, list[dict[str, Any]]]:
        tier = {"type": "disk", "path": str(tmp_path), "capacity": "8MiB", "mover_process": True}
        words = ("--host", "32MiB", "--set", f"tiers={json.dumps([tier])}")
        _, found, facts = examined(*words)
        return *worst_of(found, "disk"), [f["facts"] for f in facts if "tested_bytes" in f["facts"]]

    _, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}:8MiB")
    assert any(" by 4 threads, " in message for _, _, message in found)
    _, _, facts = look()
    assert [f["moved_elsewhere"] for f in facts] == [True]
    monkeypatch.setattr(sys, "executable", "/nowhere")
    severity, message, facts = look()
    assert severity == "warning"
    assert "no mover process (it cannot be started: " in message
    assert "No such file" in message
    assert [f["moved_elsewhere"] for f in facts] == [False]


def test_the_trial_leaves_the_chunks_of_others_alone(examined: Any, tmp_path: Path) -> None:
    """A shared folder is as it was: no key space more, no byte less."""
    tier = _stored(tmp_path)
    seen = _all_files(tmp_path)
    try:
        code, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}:8MiB")
    finally:
        tier.close()
    assert code == 0
    assert seen
    assert _all_files(tmp_path) == seen
    assert any("held from earlier" in message for _, _, message in found)


def _stored(path: Path) -> DiskTier:
    tier = DiskTier(
        str(path),
        name="disk",
        namespace=Namespace({"a": 1}),
        capacity_bytes=8 << 20,
        clock=SystemClock(),
    )
    tier.write_from(ChunkKey(b"k"), memoryview(bytes(1 << 20)))
    return tier


def _all_files(path: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_size) for p in path.rglob("*") if p.is_file())


def test_bytes_that_differ_are_told(
    examined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that gives back other bytes than were written is an error, never a speed."""

    def lying(_self: object, _key: bytes, out: memoryview) -> bool:
        out[0] ^= 1
        return True

    monkeypatch.setattr(DiskTier, "read_into", lying)
    code, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}:8MiB")
    assert (code, worst_of(found, "disk")[0]) == (1, "error")
    assert "other bytes than were written" in worst_of(found, "disk")[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "severity"), [(TierFull("no room"), "warning"), (KvError("broken"), "error")]
)
def test_a_full_disk_is_a_warning_a_broken_one_an_error(
    examined: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    severity: str,
) -> None:
    """Full may pass; broken does not."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(DiskTier, "write_from", fail)
    _, found, _ = examined("--host", "32MiB", "--disk", f"{tmp_path}:8MiB")
    assert worst_of(found, "disk")[0] == severity


@pytest.mark.parametrize(
    ("place", "point", "kind"),
    [("/", "/", "ext4"), ("/nvme/kv", "/nvme", "xfs"), ("/nvme two/kv", "/nvme two", "btrfs")],
)
def test_the_nearest_mount_counts(tmp_path: Path, place: str, point: str, kind: str) -> None:
    """The longest mount point above a path; spaces as the kernel writes them."""
    info = tmp_path / "mountinfo"
    info.write_text(
        "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 259:1 / /nvme rw - xfs /dev/nvme0n1 rw\n"
        "31 22 259:2 / /nvme\\040two rw shared:2 master:3 - btrfs /dev/nvme1n1 rw\n"
        "a line that says nothing\n"
    )
    found = mount_of(Path(place), info)
    assert found is not None
    assert (str(found.point), found.kind) == (point, kind)
    assert mount_of(Path("/"), tmp_path / "missing") is None


# --- memory ---


def test_a_small_shm_is_an_error_that_names_it(
    examined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container started without --shm-size."""
    tiny = HostLimits((Bound("/dev/shm", 64 << 20, "size 64 MiB, 64 MiB free"),))
    monkeypatch.setattr(doctor, "host_limits", lambda: tiny)
    code, found, facts = examined("--host", "1GiB")
    severity, message = worst_of(found, "memory")
    assert (code, severity) == (1, "error")
    assert "host is 1 GiB" in message
    assert "bounded by /dev/shm" in message
    memory = next(f for f in facts if f["check"] == "memory")
    assert memory["facts"]["available_bytes"] == 64 << 20


def test_replicas_need_their_memory_each(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four replicas on a host take four times `host`."""
    limits = HostLimits((Bound("/proc/meminfo", 3 << 30, "MemAvailable"),))
    monkeypatch.setattr(doctor, "host_limits", lambda: limits)
    code, found, _ = examined("M", "--host", "1GiB", looked=MODEL | {"replicas": 4})
    assert (code, worst_of(found, "memory")[0]) == (1, "error")
    assert "4 replicas of 1 GiB each" in worst_of(found, "memory")[1]


# --- the engine, the model, the names ---


@pytest.mark.parametrize(
    ("looked", "check", "severity", "line"),
    [
        ({"failed": "vLLM is not installed"}, "engine", "error", "not installed"),
        (MODEL | {"doubt": "written for vLLM 0.32"}, "engine", "warning", "written for"),
        (MODEL | {"device": "cuda", "device_served": False}, "engine", "error", "cuda platform"),
        (MODEL | {"refused": "vLLM refuses these: x"}, "model", "error", "vLLM refuses"),
        (MODEL | {"prefix_caching": False}, "model", "error", "prefix caching is off"),
        (MODEL | {"max_model_tokens": 99999}, "model", "warning", "raise host"),
        (MODEL | {"chunk": {"bytes": 64 << 20, "tokens": 32}}, "model", "error", "one chunk"),
        (MODEL | {"chunk": None, "unforeseen": "why"}, "model", "note", "why"),
        (MODEL | {"hash_algorithm": "xxhash"}, "keys", "warning", "PYTHONHASHSEED"),
        (MODEL, "namespace", "warning", "set model_id"),
    ],
)
def test_what_is_known_of_the_engine_is_judged(
    examined: Any,
    monkeypatch: pytest.MonkeyPatch,
    looked: dict[str, Any],
    check: str,
    severity: str,
    line: str,
) -> None:
    """Each thing that would make a start useless, with its severity and the exit code of it."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    code, found, _ = examined("some/model", "--host", "32MiB", looked=looked)
    assert worst_of(found, check)[0] == severity
    assert any(line in message for _, c, message in found if c == check)
    assert code == (1 if severity == "error" else 0)


@pytest.mark.parametrize(("timeout_s", "with_disk"), [(0, True), (0, False), (10, True)])
def test_an_engine_that_is_killed_at_its_end(
    examined: Any, tmp_path: Path, timeout_s: int, *, with_disk: bool
) -> None:
    """vLLM's default leaves chunks no time to get to a disk: a note, where there is one."""
    words = ["M", "--host", "32MiB", *(["--disk", f"{tmp_path}:8MiB"] if with_disk else [])]
    _, found, _ = examined(*words, looked=MODEL | {"shutdown_timeout_s": timeout_s})
    told = [s for s, c, m in found if c == "model" and "--shutdown-timeout" in m]
    assert told == (["note"] if with_disk and not timeout_s else [])


def test_a_seed_has_to_be_everybodys(examined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONHASHSEED changes keys, so all replicas need the same."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    _, found, _ = examined("M", "--host", "32MiB", looked=MODEL)
    severity, message = worst_of(found, "keys")
    assert severity == "note"
    assert "all have the same value" in message


def test_a_model_id_settles_whose_weights_they_are(examined: Any) -> None:
    """The user says it, and the warning goes."""
    words = ["some/model", "--host", "32MiB", "--set", "model_id=ours-3"]
    _, found, _ = examined(*words, looked=MODEL)
    assert worst_of(found, "namespace")[0] == "ok"


# --- settings ---


def test_wrong_settings_have_their_own_exit_code(examined: Any) -> None:
    """And the rest is looked at all the same."""
    code, found, _ = examined("--host", "32MiB", "--set", "policy=lfu")
    assert code == 2
    assert worst_of(found, "settings")[0] == "error"
    assert worst_of(found, "engine")[0] == "ok"


def test_without_settings_the_machine_is_looked_at(
    examined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`undercroft doctor` alone is of use."""
    for name in [n for n in os.environ if n.startswith("UNDERCROFT_")]:
        monkeypatch.delenv(name)
    code, found, _ = examined()
    assert code == 0
    assert worst_of(found, "settings")[0] == "note"
    assert worst_of(found, "memory")[0] == "note"


def test_settings_of_the_environment_count(
    examined: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As they do for the engine."""
    monkeypatch.setenv("UNDERCROFT_HOST", "32MiB")
    monkeypatch.setenv("UNDERCROFT_TIERS", _tiers(str(tmp_path), "8MiB", "0")[6:])
    code, found, _ = examined()
    assert code == 0
    assert ("ok", "settings", "host 32 MiB, disk 8 MiB") in found
