"""docs/how-to/size-my-cache.md shows what its command prints, on the trace that lies here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image
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


def test_the_readme_shows_what_its_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The advice, to the last digit; the page makes the pictures by the same words."""
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"^```sh\n(undercroft plan .*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert command
    assert command[0] in PAGE
    shown = re.search(r"^```text\n(.*?)^```", readme[command.end() :], re.MULTILINE | re.DOTALL)
    assert shown
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "300")
    words = shlex.split(command[1].replace("\\\n", " "))
    words[words.index("--out") + 1] = str(tmp_path)
    assert main(words[1:]) == 0
    assert f"\nRecommended\n{shown[1]}" in capsys.readouterr().out
    for name in ("hits", "levels"):
        kept = ROOT / "docs" / "how-to" / "images" / f"plan-{name}.png"
        assert kept.stat().st_size < 100_000
        with Image.open(kept) as old, Image.open(tmp_path / f"{name}.png") as new:
            assert old.size == new.size
    assert "docs/how-to/images/plan-hits.png" in readme


def test_the_pictures_are_there() -> None:
    """Each that the page shows."""
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert len(pictures) >= 2
    for picture in pictures:
        assert (ROOT / "docs" / "how-to" / picture).read_bytes().startswith(b"\x89PNG")
