"""Runs a command of the store in this process: exit code, what it printed, its JSON document."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from undercroft.cli.main import main


@dataclass(frozen=True)
class Ran:
    code: int
    text: str
    errors: str

    @property
    def document(self) -> Any:
        return json.loads(self.text)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> Ran:
    """What `undercroft WORDS` does."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    out = capsys.readouterr()
    return Ran(code, out.out, out.err)
