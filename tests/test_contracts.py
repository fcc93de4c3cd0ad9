"""The import contracts in pyproject.toml catch what they are there to catch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = "from importlinter.cli import lint_imports_command; lint_imports_command()"

# module to write -> (what it says, the line the linter must print)
FORBIDDEN = {
    "policies/bad_engine.py": (
        "import torch\n",
        "undercroft.policies.bad_engine -> torch",
    ),
    "policies/bad_sideways.py": (
        "from undercroft.tiers.base import Tier\n",
        "undercroft.policies.bad_sideways -> undercroft.tiers.base",
    ),
    "tiers/bad_upwards.py": (
        "import undercroft.hierarchy\n",
        "undercroft.tiers.bad_upwards -> undercroft.hierarchy",
    ),
    "hierarchy/bad_testing.py": (
        "import undercroft.testing\n",
        "undercroft.hierarchy.bad_testing -> undercroft.testing",
    ),
    "bad_bottom.py": (
        "import vllm.v1\n",
        "undercroft.bad_bottom -> vllm",
    ),
}
ALLOWED = {
    "engines/good_engine.py": "import torch\nimport vllm.v1\nimport undercroft.hierarchy\n",
    "testing/good_suite.py": "import torch\nimport undercroft.engines\n",
    "hierarchy/good_downwards.py": "import undercroft.tiers.base\nimport undercroft.errors\n",
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, with the contracts beside it."""
    shutil.copytree(
        ROOT / "src" / "undercroft",
        tmp_path / "undercroft",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(copy: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, "--no-cache", "--no-logo"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_what_is_allowed_passes(copy: Path) -> None:
    """Downward imports pass, engines may import an engine, testing may import anything."""
    for name, text in ALLOWED.items():
        (copy / "undercroft" / name).write_text(text)
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_what_is_forbidden_is_named(copy: Path) -> None:
    """Each forbidden import fails the check and is named in its output."""
    for name, (text, _) in FORBIDDEN.items():
        (copy / "undercroft" / name).write_text(text)
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    missing = [line for _, line in FORBIDDEN.values() if line not in done.stdout]
    assert not missing, done.stdout


def test_a_new_room_needs_a_place(copy: Path) -> None:
    """A package that no layer names fails the check: nobody can build outside the rules."""
    (copy / "undercroft" / "attic").mkdir()
    (copy / "undercroft" / "attic" / "__init__.py").write_text("")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "attic" in done.stdout


ENGINE_ROOMS = {"vllm", "accelerator"}
"""Below `engines`; they import torch."""


def test_importing_does_nothing() -> None:
    """No thread, no file and no engine comes of importing all that needs no engine."""
    source = ROOT / "src"
    files = sorted((source / "undercroft").rglob("*.py"))
    names = [
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if path.parent.name not in ENGINE_ROOMS
    ]
    assert len(names) > 50
    code = (
        "import hypothesis, importlib, logging, numpy, os, pytest, sys, threading\n"
        "before = sorted(os.listdir('/proc/self/fd'))\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "assert threading.active_count() == 1\n"
        "assert sorted(os.listdir('/proc/self/fd')) == before\n"
        "assert not logging.getLogger('undercroft').handlers\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, check=False, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
