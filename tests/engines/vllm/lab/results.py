"""What came of each case of the model matrix, written down as it comes."""

import json
from pathlib import Path
from typing import Any

from tests.engines.vllm.lab.cases import CASES, OWN_CASES

FAILED = "its test failed in the last run"


class Results:
    """The file of results; a case that began and did not end well stands in it as failed.

    Args:
        path: The file; None: nothing is written down.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = {case.name: (case.shape, case.feature) for case in (*CASES, *OWN_CASES)}

    def begin(self, name: str) -> None:
        """Whatever an earlier run gave holds no more, even if this process is killed now."""
        self.note(name, "failed", why=FAILED)

    def note(self, name: str, outcome: str, **more: Any) -> None:
        """What came of it: `served`, `refused`, `not run` or `failed`, the last three with `why`.

        Cases that no longer exist are dropped from the file.
        """
        shape, feature = self._known[name]
        if self._path is None:
            return
        before = json.loads(self._path.read_text()) if self._path.exists() else {}
        merged = {case: found for case, found in before.items() if case in self._known}
        merged[name] = {"shape": shape, "feature": feature, "outcome": outcome} | more
        self._path.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
