"""Nothing that is read becomes code: no pickles, no `eval`, no loaders that can run things."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "undercroft"
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
MODULES |= {"joblib", "yaml", "code", "codeop", "imp", "pty"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
ATTRIBUTES = {
    ("np", "load"),
    ("numpy", "load"),
    ("torch", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("runpy", "run_path"),
    ("importlib", "import_module"),
}


def found(text: str) -> Iterator[str]:
    """What in a module could turn data into code."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
        elif isinstance(node, ast.Call):
            yield from _called(node)
            continue
        else:
            continue
        yield from (f"line {node.lineno}: import {name}" for name in names if name in MODULES)


def _called(node: ast.Call) -> Iterator[str]:
    called = node.func
    if isinstance(called, ast.Name) and called.id in CALLS:
        yield f"line {node.lineno}: {called.id}()"
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        whole = (called.value.id, called.attr)
        yield from [f"line {node.lineno}: {'.'.join(whole)}()"] if whole in ATTRIBUTES else []
    for word in node.keywords:
        if word.arg == "allow_pickle" or (
            word.arg == "shell" and getattr(word.value, "value", None) is not False
        ):
            yield f"line {node.lineno}: {word.arg}="


def test_nothing_read_is_run() -> None:
    """In the whole library, `testing/` included."""
    paths = sorted(SRC.rglob("*.py"))
    assert len(paths) > 100
    wrong = [f"{p.relative_to(SRC)}: {what}" for p in paths for what in found(p.read_text())]
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "import yaml.loader",
        "eval(x)",
        "exec(compile(x, '', 'exec'))",
        "torch.load(x)",
        "np.load(x)",
        "f(x, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_what_would_run_data_is_seen(text: str) -> None:
    """The scan can fail."""
    assert list(found(text))


def test_what_does_not_is_fine() -> None:
    """JSON, TOML and struct make values only."""
    assert not list(
        found("import json, tomllib, struct\njson.loads(x)\nself.eval(x)\nre.compile(x)")
    )
