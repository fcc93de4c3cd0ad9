"""`undercroft demo` and `bench`: scripts of the repository, with its words and its exit code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.cli.rig import ROOT, undercroft
from undercroft.cli import checkout, demo
from undercroft.cli.checkout import script
from undercroft.cli.main import main
from undercroft.cli.output import CommandFailed, Exit


def test_scripts_are_found_in_a_checkout_only(tmp_path: Path) -> None:
    """From an installed package there is one line that says where they are."""
    assert script("examples/demo.py") == ROOT / "examples" / "demo.py"
    with pytest.raises(CommandFailed, match="comes with the repository") as caught:
        script("examples/demo.py", root=tmp_path)
    assert caught.value.code is Exit.UNREACHABLE


def test_demo_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No vLLM: one line, exit code 3, and the target that installs it."""
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "vllm" else object())
    assert main(["demo"]) == 3
    err = capsys.readouterr().err
    assert "the demo needs vllm, not installed here" in err
    assert "make demo" in err


@pytest.mark.parametrize("name", ["demo", "bench"])
def test_all_words_are_the_scripts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also flags, in their order, with or without `--`."""
    became: list[list[str]] = []
    module = __import__(f"undercroft.cli.{name}", fromlist=["run"])
    monkeypatch.setattr(module, "become", lambda command: became.append(command) or 0)
    monkeypatch.setattr(demo, "find_spec", lambda _name: object())
    main([name, "a", "--json", "b", "--", "--help"])
    path = {"demo": "examples/demo.py", "bench": "bench/run.py"}[name]
    assert became[0][1:] == [str(ROOT / path), "a", "--json", "b", "--help"]


def test_bench_becomes_the_script() -> None:
    """Its output and its exit code: the list of cases, and wrong usage."""
    done = undercroft("bench", "--", "--list")
    assert done.returncode == 0, done.stderr
    assert "disk" in done.stdout
    assert undercroft("bench", "no-such-case").returncode == 2


def test_nothing_else_starts_programs() -> None:
    """`become` is the one place that replaces the process."""
    found = [
        path.name
        for path in Path(checkout.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith(("execv", "execl", "spawn"))
    ]
    assert found == ["checkout.py"]
