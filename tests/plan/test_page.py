"""docs/how-to/size-my-cache.md shows what its command prints, on the trace that lies here."""

from __future__ import annotations

import re
import shlex

import pytest
from tests.cli.rig import ROOT

from undercroft.cli.main import main

PAGE = (ROOT / "docs" / "how-to" / "size-my-cache.md").read_text()


def test_the_first_command_prints_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last digit, from the second line on; what was assumed follows it."""
    command = re.search(r"^```sh\n(undercroft plan .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert command
    assert shown
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(shlex.split(command[1].replace("\\\n", " "))[1:]) == 0
    _, _, printed = capsys.readouterr().out.partition("\n")
    assert printed.startswith(shown[1].rstrip())
    assert "What was assumed" in printed


def test_the_pictures_are_there() -> None:
    """Each that the page shows."""
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert len(pictures) >= 2
    for picture in pictures:
        assert (ROOT / "docs" / "how-to" / picture).read_bytes().startswith(b"\x89PNG")
