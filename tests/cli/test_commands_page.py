"""docs/reference/commands.md has a section for every command, with all it takes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from tests.cli.rig import ROOT
from undercroft.cli.main import COMMANDS, INTERRUPTED, OWN_FAULT, build_parser
from undercroft.cli.output import Exit

PAGE = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
SHARED = {"--help", "--json", "--no-color"}


def section(name: str) -> str:
    found = re.search(rf"^## `{name}`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no section for {name}"
    return found[1]


def spans(text: str) -> str:
    """What is in code: spans and blocks."""
    return " ".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))


def actions(name: str) -> Iterator[argparse.Action]:
    (subparsers,) = (
        a for a in build_parser((name,))._actions if isinstance(a, argparse._SubParsersAction)
    )
    yield from subparsers.choices[name]._actions


def test_every_command_has_its_section_and_no_other() -> None:
    """In code's own words; order is the page's own."""
    assert sorted(re.findall(r"^## `(\w+)`$", PAGE, re.MULTILINE)) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_a_command_is_in_its_section(name: str) -> None:
    """As code. What all commands take is at the top."""
    text = spans(section(name) + (_store() if name in _of_store() else ""))
    missing = [
        flag
        for action in actions(name)
        for flag in action.option_strings
        if flag.startswith("--") and flag not in SHARED and not _has(text, flag)
    ]
    assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_a_section_is_one_of_the_command(name: str) -> None:
    """In examples nothing is called that is gone; vLLM's own options may stand there."""
    known = {flag for action in actions(name) for flag in action.option_strings}
    examples = re.findall(r"^undercroft .*$", section(name), re.MULTILINE)
    for line in examples:
        words = line.partition(" -- ")[0].split()
        assert words[1] == name
        unknown = {w for w in words if w.startswith("--")} - known
        assert not unknown or name in ("serve", "doctor"), f"{line}: {unknown}"
    assert examples, f"{name} has no example"


def test_shared_flags_and_exit_codes_are_at_the_top() -> None:
    """All codes that any command ends with, and what all take."""
    top = PAGE[: PAGE.index("## ")]
    for flag in SHARED:
        assert f"`{flag}`" in top
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", top, re.MULTILINE)]
    assert codes == [*map(int, Exit), OWN_FAULT, INTERRUPTED]


def _has(text: str, flag: str) -> bool:
    return re.search(rf"{flag}(?![\w-])", text) is not None


def _of_store() -> set[str]:
    return {"ls", "du", "inspect", "verify", "rm", "gc", "explain"}


def _store() -> str:
    """What all commands about a store take is said before them."""
    start = PAGE.index("## Commands about a store on disk")
    return PAGE[start : PAGE.index("## `ls`")]
