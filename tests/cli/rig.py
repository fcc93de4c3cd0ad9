"""Run the command in a process of its own, as people do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with our sources first, and no settings of ours."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UNDERCROFT_")}
    kept.pop("NO_COLOR", None)
    path = [str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), **changes}


def undercroft(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 200,
) -> subprocess.CompletedProcess[str]:
    """`python -m undercroft WORDS`, to its end."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "undercroft", *words],
        env=environment(**(env or {})),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def undercroft_json(*words: str, code: int = 0, **how: Any) -> Any:
    """The JSON that the command prints with `--json`, whose exit code must be `code`."""
    done = undercroft(words[0], "--json", *words[1:], **how)
    assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
    return json.loads(done.stdout)
